"""What `submit` chooses where nobody has: who trains, and with which settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from meshtrain.cli.planning.codec_prices import ProcessorPrices, processor_prices
from meshtrain.cli.planning.linked_mesh import LinkedMesh, NobodyLinked, OneMachine, assumptions, find_mesh
from meshtrain.cli.planning.mesh_verdict import Planned, play, reason, typed_for
from meshtrain.cli.planning.script_profiles import Shipped, profile
from meshtrain.cli.submission.measuring import NotMeasured
from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from meshtrain.cli.ui.terminal import say
from meshtrain.errors import RequestError
from meshtrain.following.shown_text import printable_lines
from meshwire.collectives.strategy import collective_for
from meshwire.messages.job import Prediction
from meshwire.planning.choose import DEFAULT, Pinned, wished
from meshwire.planning.mesh_plan import MeshPlan, Option
from meshwire.planning.price import Pricing
from meshwire.planning.quality import Quality
from meshwire.planning.replan import StepForecast
from meshwire.planning.step_trace import TracedScript
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import sync_settings

Groups = Sequence[tuple[int, ...]]


class NotChosen(Exception):
    """Nothing was chosen; says why in a sentence."""


@dataclass(frozen=True, slots=True)
class JobChoice:
    """Who trains, and how, as `Submit` says it.

    Attributes:
        on: names or ids; empty: whoever is linked, or as many as `peers` says.
        peers_max: up to how many join; None: nobody does.
        shares: as typed after --shares.
        hubs: whether linked hubs are taken in by themselves.
        prediction: of what several do together; None: there is none, as for one alone, who was timed without a job.
    """

    pinned: Pinned
    on: tuple[str, ...] = ()
    peers: int | None = None
    peers_max: int | None = None
    shares: str | None = None
    hubs: bool = True
    prediction: Prediction | None = None

    @property
    def sync(self) -> str:
        """As typed after --sync."""
        return self.pinned.sync or DEFAULT[1]

    def text(self) -> str:
        """The settings as they are typed, with all that nobody has to type."""
        codec = codec_of(sync_settings(self.sync), self.pinned.codec)
        topology = [] if self.pinned.topology is None else [f"--topology {self.pinned.topology}"]
        return " ".join([f"--sync {self.sync}", f"--codec {codec}", *topology])

    @property
    def names_who(self) -> bool:
        """Whether it says who trains."""
        return bool(self.on) or self.peers is not None


@dataclass(frozen=True, slots=True)
class FoundChoice:
    """What was planned for a job, and what follows from it.

    Attributes:
        forecast: of the best group, by which the job goes over to another codec or period by itself; None: it does not.
        typed: by the person.
        runs: the script without a job, as it is typed.
        notes: for the person, before what is chosen.
    """

    planned: Planned
    forecast: StepForecast | None
    typed: JobChoice
    runs: str
    notes: tuple[str, ...]

    @property
    def alone(self) -> bool:
        """Whether this device alone is recommended; never where somebody has said who trains."""
        return self.planned.choice is None and not self.typed.names_who

    @property
    def together(self) -> Option:
        """The best group: the chosen one, or the fastest where that is none."""
        return best_together(self.planned)

    def sentence(self) -> str:
        """What was chosen and why."""
        if self.alone:
            return f"chosen: {reason(self.planned)}"
        told = f"chosen: {reason(replace(self.planned, choice=self.together))}"
        return told if self.planned.choice is not None else f"{told} {self._slower()}"

    def _slower(self) -> str:
        return f"This laptop alone is no slower: {self.who_typed()} was typed."

    def who_typed(self) -> str:
        """The flag that says who trains."""
        if self.typed.on:
            return "--on"
        more = "" if self.typed.peers_max is None else f":{self.typed.peers_max}"
        return f"--peers {self.typed.peers}{more}"

    def otherwise(self) -> str:
        """What to type for something else."""
        if self.alone:
            who = "--peers 2, or --on with names, trains together"
            if not self.planned.alone:
                who = f"{self.runs} trains here without a job, and without what one takes; {who}"
        elif self.typed.names_who:
            who = f"without {self.who_typed()} it is chosen who trains"
        else:
            who = "--peers 1 trains alone"
        return (
            f"otherwise: {who}; --sync, --codec and --topology are taken as typed; --no-plan chooses nothing; "
            "meshtrain plan shows all that was compared"
        )

    def question(self) -> str:
        """Asked where alone is recommended and somebody can answer: yes is alone."""
        names = [device.name for device in self.planned.devices]
        others = ", ".join(names[1 + at] for at in self.together.others)
        where = f" on {names[self.planned.alone]}" if self.planned.alone else ""
        return f"Train alone{where}? (n: together with {others}, {typed_for(self.together)})"

    def job(self, *, alone: bool) -> JobChoice:
        """What is submitted."""
        if alone:
            if self.planned.alone:
                return replace(self.typed, on=(self.planned.devices[self.planned.alone].id,))
            return replace(self.typed, peers=1)
        option, typed = self.together, self.typed
        settings = option.price.settings
        usual = option.hubs is True or settings.collective == collective_for(settings.codec)
        own = codec_of(settings.sync, None) == settings.codec
        chosen = Pinned(
            sync=settings.sync.text(),
            codec=typed.pinned.codec or (None if own else str(settings.codec)),
            topology=typed.pinned.topology or (None if usual else str(settings.collective.topology)),
        )
        devices = self.planned.devices
        members = [devices[0], *(devices[1 + at] for at in option.others)]
        on = typed.on
        if not on and typed.peers_max is None and not self.planned.takes_whom_it_finds(option):
            on = tuple(device.id for device in members)
        price = option.price
        # The first rounds of post-local SGD are slower than those of which a price is known.
        expected = (
            None
            if settings.sync.after
            else Prediction(
                samples_s=price.samples_s,
                alone_samples_s=price.alone_samples_s,
                step=self.forecast,
                speeds=tuple(zip([device.id for device in members], option.speeds, strict=True)),
            )
        )
        typed = replace(typed, pinned=chosen, on=on, peers=None if on else typed.peers)
        return replace(typed, hubs=option.hubs is not False, prediction=expected)


def best_together(planned: Planned) -> Option:
    """The chosen group, or the fastest where none is chosen."""
    return planned.choice or max(planned.options, key=lambda option: option.price.useful_samples_s)


def find_choice(
    shipped: Shipped, typed: JobChoice, quality: Quality, data_dir: Path | None, stages: Stages, *, one_machine: bool
) -> FoundChoice | None:
    """Plans a job on the laptops that are linked now; None where there is no other one.

    Raises:
        NotChosen: it cannot be planned now.
    """
    try:
        there = find_mesh(data_dir, False, stages, one_machine=one_machine)
        traced, busy = profile(shipped, data_dir, stages)
        manifest = traced.measurement.manifest
        typed = replace(typed, pinned=typed.pinned.suiting(traced.measurement.size.optimizer_of_torch))

        def priced(wish: Quality) -> MeshPlan:
            candidates = wished(typed.pinned.settings(manifest), wish)
            if not candidates:
                raise NotChosen("what was typed fits none of the settings that can be predicted")
            codecs = dict.fromkeys([DEFAULT[0], *(str(each.codec) for each in candidates)])
            prices = processor_prices(list(codecs), data_dir, stages)
            return _mesh_plan(there, traced, typed, prices)

        mesh = priced(quality)
        groups = groups_of(mesh, there, typed)
        planned = play(mesh, there, quality, groups, stages)
        if planned.choice is None and quality is not Quality.FAST:
            planned = replace(planned, fast=priced(Quality.FAST).best(groups[-1], Quality.FAST))
    except NobodyLinked:
        return None
    except OneMachine as problem:
        raise NotChosen(f"{problem} (--quality {quality} chooses all the same)") from None
    except NotMeasured as problem:
        raise NotChosen(_in_a_line(str(problem))) from None
    except (CliError, RequestError, OSError) as problem:  # no answer in time and a full disk, too
        raise NotChosen(_in_a_line(str(problem))) from None
    others = [peer for peer, _ in there.others]
    forecast = mesh.forecast(best_together(planned), quality)
    return FoundChoice(
        planned,
        forecast,
        typed,
        shipped.runs,
        (*([busy] if busy is not None else []), *there.notes, *assumptions(others, traced.step.device)),
    )


def _mesh_plan(there: LinkedMesh, traced: TracedScript, typed: JobChoice, prices: ProcessorPrices) -> MeshPlan:
    return MeshPlan(
        Pricing(traced.measurement.manifest, prices.codecs),
        traced.step,
        [link for _, link in there.others],
        typed.pinned,
        prices.work,
        shares=typed.shares != "equal",
        ordered=not typed.on and typed.peers_max is None,
        hubs=[link for _, link in there.hubs],
    )


def groups_of(mesh: MeshPlan, there: LinkedMesh, typed: JobChoice) -> Groups:
    """The groups of others that come into question for what was typed. Raises NotChosen where there is none."""
    if typed.on:
        return [_named(there, typed.on)]
    if typed.peers is None:
        return mesh.groups()
    others = len(there.others)
    if typed.peers - 1 > others:
        raise NotChosen(f"--peers {typed.peers}: {others + 1} laptops are linked whose links are known")
    if typed.peers_max is not None:
        return [tuple(range(min(others, max(1, typed.peers_max - 1))))]
    return [group for group in mesh.groups() if len(group) == typed.peers - 1]


def _named(there: LinkedMesh, on: Sequence[str]) -> tuple[int, ...]:
    devices = [there.this, *((peer.device, peer.name) for peer, _ in there.others)]
    places = []
    for typed in on:
        found = [at for at, (device, name) in enumerate(devices) if name == typed or device.startswith(typed)]
        if len(found) != 1:
            raise NotChosen(f"--on {typed}: no laptop, or more than one, whose link is known")
        places.append(found[0])
    if 0 not in places or len(places) == 1:
        raise NotChosen("only jobs of this laptop with others are predicted")
    return tuple(at - 1 for at in places if at)


def _in_a_line(text: str) -> str:
    """The first line and the last one, which says how a script ended."""
    lines = [line.strip() for line in printable_lines(text).splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]} {lines[-1]}"


def choose(
    shipped: Shipped, typed: JobChoice, quality: Quality | None, data_dir: Path | None, *, asks: bool
) -> JobChoice:
    """What a job is submitted with, told first; what was typed stays.

    Args:
        quality: that was typed; then daemons on one machine count as laptops.
        asks: whether somebody can be asked; else what is recommended is done.
    """
    try:
        with Stages() as stages:
            found = find_choice(
                shipped, typed, quality or Quality.SAFE, data_dir, stages, one_machine=quality is not None
            )
    except NotChosen as problem:
        say(f"note: nothing was chosen: {problem}")
        say(f"note: taken instead: {typed.text()}{'' if typed.names_who else ', on all linked laptops'}")
        return typed
    if found is None:
        return typed
    for note in found.notes:
        say(f"note: {note}")
    say(found.sentence())
    say(found.otherwise())
    alone = found.alone and (not asks or typer.confirm(found.question(), default=True, err=True))
    return found.job(alone=alone)
