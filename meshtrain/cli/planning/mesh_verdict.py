"""What `plan` has found: a table, the choice with its reason, and the line to type."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshtrain.cli.planning.linked_mesh import LinkedMesh
from meshtrain.cli.planning.verdict import (
    THE_DEFAULTS,
    WAITS_FOR,
    flags,
    milliseconds,
    price_document,
    times,
)
from meshtrain.cli.ui.progress import Stages
from meshwire.job_figures import rate_text
from meshwire.jobs.files import human_bytes
from meshwire.planning.mesh_plan import PAYS_FROM, MeshPlan, Option, fastest
from meshwire.planning.quality import Quality
from meshwire.planning.step_trace import StepTrace
from meshwire.text import printable

COLUMNS = ("", "LAPTOPS", "SETTINGS", "STEP", "SAMPLES/S", "OF ONE", "SENT A STEP", "QUALITY", "WAITS FOR")
CHOSEN = "*"
ALONE = "train alone"
NAMES_MAX = 4  # in a cell of the table


@dataclass(frozen=True, slots=True)
class Device:
    """One that could train: its name, and what it is called on a command line, which means no other one."""

    id: str
    name: str
    typed: str


@dataclass(frozen=True, slots=True)
class Planned:
    """All that was priced.

    Attributes:
        devices: this one first, then those with a measured link.
        step: of the best one alone, which is `alone` of the devices.
        quality: that is wished for.
        options: the best of that quality for each group.
        default: all together with `submit --no-plan`.
        fast: the chosen group, or all, with the best of any quality that was measured; None: that was not looked for.
        larger: the chosen group, or the best one, with a round after several steps; None: that brings little, or was
            not looked for.
        rule: how the rate of the script's optimizer follows the batch, as typed after --scale-lr; None: not known.
        choice: None: train alone.
        takes_all: a job that names nobody runs on exactly these devices.
        hubs: names of those that could be in it, too.
    """

    devices: Sequence[Device]
    step: StepTrace
    quality: Quality
    options: Sequence[Option]
    default: Option
    fast: Option | None
    choice: Option | None
    takes_all: bool
    alone: int = 0
    hubs: Sequence[str] = ()
    larger: Option | None = None
    rule: str | None = None

    def takes_whom_it_finds(self, option: Option) -> bool:
        """Whether a job that names nobody is this option: all train, and no rank stands in its topology."""
        everybody = self.takes_all and len(option.others) == len(self.devices) - 1
        return everybody and (option.hubs is True or not option.price.settings.collective.topology.named)


def devices_of(named: Sequence[tuple[str, str]]) -> list[Device]:
    """Devices by (id, name). Who shares a name with another one, or has one that breaks a list, goes by its id."""
    names = [name for _, name in named]
    made = []
    for device, name in named:
        plain = names.count(name) == 1 and "," not in name and printable(name) == name and name.strip() == name
        made.append(Device(device, printable(name), name if plain else device[:8]))
    return made


def play(
    mesh: MeshPlan,
    there: LinkedMesh,
    quality: Quality,
    groups: Sequence[tuple[int, ...]],
    stages: Stages,
) -> Planned:
    """Prices the best settings of these groups; `fast` is left open."""
    options: list[Option] = []
    for option in mesh.options(quality, groups):
        options.append(option)
        stages.show(f"playing rounds on these laptops ({len(options)} of {len(groups)} groups)")
    return Planned(
        devices=devices_of([there.this, *((peer.device, peer.name) for peer, _ in there.others)]),
        step=mesh.step_alone,
        alone=mesh.fastest_alone,
        quality=quality,
        options=options,
        default=mesh.default(mesh.everybody),
        fast=None,
        choice=fastest(options),
        takes_all=there.takes_all,
        hubs=[printable(peer.name) for peer, _ in there.hubs],
    )


def typed_for(option: Option) -> str:
    """What is typed for it after `submit --no-plan`."""
    return flags(option.price, option.hubs)


def mesh_rows(found: Planned) -> list[tuple[str, ...]]:
    """The rows of the table, under COLUMNS: alone, each group, and what else one might have typed."""
    step = found.step
    this = found.devices[found.alone].name
    alone = (this, ALONE, milliseconds(step.alone_s), rate_text(step.samples_s), times(1.0), "-", "exact", "computing")
    rows: list[tuple[str, ...]] = [(CHOSEN if found.choice is None else "", *alone)]
    rows += [_row(found, option, chosen=option is found.choice) for option in found.options]
    shown = [(option.others, option.price.settings) for option in found.options]
    for other in (found.default, *([found.fast] if found.fast is not None else [])):
        if (other.others, other.price.settings) not in shown:
            shown.append((other.others, other.price.settings))
            rows.append(_row(found, other, chosen=False))
    return rows


def _row(found: Planned, option: Option, *, chosen: bool) -> tuple[str, ...]:
    price = option.price
    return (
        CHOSEN if chosen else "",
        _names(found, option),
        typed_for(option),
        milliseconds(price.step_s),
        rate_text(price.samples_s),
        times(price.against_one),
        human_bytes(round(max(price.sent_bytes))),
        price.settings.quality.value,
        WAITS_FOR[option.waits_for],
    )


def _names(found: Planned, option: Option) -> str:
    names = [found.devices[0].name, *(found.devices[1 + at].name for at in option.others)]
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    hubs = f" by the hub {' and '.join(found.hubs)}" if option.hubs else ""
    return ", ".join(names[:NAMES_MAX]) + more + hubs


def reason(found: Planned) -> str:
    """The choice, and why, in a sentence or two."""
    if found.choice is None:
        return _alone(found)
    choice, price = found.choice, found.choice.price
    worth = price.settings.worth
    faster, each = f"train {times(price.against_one)} as fast as", ""
    if worth < 1.0:
        faster, each = (
            f"are at a loss {times(price.against_one)} as soon as",
            f", each worth {worth:.2f} of one in step",
        )
    text = (
        f"{_names(found, choice)} together {faster} one laptop alone "
        f"({rate_text(price.samples_s)} samples/s{each}, {rate_text(price.alone_samples_s)} alone), with "
        f"{typed_for(choice)}: a step mostly waits for {WAITS_FOR[choice.waits_for]}"
    )
    if choice.uneven:
        local = price.settings.sync.ends_early
        text += f"; slower ones {'take fewer local steps for a round' if local else 'get smaller batches'}"
    if parts := price.settings.sync.fragments:
        mean, most = (human_bytes(round(each)) for each in (max(price.sent_bytes), price.burst_bytes))
        text += f"; a round is of one of {parts} parts and sends at most {most}, {mean} a step in the mean"
    if not price.settings.measured:
        text += "; how much a sample brings with these settings was not measured"
    everybody = max(found.options, key=lambda option: len(option.others))
    if everybody is not choice:
        text += f"; all {len(everybody.others) + 1} would do {times(everybody.price.against_one)}"
    if found.default.price.settings != price.settings:
        text += f"; with the defaults all would do {times(found.default.price.against_one)}"
    return f"{text}.{_with_fast(found)}"


def _alone(found: Planned) -> str:
    option = max(found.options, key=lambda option: option.price.useful_samples_s)
    best, reached = option.price, typed_for(option)
    train = "Train alone" if not found.alone else f"Train alone on {found.devices[found.alone].name}, which is faster"
    typed = "" if reached == THE_DEFAULTS else f", with {reached}"
    if best.against_one < 1:
        ahead = f"{1 / best.against_one:.2f} times as"
        is_faster = f"is {ahead} fast as" if best.settings.worth == 1.0 else f"is at a loss {ahead} soon as"
        text = f"{train}: one laptop {is_faster} the best of all groups{typed}."
    else:
        more = f"{PAYS_FROM:.2f}"
        text = (
            f"{train}: the best of all groups does {times(best.against_one)} of one laptop{typed}, and below "
            f"{more}x a prediction is not sure enough."
        )
    return text + _with_fast(found)


def _with_fast(found: Planned) -> str:
    if found.fast is None or found.quality is Quality.FAST:
        return ""
    price = found.fast.price
    now = found.choice.price.against_one if found.choice is not None else 1.0
    if price.against_one < PAYS_FROM * now:
        return ""
    return f" With --quality fast they are at a loss {times(price.against_one)} as soon: {typed_for(found.fast)}."


def batch_notes(found: Planned) -> Iterator[str]:
    """What is to be said of the batch that a round is: the rate that suits it, and what a larger one would bring. Both
    are the person's to choose, for with either a job learns otherwise."""
    choice, rule = found.choice, found.rule
    if choice is not None and rule is not None and not choice.price.settings.sync.period:
        yield (
            f"A round is a batch {choice.price.members} times the script's: --scale-lr {rule} raises the learning rate "
            "as that bears it; compare a short run."
        )
    if found.larger is not None:
        price = found.larger.price
        steps = price.settings.sync.accumulate
        yield (
            f"With a batch that is {steps} times larger still, {_names(found, found.larger)} would do "
            f"{times(price.against_one)} of one: {typed_for(found.larger)} has a round after each {steps} steps"
            + (f"; try --scale-lr {rule} with it." if rule is not None else ".")
        )


def submit_line(found: Planned, script: str, args: Sequence[str], data: str | None, *, as_module: bool = False) -> str:
    """The command that does what was chosen, whole, and chooses nothing anew. `script`: as it was typed, a module's
    name where it is run `as_module`."""
    words = ["meshtrain", "submit"] if found.choice is None else ["meshtrain", "submit", "--no-plan"]
    if found.choice is None:
        words += ["--on", found.devices[found.alone].typed] if found.alone else ["--peers", "1"]
    else:
        if not found.takes_whom_it_finds(found.choice):
            members = (found.devices[0], *(found.devices[1 + at] for at in found.choice.others))
            words += ["--on", ",".join(member.typed for member in members)]
        typed = typed_for(found.choice)
        words += [] if typed == THE_DEFAULTS else typed.split(" ")
    if data is not None:
        words += ["--data", data]
    return shlex.join([*words, *["-m"] * as_module, script, *args])


def mesh_document(found: Planned, told: str, line: str) -> dict[str, Any]:
    """The JSON document."""

    def option_document(option: Option) -> dict[str, Any]:
        members = [found.devices[0].id, *(found.devices[1 + at].id for at in option.others)]
        priced = price_document(option.price)
        return {"members": members, "by_hubs": option.hubs is True, "waits_for": option.waits_for.value, **priced}

    return {
        "step": found.step.model_dump(mode="json", exclude={"ready"}),
        "alone_samples_s": found.step.samples_s,
        "quality": found.quality.value,
        "devices": [{"device": device.id, "name": device.name} for device in found.devices],
        "hubs": list(found.hubs),
        "options": [option_document(option) for option in found.options],
        "default": option_document(found.default),
        "fast": None if found.fast is None else option_document(found.fast),
        "scale_lr": found.rule,
        "larger_batch": None if found.larger is None else option_document(found.larger),
        "choice": None if found.choice is None else option_document(found.choice),
        "reason": told,
        "command": line,
    }
