"""`submit --dry-run`: what would be sent, and whether every device has the memory for it (M1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.terminal import plain, print_json, print_table, say
from meshtrain.client import Client, ask
from meshtrain.following.shown_text import printable_lines
from meshwire.codecs.registry import parse_codec
from meshwire.encoded_layout.budget import budget_of
from meshwire.encoded_layout.by_round import RoundLayouts
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.jobs.files import human_bytes
from meshwire.memory_layout.footprint import Footprint, Measurement, fits, footprint
from meshwire.messages.job import Member
from meshwire.messages.local import GetPeers, GetStatus, Peers, Status, Submitted
from meshwire.model.fragments import check_fragments, manifest_under
from meshwire.model.masks import NOT_BOTH, MaskSettings, mask_bytes, travel_of
from meshwire.model.plan import Plan, plan_buckets
from meshwire.model.schedule import refusal
from meshwire.planning.price import STEADY_ROUND
from meshwire.sync_modes.codec_for_mode import suits
from meshwire.sync_modes.mode import SyncSettings, own_coefficient
from meshwire.text import printable

if TYPE_CHECKING:
    from meshtrain.packing.tree import Packed

CODEC_SMALL = "fp16"

PARTS = {
    "parameters": "of the model",
    "view": "their copy, ahead by own gradients or local steps",
    "gradients": "of this step",
    "own_gradients": "that no round has covered yet",
    "optimizer": "its state",
    "twin": "a copy of that, by which the view is made",
    "buffers": "of the model, and as the last round left them",
    "masks": "which weights are kept",
    "raw_slots": "gradients on their way to the daemon",
    "result_slot": "their mean on its way back",
    "mixed": "own weights and neighbours', within a period",
    "retained": "encoded rounds, in the daemon",
    "residuals": "what the codec has left out or builds on, in the daemon",
}


@dataclass(frozen=True)
class MemoryNeeds:
    """What a job needs, and what its members have.

    Args:
        available: bytes by member; None where that is not known.
        members_max: as many may join in all; None: nobody joins.
        learners: of each member (R6).
    """

    measurement: Measurement
    codec: str
    sync: SyncSettings
    members: tuple[Member, ...]
    available: tuple[int | None, ...]
    members_max: int | None = None
    masks: MaskSettings | None = None
    topology: str | None = None
    learners: int = 1

    def needed(self, codec: str | None = None, staleness: int | None = None) -> Footprint:
        """What one member needs, with these settings or other ones."""
        size = self.measurement.size
        spec = parse_codec(codec or self.codec)
        layouts = RoundLayouts(self._plan, spec)
        coefficient = own_coefficient(self.sync.own, len(self.members))
        sync = self.sync if staleness is None else self.sync.model_copy(update={"staleness": staleness})
        return footprint(
            size,
            self._plan.total_values,
            layouts.bytes_max,
            coefficient,
            sync,
            spec,
            members=self.members_max or len(self.members),
            transform_bytes=layouts.transform_bytes(sync.staleness),
            mask_bytes=mask_bytes(self.measurement.manifest.tensors, self.masks, self.sync),
            topology=self.topology if str(spec) == self.codec else None,
        ).of_learners(self.learners)

    @cached_property
    def _plan(self) -> Plan:
        manifest = manifest_under(self.measurement.manifest, self.sync)
        travel = travel_of(manifest.tensors, self.masks) or manifest.travel
        return plan_buckets(manifest.model_copy(update={"travel": travel}), codec=parse_codec(self.codec))

    def sent_in_turns(self) -> tuple[int, int] | None:
        """(the largest, all together) of the parts of the model that take turns, encoded, in bytes; None: all of it
        travels in each round."""
        if self.sync.fragments < 2:
            return None
        layouts = RoundLayouts(self._plan, parse_codec(self.codec))
        steady = [layouts.of(STEADY_ROUND + at).total_bytes for at in range(self.sync.fragments)]
        return max(steady), sum(steady)

    def check_suits(self) -> None:
        """Raises CliError for a budget that is too small for the model, for masks that keep nothing of a tensor, or
        a model that grows where that does not go with the mode, the codec or masks."""
        if self.masks is not None and self._grows:
            raise CliError(NOT_BOTH)
        try:
            check_fragments(self.sync, parse_codec(self.codec), partial=self.masks is not None or self._grows)
            travel = self._plan.travel
        except ValueError as error:
            raise CliError(str(error)) from None
        if travel is not None and (reason := refusal(self.sync, parse_codec(self.codec))):
            raise CliError(f"this model does not travel whole in all rounds, and that does not go with {reason}")
        try:
            budget_of(self._plan, EncodedLayout(self._plan, parse_codec(self.codec)))
        except ValueError as error:
            raise CliError(str(error)) from None

    @property
    def _grows(self) -> bool:
        travel = self.measurement.manifest.travel
        return travel is not None and not travel.every  # else parts take turns, which is the mode's

    def too_small(self) -> list[tuple[int, str]]:
        """(index, why) of every member that cannot hold the job."""
        total_bytes = self.needed().total_bytes
        checked = [(at, fits(total_bytes, size)) for at, size in enumerate(self.available) if size is not None]
        return [(at, why) for at, (enough, why) in checked if not enough]

    def remedies(self) -> list[str]:
        """Options with which it would fit, with the largest bound first."""
        smallest_bytes = min(size for size in self.available if size is not None)
        smaller = (
            suits(self.sync, parse_codec(CODEC_SMALL))
            and self.needed(CODEC_SMALL).total_bytes < self.needed().total_bytes
        )
        found = []
        most = -1  # the largest bound so far: another codec is worth it if it allows more
        for codec in (self.codec, CODEC_SMALL) if smaller else (self.codec,):
            for bound in range(self.sync.staleness, most, -1):
                if fits(self.needed(codec, bound).total_bytes, smallest_bytes)[0]:
                    most = bound
                    changed = [f"--codec {codec}"] if codec != self.codec else []
                    sync = self.sync.model_copy(update={"staleness": bound} | ({} if bound else {"delay": 0}))
                    found.append(" ".join(changed + ([f"--sync {sync.text()}"] if sync != self.sync else [])))
                    break
        found.reverse()  # what keeps the bound comes first
        lacking = {at for at, _ in self.too_small()}
        others = [member.name for at, member in enumerate(self.members) if at not in lacking]
        fewer = ["--learners 1"] if self.learners > 1 else []
        return [*fewer, *found, *([f"--on {','.join(others)}"] if others else [])]


def memory_of_members(client: Client, members: Sequence[Member]) -> tuple[int | None, ...]:
    """What each of these machines has, as their daemons have said; of this one as it is."""
    import psutil

    here = ask(client, GetStatus(), Status, name="status").device
    known = {peer.device: peer.memory_bytes for peer in ask(client, GetPeers(), Peers, name="peers").peers}
    known[here] = psutil.virtual_memory().total
    return tuple(known.get(member.device) for member in members)


def show_dry_run(
    submitted: Submitted, notes: Sequence[str], folders: Mapping[str, "Packed"], memory: MemoryNeeds | None, json: bool
) -> None:
    """The files, who would take part, and what it takes there; without the latter when `memory` is None.

    Raises CliError when a member does not have enough, or model, mode and codec do not go together.
    """
    if memory is not None:
        memory.check_suits()
    if json:
        print_json(_document(submitted, notes, folders, memory))
    else:
        for what, packed in folders.items():
            for entry in packed.manifest.entries:
                print(f"{what:6}  {human_bytes(entry.size_bytes):>10}  {printable(entry.path)}")
        for note in notes:
            say(f"note: {printable_lines(note)}")
        say(f"Would run on: {', '.join(printable(member.name) for member in submitted.members)}. Nothing was started.")
        if memory is not None:
            _show_memory(memory)
    lacking = memory.too_small() if memory is not None else []
    if memory is not None and lacking:
        reasons = [f"{memory.members[at].name} {why}" for at, why in lacking]
        raise CliError("; ".join(reasons), " or ".join(memory.remedies()) or "a smaller model")


def _show_memory(memory: MemoryNeeds) -> None:
    needed, size = memory.needed(), memory.measurement.size
    lacking = {at for at, _ in memory.too_small()}
    print()
    print_table(
        ("NAME", "MEMORY", "NEEDED", "FITS"),
        [
            (
                printable(member.name),
                "-" if available is None else human_bytes(available),
                human_bytes(needed.total_bytes),
                "-" if available is None else "NO" if at in lacking else "yes",
            )
            for at, (member, available) in enumerate(zip(memory.members, memory.available, strict=True))
        ],
    )
    print()
    rows = [(name.replace("_", " "), human_bytes(part), PARTS[name]) for name, part in needed.parts() if part]
    print_table(("PART", "SIZE", ""), rows)
    if (sent := memory.sent_in_turns()) is not None:
        largest, whole = map(human_bytes, sent)
        say(
            f"Of {whole} that travel, a round carries one of {memory.sync.fragments} parts, at most {largest}; the "
            f"next one's is {memory.sync.round_steps} steps later."
        )
    say("Not in it: what forward and backward passes need, batches, Python and torch themselves.")
    if not size.optimizer_known:
        say(f"note: {printable(size.optimizer)} is not one of torch's: its state is a guess, 2 values for each weight")


def _document(
    submitted: Submitted, notes: Sequence[str], folders: Mapping[str, "Packed"], memory: MemoryNeeds | None
) -> dict[str, Any]:
    document: dict[str, Any] = {"members": [plain(member) for member in submitted.members], "notes": list(notes)}
    for what, packed in folders.items():
        document[what] = [{"path": entry.path, "size_bytes": entry.size_bytes} for entry in packed.manifest.entries]
    document["memory"] = None
    if memory is not None:
        if (sent := memory.sent_in_turns()) is not None:
            document["rounds"] = {"bytes_max": sent[0], "bytes_of_all": sent[1], "steps": memory.sync.round_steps}
        needed, lacking = memory.needed(), {at for at, _ in memory.too_small()}
        document["memory"] = {
            "needed_bytes": needed.total_bytes,
            "parts": dict(needed.parts()),
            "optimizer": memory.measurement.size.optimizer,
            "optimizer_known": memory.measurement.size.optimizer_known,
            "members": [
                {
                    "device": member.device,
                    "name": member.name,
                    "memory_bytes": available,
                    "fits": None if available is None else at not in lacking,
                }
                for at, (member, available) in enumerate(zip(memory.members, memory.available, strict=True))
            ],
        }
    return document
