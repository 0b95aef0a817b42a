"""The parts of a model that take turns: each round carries one of them (`--sync diloco:H,stream=P`).

Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, section 2.2): P fragments, each synchronised every H steps,
one after the other. The paper's are whole layers, in a row or strided, which makes little difference to its losses. A
fragment is a run of tensors in definition order here: so its buckets are few and full. The largest is as small as whole
tensors in such runs allow, for that is what is on the air at once. Float buffers travel in every round: they are small,
and forward passes move all of them.

With `,random` parts are drawn from the values of all tensors (`drawn_parts.py`).
"""

from collections.abc import Sequence

from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.codecs.spec import CodecSpec
from meshwire.model.drawn_parts import DrawnParts
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.schedule import Stretch, Travel, refusal
from meshwire.sync_modes.mode import SyncSettings


def fragments_travel(tensors: Sequence[TensorSpec], sync: SyncSettings) -> Travel | None:
    """What travels in which rounds (T1); None: all of it in all rounds. Raises ValueError where there are more parts
    than tensors."""
    parts = sync.fragments
    if parts < 2:
        return None
    if sync.random:
        return _drawn_travel(tensors, sync)
    trained = [index for index, tensor in enumerate(tensors) if tensor.kind == "parameter" and tensor.in_vector]
    if parts > len(trained):
        fit = [str(fewer) for fewer in range(1, len(trained) + 1) if sync.period % fewer == 0]
        raise ValueError(
            f"--sync {sync.text()}: this model has {len(trained)} tensors that are trained, and each part needs one: "
            f"use stream={', '.join(fit)}"
        )
    runs = cut_evenly([tensors[index].count for index in trained], parts)
    stretches = []
    first = 0
    for at, length in enumerate(runs):
        own = set(trained[first : first + length])
        counts = tuple(
            tensor.count if index in own or (tensor.kind == "buffer" and tensor.in_vector) else 0
            for index, tensor in enumerate(tensors)
        )
        stretches.append(Stretch(first=at + 1, counts=counts))
        first += length
    return Travel(stretches=tuple(stretches), every=parts)


def _drawn_travel(tensors: Sequence[TensorSpec], sync: SyncSettings) -> Travel:
    drawn = DrawnParts(tensors, sync.fragments, 0)
    if sync.fragments > drawn.total:
        raise ValueError(
            f"--sync {sync.text()}: this model has {drawn.total} values that are trained, and each part needs one: use "
            f"stream={drawn.total} or less"
        )
    return Travel(
        stretches=tuple(
            Stretch(
                first=part + 1,
                counts=tuple(
                    tensor.count if tensor.kind == "buffer" and tensor.in_vector else drawn.count(part, index)
                    for index, tensor in enumerate(tensors)
                ),
            )
            for part in range(sync.fragments)
        ),
        every=sync.fragments,
    )


def check_fragments(sync: SyncSettings, codec: CodecSpec, *, partial: bool) -> None:
    """Refuses what does not go with parts that take turns.

    Args:
        partial: whether masks, or a model that grows, say what travels.

    Raises ValueError, which names what is legal.
    """
    if not sync.fragments:
        return
    if partial:
        raise ValueError(
            f"--sync {sync.text()} does not go with --masks or mt.Progressive, which say themselves what of a model "
            "travels in which rounds: omit ,stream=, or use one of them"
        )
    if sync.fragments > 1 and (reason := refusal(sync, codec)):
        raise ValueError(f"--sync {sync.text()} with {reason}")
    if sync.random and codec.error_feedback:
        others = [parse_codec(name) for name in FAMILIES]
        legal = [other.name for other in others if not other.error_feedback and not refusal(sync, other)]
        raise ValueError(
            f"--sync {sync.text()} with --codec {codec}: it owes each value what earlier rounds have left out of it, "
            f"and other values travel in every round: use {', '.join(legal)}, or omit ,random"
        )


def manifest_under(manifest: ModelManifest, sync: SyncSettings) -> ModelManifest:
    """The manifest of a model whose job has this mode: parts that take turns belong to the mode, what grows or is
    masked to the model. Raises as `fragments_travel`."""
    travel = fragments_travel(manifest.tensors, sync)
    of_mode = manifest.travel is not None and manifest.travel.every > 0
    if travel is None and not of_mode:
        return manifest
    return manifest.model_copy(update={"travel": travel})


def cut_evenly(sizes: Sequence[int], parts: int) -> list[int]:
    """How many consecutive ones each of `parts` runs has, at least one, so that the largest sum is least.

    Sizes are at least 1, and at least as many as parts.
    """
    least, most = max(sizes), sum(sizes)
    while least < most:
        middle = (least + most) // 2
        if len(_runs_within(sizes, middle)) <= parts:
            most = middle
        else:
            least = middle + 1
    runs = _runs_within(sizes, most)
    while len(runs) < parts:  # splitting makes no run larger
        longest = max(range(len(runs)), key=lambda at: runs[at])
        half = runs[longest] // 2
        runs[longest : longest + 1] = [half, runs[longest] - half]
    return runs


def _runs_within(sizes: Sequence[int], most: int) -> list[int]:
    runs: list[int] = []
    total = most + 1
    for size in sizes:
        if total + size > most:
            runs.append(0)
            total = 0
        runs[-1] += 1
        total += size
    return runs
