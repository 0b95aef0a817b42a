"""Rules left out: each patches a machine, or the cluster's daemon, and a cluster that runs it must notice."""

from collections.abc import Mapping
from typing import Any

import pytest

from meshtraind.rounds.effects import Stage
from meshtraind.session.membership_host import MembershipHost
from meshwire.membership import proposals as proposing
from meshwire.membership.quorum import electorate_of
from meshwire.membership.requests import Kind, OwnRequest, Seat
from meshwire.membership.state import MembershipState
from meshwire.messages.generation import Standing, Where
from meshwire.messages.job import Generation
from meshwire.messages.rounds import Bind, Seal
from meshwire.rounds.effects import Effect, RoundComplete
from meshwire.rounds.inputs import GenerationEntered
from meshwire.rounds.learner_state import Decision, Learner, Phase, RoundSettings
from meshwire.rounds.machine import RoundMachine
from meshwire.rounds.open_rounds import OpenRounds
from meshwire.rounds.own_buckets import OwnBuckets
from meshwire.samples.pool import SamplePool
from tests.sim.cluster import Cluster
from tests.sim.clusterconnection import LinkEnd
from tests.sim.clusterdaemon import Daemon


def no_freeze(patch: pytest.MonkeyPatch) -> None:
    """G2: after its promise a daemon completes what it has all parts of."""
    settle = RoundMachine._settle

    def melted(self: RoundMachine, now_s: float) -> list[Effect]:
        fenced, self._fenced = self._fenced, False
        effects = settle(self, now_s)
        self._fenced = fenced
        return effects

    patch.setattr(RoundMachine, "_settle", melted)


def history_brought(patch: pytest.MonkeyPatch) -> None:
    """G7: who was left out while rounds went on comes back with all that it holds, and G4 alone judges it.

    It brings it once, as one of an older generation; if it cannot be caught up any more it loads anew.
    """
    leave, stand = MembershipState.leave, MembershipState.stand
    left_out = MembershipHost.left_out
    brought: dict[str, Generation] = {}

    def left(self: MembershipState, reason: str, now_s: float, kept: Where | None = None) -> None:
        before = self.entered
        leave(self, reason, now_s, kept)
        if before is not None:
            brought[self.me.device] = before

    def stands(self: MembershipState, held: Standing) -> Standing:
        standing = stand(self, held)
        before = brought.get(self.me.device)
        if self.entered is None and before is not None and held.generation is not None:
            history = electorate_of(before, entered=True)
            said = {"linked": standing.linked, "votes": standing.votes, "history": history}
            self.standing = held.model_copy(update={"number": before.number, **said})
            return self.standing
        return standing

    def keeps(self: MembershipHost[LinkEnd], reason: str) -> None:
        rounds = self.rounds
        if rounds is None or rounds._performer.stage is not Stage.RUNNING or "went on without" not in reason:
            left_out(self, reason)
            return
        self._learner.rounds = None
        left_out(self, reason)
        self._learner.rounds = rounds
        rounds.crossing.fence()
        rounds.learner.dead("it was left out")

    patch.setattr(MembershipState, "leave", left)
    patch.setattr(MembershipState, "stand", stands)
    patch.setattr(MembershipHost, "left_out", keeps)


def no_chain_check(patch: pytest.MonkeyPatch) -> None:
    """G4: by the count of rounds alone."""

    def by_count(standing: Standing, history: Standing) -> bool:
        return standing.generation is not None and standing.complete <= history.complete

    patch.setattr(proposing, "lies_on", by_count)


def restart_resumes(patch: pytest.MonkeyPatch) -> None:
    """G1: a daemon that lost what it held takes up its generation, with its old incarnation."""

    def restart(self: Cluster, number: int) -> None:
        old = self.daemons[number]
        if not old.alive:
            generation = old.machine.generation
            daemon = self.daemons[number] = Daemon(self, number, old.member.incarnation, generation)
            self.network.add(daemon)
            if generation is not None:
                daemon.found()

    patch.setattr(Cluster, "restart", restart)


def nulls_without_bound(patch: pytest.MonkeyPatch) -> None:
    """R4: a computing learner is passed over however old its gradient becomes."""
    may_null = Learner.may_null

    def unbounded(self: Learner, decided: int, complete: int) -> Decision:
        if self.phase is Phase.COMPUTING and not self.settings.lockstep:
            return decided < complete + self.settings.staleness + 1, "no bound"
        return may_null(self, decided, complete)

    patch.setattr(Learner, "may_null", unbounded)


def blocks_not_returned(patch: pytest.MonkeyPatch) -> None:
    """X3: what a rank held that computes no more is lost."""
    patch.setattr(SamplePool, "put_back", lambda *_: None)


def binds_not_told_again(patch: pytest.MonkeyPatch) -> None:
    """G6: what was bound stays bound, but nobody hears of it."""
    tell = RoundMachine._tell_again

    def quiet(self: RoundMachine, round_: int, own: tuple[Bind, Seal | None] | None, now_s: float) -> None:
        if own is None:
            tell(self, round_, own, now_s)
            return
        bind, seal = own
        self._own(self._table.bind(self.settings.rank, bind))
        if seal is not None:
            self._own(self._table.seal(self.settings.rank, seal))

    patch.setattr(RoundMachine, "_tell_again", quiet)


def parts_not_told_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnBuckets, "again", lambda *_: [])


def nulls_not_told_again(patch: pytest.MonkeyPatch) -> None:
    tell = RoundMachine._tell_again

    def tell_again(self: RoundMachine, round_: int, own: Any, now_s: float) -> None:
        if own is not None:
            tell(self, round_, own, now_s)

    patch.setattr(RoundMachine, "_tell_again", tell_again)


def laggards_not_served(patch: pytest.MonkeyPatch) -> None:
    """G4: it counts the rounds that it lacks, and goes on without them."""

    def served(self: RoundMachine, done: RoundComplete) -> None:
        assert done.round == self.complete + 1
        self._table.count_complete()

    patch.setattr(RoundMachine, "_round_served", served)


def rounds_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    """G6: what others had said of rounds above the cut counts on."""
    entered = OpenRounds.entered

    def kept(self: OpenRounds, settings: RoundSettings, promised: Mapping[int, int]) -> OpenRounds:
        table = entered(self, settings, promised)
        for round_, state in self._rounds.items():
            if round_ > self.complete:
                for rank, bind in state.binds.items():
                    if rank != settings.rank and rank in settings.ranks:
                        table._round(round_).binds[rank] = bind
        return table

    patch.setattr(OpenRounds, "entered", kept)


def freed_too_early(patch: pytest.MonkeyPatch) -> None:
    """G5: what a laggard lacks is freed once the generation is entered."""
    entered = OpenRounds.entered
    patch.setattr(OpenRounds, "entered", lambda self, settings, _: entered(self, settings, {}))


def calls_remembered(patch: pytest.MonkeyPatch) -> None:
    """G6, R3: calls of rounds that nobody may be left in."""
    enter = RoundMachine._generation_entered

    def remembering(self: RoundMachine, entered: GenerationEntered, now_s: float) -> str | None:
        newest = self._calls.newest
        wrong = enter(self, entered, now_s)
        self._calls.heard(newest)
        return wrong

    patch.setattr(RoundMachine, "_generation_entered", remembering)


def rest_not_owed(patch: pytest.MonkeyPatch) -> None:
    """X3: the next learner takes the place of the one before as soon as it is ready."""
    say = OwnRequest.say

    def newest_only(self: OwnRequest, kind: Kind) -> None:
        say(self, kind)
        if kind == "learn":
            self._seat = Seat.VACANT

    patch.setattr(OwnRequest, "say", newest_only)
