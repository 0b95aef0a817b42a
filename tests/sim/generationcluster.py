"""The cluster of round machines through generations, with an oracle in the place of the membership machine.

Members die at random instants, also in the middle of a change, learners die and load anew, dead ranks and new ones come
in. The oracle makes all survivors promise, takes the longest history as the cut, serves the laggards, and lets
all enter and go on, each after a time of its own. A message reaches nobody in another generation than its sender's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Literal

from meshwire.chain import START, chain
from meshwire.messages.rounds import Bind, Null
from meshwire.roundevents import Broadcast, Effect, RoundComplete
from meshwire.roundlearner import Phase
from meshwire.rounds import RoundMachine
from tests.sim.roundcluster import Cluster, Learner


class Stage(Enum):
    """Where a daemon is in its generation."""

    RUNNING = "running"
    FENCED = "fenced"
    ENTERED = "entered"


@dataclass(frozen=True)
class Change:
    """What befalls the membership at a time."""

    at_s: float
    kind: Literal["die", "lose", "join"]
    """die: a daemon with its learner. lose: a learner alone, which is started anew and loads. join: a rank that is not
    in comes in and loads."""
    rank: int


class GenerationCluster(Cluster):
    """Ranks from `members` on are not there at first.

    Args:
        changes: those that would leave nobody with a base do not happen.
        change_s: the most that one daemon takes for one move of a change.
        load_s: between a learner's start and its base.
        ranks: of all times.
    """

    def __init__(
        self,
        seed: int,
        *,
        members: int,
        ranks: int,
        changes: tuple[Change, ...],
        change_s: float,
        load_s: float,
        **how: Any,
    ) -> None:
        super().__init__(seed, members=ranks, **how)
        self._settings = self.machines[0].settings
        self.live = set(range(members))
        first = tuple(range(members))
        self.machines = [self._machine(rank, first if rank < members else (rank,), complete=0) for rank in range(ranks)]
        self.change_s, self.load_s = change_s, load_s
        self.stages = [Stage.RUNNING] * ranks
        self.incarnations = [0] * ranks
        self.loading: set[int] = set()  # no base yet, or not yet among those that compute
        self.loaded: set[int] = set()  # of them: those that have one
        self.wanting: set[int] = set()  # wait to be taken in
        self.entered_at: dict[int, int] = {}  # of the loading newcomers: the cut
        self.chains: dict[int, bytes] = {0: START}
        self.own_chains: list[dict[int, bytes]] = [{0: START} for _ in range(ranks)]
        self.held: list[dict[int, RoundComplete]] = [{} for _ in range(ranks)]  # to be served
        self.parts: dict[tuple[int, int, int, int], type[Effect]] = {}  # by rank, incarnation, round, bucket
        self.told: dict[tuple[int, int, int], Bind | Null] = {}  # by rank, incarnation, round
        self.entered = 0
        self.served = 0
        self.changed_s = 0.0
        self._attempt = 1  # the number of the newest generation, and of the change that makes it
        self._changing = False
        self._again = False  # a change that is to follow
        self._waiting: set[int] = set()  # who has not made the present move
        self._held_back: list[list[Callable[[], None]]] = [[] for _ in range(ranks)]
        self._dead_s: dict[int, float] = {}
        for change in changes:
            self._at(change.at_s, partial(self._befall, change))

    def _machine(self, rank: int, ranks: tuple[int, ...], complete: int) -> RoundMachine:
        return RoundMachine(replace(self._settings, rank=rank, ranks=ranks), complete=complete)

    # What befalls.

    def _with_base(self) -> set[int]:
        return self.live - self.loading

    def _befall(self, change: Change) -> None:
        rank = change.rank
        if change.kind == "join":
            if rank not in self.live:
                self.wanting.add(rank)
                self._change(needed=False)
            return
        if rank not in self.live or self._with_base() <= {rank}:
            return
        self.learners[rank].life += 1
        if change.kind == "die":
            self._forget_loading(rank)
            self.live.discard(rank)
            self._dead_s[rank] = self.now_s
            self._change(needed=True)
        elif rank not in self.loading and rank not in self.gone:
            self._start_anew(rank)
            if self.random.random() < 0.5:
                self._load(rank, self.incarnations[rank])
            else:
                self._perform(rank, self.machines[rank].absent("dead", self.now_s, gone=True))
                self._at(self.random.uniform(0, self.load_s), partial(self._load, rank, self.incarnations[rank]))
            self._change(needed=False)  # it leaves those that compute

    def _start_anew(self, rank: int) -> None:
        """Another process: what the old one has begun is lost."""
        old, new = self.learners[rank], Learner()
        new.steps_begun = new.steps_ended = old.steps_begun
        new.life = old.life + 1
        self.learners[rank] = new
        self.gone.discard(rank)
        self.loading.add(rank)
        self.loaded.discard(rank)

    def _forget_loading(self, rank: int) -> None:
        self.loading.discard(rank)
        self.loaded.discard(rank)
        self.entered_at.pop(rank, None)

    def _load(self, rank: int, incarnation: int) -> None:
        """A lost learner has been started again: what is complete from here on is kept for it."""
        if self._is(rank, incarnation) and rank in self.loading and rank not in self.loaded:
            self.learners[rank].ready_to_apply.clear()
            self._perform(rank, self.machines[rank].absent("loading", self.now_s, loading=True))
            self._at(self.random.uniform(0, self.load_s), partial(self._base_here, rank, incarnation))

    def _is(self, rank: int, incarnation: int) -> bool:
        return rank in self.live and self.incarnations[rank] == incarnation

    def _base_here(self, rank: int, incarnation: int) -> None:
        """The learner loads the base after some round that it may begin with, if anybody has applied such a one."""
        if not self._is(rank, incarnation) or rank not in self.loading or rank in self.loaded:
            return
        machine, learner = self.machines[rank], self.learners[rank]
        known = [k for k in (0, *self.bases) if machine.applied <= k <= machine.complete]
        if not known:
            self._at(0.1, partial(self._base_here, rank, incarnation))
            return
        round_ = self.random.choice(known)
        learner.base = self.bases.get(round_, b"")
        learner.ready_to_apply = [done for done in learner.ready_to_apply if done.round > round_]
        self.loaded.add(rank)
        self._perform(rank, machine.loaded(round_, self.now_s))
        self._at_boundary(rank)
        self._change(needed=False)

    # The oracle.

    def _change(self, *, needed: bool) -> None:
        """A change of membership; one that is under way is begun anew if one of its members is lost."""
        if self._changing and not needed:
            self._again = True
            return
        self._changing, self._again = True, False
        self._attempt += 1
        self._waiting = set(self.live)
        for rank in sorted(self.live):
            self._move(rank, self._fence)

    def _move(self, rank: int, move: Callable[[int], None]) -> None:
        self._at(self.random.uniform(0, self.change_s), partial(self._moves, rank, self._attempt, move))

    def _moves(self, rank: int, attempt: int, move: Callable[[int], None]) -> None:
        if attempt == self._attempt and rank in self.live:
            move(rank)

    def _done(self, rank: int) -> bool:
        """It has made its move. True if all have."""
        self._waiting.discard(rank)
        return not self._waiting

    def _fence(self, rank: int) -> None:
        self.stages[rank] = Stage.FENCED
        self._held_back[rank].clear()
        self._perform(rank, self.machines[rank].fence(self.now_s))
        if self._done(rank):
            self._cut()

    def _cut(self) -> None:
        """All have promised: the longest history of those that brought one is kept (G4), what is above it re-runs."""
        histories = {rank: self.machines[rank].complete for rank in sorted(self.live) if rank not in self.entered_at}
        source = max(histories, key=histories.__getitem__)
        cut = histories[source]
        newcomers = self.wanting | {rank for rank in self.entered_at if self.machines[rank].complete > cut}
        for rank in self.live:
            assert self.machines[rank].applied <= cut or rank in newcomers, "applied by all survivors or by none"
        for record in (self.completions, self.bases, self.chains, self.binds):
            for round_ in [round_ for round_ in record if round_ > cut]:
                del record[round_]
        self._exchanges.clear()
        decided = max(self.machines[rank].decided for rank in self.live)
        self.unbound_max = max(self.unbound_max, decided)
        self.poisoned_rounds = {round_ for round_ in self.poisoned_rounds if round_ <= cut}
        completes = {rank: self.machines[rank].complete for rank in self.live - newcomers}
        self.live |= newcomers
        self.wanting = set()
        self._waiting = set(self.live)
        ranks = tuple(sorted(self.live))
        enter = partial(self._enter, source=source, ranks=ranks, cut=cut, completes=completes)
        for rank in ranks:
            if rank in newcomers:
                self._begin_newcomer(rank, source, ranks, cut)
            self._move(rank, enter)

    def _begin_newcomer(self, rank: int, source: int, ranks: tuple[int, ...], cut: int) -> None:
        self._start_anew(rank)
        self._dead_s.pop(rank, None)
        self.incarnations[rank] += 1
        self.entered_at[rank] = cut
        self.stages[rank] = Stage.FENCED
        self.held[rank] = {}
        self._held_back[rank].clear()
        self.machines[rank] = self._machine(rank, ranks, complete=cut)
        self._armed_s[rank] = None
        self.own_chains[rank] = {cut: self.own_chains[source][cut]}
        self._perform(rank, self.machines[rank].fence(self.now_s))
        self._perform(rank, self.machines[rank].absent("loading", self.now_s, loading=True))
        self._at(self.random.uniform(0, self.load_s), partial(self._base_here, rank, self.incarnations[rank]))

    def _enter(self, rank: int, source: int, ranks: tuple[int, ...], cut: int, completes: dict[int, int]) -> None:
        machine = self.machines[rank]
        if machine.complete < cut:
            self._serve(rank, source)
            self._move(rank, partial(self._enter, source=source, ranks=ranks, cut=cut, completes=completes))
            return
        self.stages[rank] = Stage.ENTERED
        self.generations[rank] = self._attempt
        self.entered += 1
        self._perform(rank, machine.enter(ranks, cut, completes, self.now_s))
        if rank in self.loaded:
            self._forget_loading(rank)
            self._return(rank)
        if self._done(rank):
            self._waiting = set(self.live)
            for each in sorted(self.live):
                self._move(each, self._resume)

    def _serve(self, rank: int, source: int) -> None:
        """One round of those that it lacks."""
        self.served += 1
        done = self.held[source][self.machines[rank].complete + 1]  # G5: what others lack is still held
        self._perform(rank, self.machines[rank].served(done, self.now_s))

    def _resume(self, rank: int) -> None:
        self.stages[rank] = Stage.RUNNING
        held_back, self._held_back[rank] = self._held_back[rank], []
        for event in held_back:
            event()
        self._announce(rank)
        if self._done(rank):
            self._changing = False
            self.changed_s = self.now_s
            if self._again:
                self._change(needed=True)

    # What goes out and comes in.

    def _broadcast(self, rank: int, sent: Broadcast) -> None:
        message = sent.message
        if isinstance(message, Null):
            self._check_null(rank, message.round)
        if isinstance(message, Bind | Null):
            first = self.told.setdefault((rank, self.incarnations[rank], message.round), message)
            assert message == first, "G6: rounds keep number and binding"
        if self.stages[rank] is not Stage.FENCED:  # else it will be told again
            super()._broadcast(rank, sent)

    def _announce(self, rank: int) -> None:
        if self.stages[rank] is Stage.RUNNING:
            super()._announce(rank)

    def _send(self, sender: int, receiver: int, event: Callable[[], None]) -> None:
        if self.stages[sender] is Stage.ENTERED:
            self._held_back[sender].append(partial(super()._send, sender, receiver, event))
        else:
            super()._send(sender, receiver, event)

    def _join_exchange(self, rank: int, round_: int, bucket: int, part: Effect) -> None:
        key = rank, self.incarnations[rank], round_, bucket
        assert self.parts.setdefault(key, type(part)) is type(part), "G6: rounds keep their bytes"
        if self.stages[rank] is Stage.RUNNING:
            super()._join_exchange(rank, round_, bucket, part)
        elif self.stages[rank] is Stage.ENTERED:
            self._held_back[rank].append(partial(super()._join_exchange, rank, round_, bucket, part))

    def _hears(self, sender: int, receiver: int, generation: int) -> bool:
        """What a dead one had sent arrives up to some instant, at each in its order."""
        if sender in self._dead_s and self.now_s > self._dead_s[sender] + (sender * 7 + receiver * 3) % 5 / 20:
            return False
        return receiver in self.live and self.generations[receiver] == generation

    # Rules.

    def _at_boundary(self, rank: int) -> None:
        if rank in self.live and (rank not in self.loading or rank in self.loaded):
            super()._at_boundary(rank)

    def _timer(self, rank: int, deadline_s: float) -> None:
        if rank in self.live:
            super()._timer(rank, deadline_s)

    def _die(self, rank: int, life: int, mishap: Any) -> None:
        if rank in self.live:
            super()._die(rank, life, mishap)

    def _return(self, rank: int) -> None:
        if rank in self.live and rank not in self.loading | self.gone and self.machines[rank].phase is Phase.ABSENT:
            super()._return(rank)

    def _completed(self, rank: int, completion: RoundComplete) -> None:
        chains = self.own_chains[rank]
        chains[completion.round] = chain(chains[completion.round - 1], self.generations[rank], completion)
        expected = self.chains.setdefault(completion.round, chains[completion.round])
        assert chains[completion.round] == expected, "G4: equal rounds, equal chains"
        self.held[rank][completion.round] = completion
        super()._completed(rank, completion)

    def _committed(self, rank: int, round_: int) -> None:
        for other in self._others(rank):
            if other in self.live and other not in self.entered_at:
                assert self.machines[other].complete >= round_, "G5"
        for old in [old for old in self.held[rank] if old <= round_]:
            del self.held[rank][old]

    def _check_null(self, rank: int, round_: int) -> None:
        """When it is decided, which may be in the fence; told again it is no decision."""
        if (rank, self.incarnations[rank], round_) in self.told:
            return
        machine, passed_over = self.machines[rank], self.gone
        if machine._learner.loading:
            assert round_ <= machine.applied + machine.settings.unapplied_max, "M1: what it can keep"
        self.gone = self.gone | self.loading
        super()._check_null(rank, round_)
        self.gone = passed_over

    def _check_progress(self) -> None:
        if not self._changing:
            super()._check_progress()

    def _check_end(self) -> None:
        assert not self._changing, f"a change was never made: {self._waiting} are missing"
        super()._check_end()
        assert not self.loading
        for (rank, incarnation, round_), told in self.told.items():
            if self._is(rank, incarnation):
                assert self.completions[round_].binds.get(rank) == (told if isinstance(told, Bind) else None), "G6"
        last = len(self.completions)
        for rank in self.live:
            assert self.learners[rank].base == self.bases.get(last, b""), "the bases are equal"
            assert self.own_chains[rank][last] == self.chains[last]
