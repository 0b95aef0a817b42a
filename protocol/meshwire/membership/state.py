"""What one daemon knows of its membership in one job, and the steps from one phase to the next (G1, G2, G6)."""

from collections.abc import Collection, Sequence

from meshwire import limits
from meshwire.membership.effects import (
    CatchUpFrom,
    Effect,
    EnterGeneration,
    Fence,
    HistoryLeft,
    MembershipPhase,
    Message,
    MessageIgnored,
    NobodyLearns,
    Resume,
    Send,
    Shunned,
)
from meshwire.membership.lineage import extended, rank_of
from meshwire.membership.links import MemberLinks
from meshwire.membership.proposals import Roll, roll_of
from meshwire.membership.quorum import Votes, electorate_of
from meshwire.membership.refusals import Refusals
from meshwire.membership.rejoin import Rejoin
from meshwire.membership.requests import MemberRequests, OwnRequest
from meshwire.messages.generation import Accuse, Enter, Entered, Holding, Refused, Standing, Where, Wish
from meshwire.messages.job import Generation, Member, hash64_of
from meshwire.sync_modes.settings_changes import SettingsWish
from meshwire.timeouts import Timeouts

NOTHING = Standing(generation=None, number=0, complete=0, chains=(), samples=0, linked=())


class MembershipState:
    """What a member knows and has promised, and the steps from one phase to the next.

    The machine (`machine.py`) owns it and writes it; the proposer reads it to decide when another generation is wanted.
    """

    def __init__(
        self,
        me: Member,
        job: str,
        timeouts: Timeouts,
        now_s: float,
        generation: Generation | None,
        known: Collection[str],
        members_max: int,
    ) -> None:
        self.me = me
        self.job = job
        self.members_max = members_max
        self.timeouts = timeouts
        self.links = MemberLinks(me)
        self.requests = MemberRequests()
        self.refusals = Refusals(me.device, timeouts)
        self.rejoin = Rejoin(me.device, known, now_s)
        self.phase = MembershipPhase.OUT if generation is None else MembershipPhase.RUNNING
        self.entered = generation  # the newest one; None: no history is kept here
        self.promised = generation  # the newest one; nothing older is promised again
        self.highest = 0 if generation is None else generation.number  # of all numbers seen
        self.standing: Standing | None = None  # as promised
        self.votes = Votes(generation)
        self._later: Generation | None = None  # of the newest root that others have told of
        self.unsure: set[str] = set()  # devices whose links are new, and which have not said where they are
        self.own_request = OwnRequest()
        self.settings_asked: SettingsWish | None = None  # here (C3)
        self.samples = 0
        self.holding = Holding(base=generation is not None)  # of the history entered, as the shell said last
        # G9, at the job's beginning: whose learners are to begin together
        self.awaited: tuple[int, ...] = () if generation is None or generation.learning else generation.trainers
        self.way = "on"  # as in the `Enter` of the generation entered
        self._went_on = generation  # the newest one entered that was not entered to wait for who has the base
        self.until_s: float | None = None  # the deadline of the present phase
        self.unseen = set() if generation is None else {member.device for member in generation.live.values()}
        self.effects: list[Effect] = []
        parent = None if generation is None else generation.parent  # of a job that all had lost, and that goes on
        # what the promised generation came after, by hash, newest first
        self._lineage: tuple[int, ...] = () if parent is None else (hash64_of(parent),)
        # promised with any history, also one that was left, by hash, newest first
        self._promises: tuple[int, ...] = () if generation is None else (generation.hash64(),)
        self._told: bytes | None = None  # digest of the word to enter the promised generation; None: not told yet
        self._heard: dict[int, bytes] = {}  # the same of the ranks that have entered it
        self._promised_at_s = now_s
        self._told_where: set[str] = set()  # devices beyond the members that want to know where this one is
        self._gone: set[tuple[str, int]] = set()  # devices with incarnations
        if generation is not None:
            self.links.expect(generation, now_s + timeouts.patience_s)
            self.own_request.found(generation.number, computes=self.computes)

    # What is known.

    @property
    def change(self) -> Generation:
        """The newest generation promised, by a member of it."""
        assert self.promised is not None, "in no generation"
        return self.promised

    @property
    def rank(self) -> int:
        """The own one, for the job's whole life."""
        rank = rank_of(self.change, self.me.device)
        assert rank is not None, "not listed"
        return rank

    @property
    def computes(self) -> bool:
        """In the newest generation promised this rank's learner does."""
        return self.rank in self.change.learning

    @property
    def settings_to_come(self) -> SettingsWish | None:
        """What is asked for here (C3), unless the generation that is being entered brings it."""
        return None if self.phase is MembershipPhase.ENTERED and self._settings_met else self.settings_asked

    @property
    def _settings_met(self) -> bool:
        """The newest commit brings what is asked for here, if anything is."""
        return self.settings_asked is not None and self.settings_asked.is_met(self._committed.changes)

    @property
    def lineage(self) -> tuple[int, ...]:
        """What the entered generation came after, and what this daemon promised since, by hash."""
        own = None if self.entered is None else self.entered.hash64()
        return tuple(ancestor for ancestor in self._lineage if ancestor != own)

    def was_promised(self, generation: int) -> bool:
        """Has this daemon promised the generation with this hash, or one that came after it, as far as it remembers?"""
        return generation in self._promises or generation in self.lineage

    @property
    def has_base(self) -> bool:
        """Is the base of the history entered here: in this device, or in one that is linked and computes?"""
        entered = self.entered
        if entered is None:
            return False
        others = (entered.members[rank] for rank in entered.learning)
        makes_it = bool(self.awaited) and self.holding.prepared is not None  # every learner that comes could (G9)
        return makes_it or self.holding.base or any(one != self.me and self._is_with_us(one, entered) for one in others)

    @property
    def based(self) -> bool:
        """Can the history entered be gone on from here: is its base, or, while nobody computes, what all have agreed to
        go on from, perhaps a checkpoint that is still to be loaded?"""
        entered = self.entered
        if entered is None or entered.learning or self.way not in ("on", "back"):
            return self.has_base
        others = (member for member in entered.live.values() if member != self.me)
        return self.has_base or all(self._is_with_us(member, entered) for member in others)

    def _is_with_us(self, member: Member, entered: Generation) -> bool:
        """Is it linked, and has not left this generation, as far as it has said?"""
        left = member.device in self.requests.given_up or self.rejoin.is_after(member.device, entered)
        return self.links.holds(member) and not left and member.device not in self.unsure

    @property
    def basis_elsewhere(self) -> Where | None:
        """The best history of which somebody who is linked has the base, where nobody has that of the own one.

        Not one of an older root while a state of the own one is saved here: that may bring back what was committed
        since, unless rounds went on last in that very generation. One of the same root has that, and those that are
        here may never be entitled to go back without it.
        """
        entered, held = self.entered, self.holding
        if entered is None or self.based:
            return None
        where = self.rejoin.based(entered)
        saved = held.state is not None or held.saved is not None
        lacks = where is not None and where.generation.root < entered.root and where.generation != self._went_on
        return None if saved and lacks else where

    @property
    def may_have_base(self) -> list[Member]:
        """Members that are not here, are not known to be gone, and do not ask in: who does brings no history."""
        gone, asking = self.gone(self.change.members), self.requests.given_up
        away = ((rank, one) for rank, one in enumerate(self.change.members) if rank not in self.change.ranks)
        return [one for rank, one in away if (rank, one.incarnation) not in gone and one.device not in asking]

    @property
    def missing(self) -> tuple[int, ...]:
        """Who has not entered the promised generation, by the word that was told here."""
        return tuple(rank for rank in self.change.ranks if self._heard.get(rank) != self._told or self._told is None)

    @property
    def told_otherwise(self) -> list[Member]:
        """Who says that it was told to enter the promised generation by another word, and is not refused."""
        if self.phase is MembershipPhase.OUT or self._told is None:
            return []
        others = (self.change.members[rank] for rank, told in sorted(self._heard.items()) if told != self._told)
        return [member for member in others if member.device not in self.refusals]

    def next_roll(
        self,
        *,
        without: Collection[int] = (),
        joining: Collection[Member] = (),
        learn: Collection[int] = (),
        rest: Collection[int] = (),
    ) -> Roll:
        """Whom the next generation lists. Before a commit those whom a proposal left out are counted again."""
        entered = self.entered if self.phase is MembershipPhase.PROMISED and self.entered is not None else self.change
        return roll_of(self.change, entered, without=without, joining=joining, learn=learn, rest=rest)

    @property
    def unprepared(self) -> list[Member]:
        """G9: of those that are to begin together, whose learners are not ready."""
        ready = self.requests.wishing("learn", self.change)
        return [self.change.members[rank] for rank in self.awaited if rank not in ready]

    def ready(self, among: Collection[int]) -> set[int]:
        """Whose learners are to be taken in, of the ranks `among`. At the job's beginning none before all are that are
        awaited (G9): they begin together."""
        ready = self.requests.wishing("learn", self.change)
        return ready if {*self.awaited} & {*among} <= ready else set()

    def is_listed(self, device: str, incarnation: int | None = None) -> bool:
        """Is it a live member of the generation entered or promised, in this incarnation?"""
        generations = (generation for generation in (self.entered, self.promised) if generation is not None)
        members = (member for generation in generations for member in generation.live.values())
        return any(m.device == device and incarnation in (None, m.incarnation) for m in members)

    def has_no_room(self, generation: Generation) -> bool:
        """Was this device never in the job, and are there as many as it takes?"""
        return rank_of(generation, self.me.device) is None and len(generation.members) >= self.members_max

    def note_number(self, number: int) -> None:
        """Somebody has used this number for a generation."""
        self.highest = max(self.highest, number)

    def note_root(self, other: Generation) -> None:
        """Others have entered this generation: of the newest root it is remembered."""
        if self._later is None or other.root >= self._later.root:
            self._later = other

    @property
    def later(self) -> Generation | None:
        """What others have told of that has a newer root than what this member has entered, as long as somebody may go
        on from it: this member's word keeps others from going on in the old line (G4)."""
        later = self._later
        if later is None or any(vote.entered and vote.number >= later.root for vote in self.votes.told):
            return None
        goes_on = any((one.device, one.incarnation) not in self._gone for one in later.live.values())
        return later if goes_on else None

    def note_gone(self, device: str, incarnation: int) -> None:
        """This incarnation will never be heard again: until a generation that lists it proves the contrary."""
        if len(self._gone) < limits.PEERS_MAX:
            self._gone.add((device, incarnation))

    def note_linked(self, device: str, incarnation: int) -> None:
        """What was there before is gone."""
        for generation in (self.entered, self.promised):
            for member in () if generation is None else generation.members:
                if member.device == device and member.incarnation != incarnation:
                    self.note_gone(device, member.incarnation)

    def gone(self, members: Sequence[Member]) -> set[tuple[int, int]]:
        """Who is known to be, or is refused (G10), by their ranks among these members of all times."""
        refused = {(rank, one.incarnation) for rank, one in enumerate(members) if one.device in self.refusals}
        return self.departed(members) | refused

    def departed(self, members: Sequence[Member]) -> set[tuple[int, int]]:
        """Who is known to be gone, refused or not, by their ranks among these members of all times."""
        ranks = {member.device: rank for rank, member in enumerate(members)}
        return {(ranks[device], incarnation) for device, incarnation in self._gone if device in ranks}

    def name(self, device: str) -> str:
        """For people."""
        members = () if self.promised is None else self.promised.members
        return next((member.name for member in members if member.device == device), device[:8])

    # What is sent.

    def send(self, device: str, message: Message) -> None:
        """To a device other than this one, if it is linked."""
        if device in self.links:
            self.effects.append(Send(device, message))

    def send_members(self, message: Message) -> None:
        """To all other members of the promised generation."""
        for member in self.change.live.values():
            self.send(member.device, message)

    def send_where(self, device: str) -> int:
        """Tells where this daemon is; returns the samples that it told."""
        assert self.entered is not None, "nowhere"
        self._told_where.add(device)
        where = Where(
            job=self.job, generation=self.entered, ancestors=self.lineage, samples=self.samples, based=self.has_base
        )
        self.send(device, where)
        return where.samples

    def refuse(self, device: str, generation: Generation, reason: str, number: int | None = None) -> None:
        """Answers a proposal that is outdated or not for this daemon; `number` (default: promised) is what counts."""
        if number is None:
            number = 0 if self.promised is None else self.promised.number
        self.send(device, Refused(job=self.job, generation=generation.hash64(), number=number, reason=reason))

    def protest(self, device: str, text: str, now_s: float) -> None:
        """Something broke the protocol."""
        if not self.shun(device, text, now_s) and device not in self.refusals:
            self.effects.append(MessageIgnored(device, text))

    # Who is refused (G10).

    def shun(self, device: str, reason: str, now_s: float) -> bool:
        """This daemon has seen a member break the protocol, and tells all. False: it is none, or is refused already."""
        if device == self.me.device or device in self.refusals or not self.is_listed(device):
            return False
        self._refused(device, reason, self.me.device, self.refusals.count(device) + 1, now_s)
        for other in sorted(self.links):
            if self.is_listed(other):
                self.accuse(other, device)
        return True

    def accuse(self, to: str, device: str) -> None:
        """Tells a member why this one refuses another."""
        reason = self.refusals.reason(device)[: limits.REASON_CHARS_MAX]
        violations = min(self.refusals.count(device), limits.VIOLATIONS_MAX)
        self.send(to, Accuse(job=self.job, device=device, reason=reason, violations=violations))

    def believe(self, accuser: str, accuse: Accuse, now_s: float) -> None:
        """A member has seen another break the protocol.

        Its word is enough, once: if one member lies and the others are honest, the liar is in every accusation. So
        whoever alone speaks against one member after the other is refused itself; and of two that accuse each other
        before a generation is without one of them, the word of the lower rank counts.
        """
        refusals, device = self.refusals, accuse.device
        if device == self.me.device:
            refusals.accused_by(accuser, accuse.reason)
        if accuser in refusals and not self._outranks(accuser, device):
            return
        refusals.heard(accuser, device)
        if (other := refusals.speaks_alone(accuser, device)) is not None:
            if refusals.accuser(other) == accuser:
                refusals.acquit(other)
            self.shun(accuser, f"it alone says of {self.name(other)} and of {self.name(device)} that they do", now_s)
        elif device != self.me.device and device not in refusals and self.is_listed(device):
            if accuser in refusals:
                refusals.acquit(accuser)
            self._refused(device, accuse.reason, accuser, accuse.violations, now_s)

    def _outranks(self, accuser: str, device: str) -> bool:
        """Is the accuser refused on the word of nobody but this device, of a higher rank?"""
        own, other = rank_of(self.change, accuser), rank_of(self.change, device)
        mutual = self.refusals.accuser(accuser) == device
        return mutual and self.is_listed(accuser) and own is not None and other is not None and own < other

    def _refused(self, device: str, reason: str, accuser: str, count: int, now_s: float) -> None:
        self.refusals.refuse(device, reason, accuser, count, now_s)
        self.requests.forget(device)
        self.effects.append(Shunned(device, reason, accuser, self.refusals.count(device)))

    # From phase to phase.

    def promise(self, generation: Generation, now_s: float) -> None:
        """G2: from now on nothing older. An earlier promise that led nowhere yet is withdrawn."""
        earlier = self.promised
        unfinished = earlier is not None and self.phase in (MembershipPhase.PROMISED, MembershipPhase.CATCHING_UP)
        if earlier is not None and unfinished and earlier.proposer != generation.proposer:
            reason = f"generation {generation.number} was promised instead"
            self.refuse(earlier.proposer, earlier, reason, generation.number)
        if generation.parent is not None:
            parent = int.from_bytes(generation.parent[:8], "little")
            self._lineage = extended(self._lineage, parent, *self.rejoin.ancestors(parent))
        # What was promised with a history that was left since is no ancestor of the next one.
        if earlier is not None and self.phase is not MembershipPhase.OUT:
            self._lineage = extended(self._lineage, earlier.hash64())
        self.promised = generation
        self._promises = extended(self._promises, generation.hash64())
        self.highest = max(self.highest, generation.number)
        self.phase = MembershipPhase.PROMISED
        self.standing = self._told = None
        self._heard = {}
        self._promised_at_s = now_s
        self.until_s = now_s + self.timeouts.enter_s
        self.links.expect(generation, now_s + self.timeouts.relink_grace_s)
        self.votes.promise(generation)
        self.effects.append(Fence(generation))

    def stand(self, held: Standing) -> Standing:
        """G4: what this member brings."""
        if held.generation is None:
            self.entered = None
        else:
            self.holding = held.holding
        self.standing = self.would_say(held)
        return self.standing

    def would_say(self, held: Standing | None = None) -> Standing:
        """What this member would say now, with these rounds or none."""
        later = () if self.later is None else (electorate_of(self.later, entered=True),)
        # A promise older than a root that others have entered decides nothing any more, and would take others' room.
        own = (vote for vote in self.votes.told if vote.entered or not later or vote.number >= later[0].number)
        told = (*later, *own)
        votes, untold = told[: limits.ATTEMPTS_MAX + 1], told[limits.ATTEMPTS_MAX + 1 :]
        forgot = max((vote.number for vote in untold), default=0)  # what finds no room counts as forgotten
        say = {
            "linked": self.links.ranks(self.change),
            "votes": votes,
            "forgot": max(forgot, self.votes.forgot),
            "asks": self.settings_asked,
        }
        if held is not None:
            say["holding"] = held.holding
        if self.entered is None:
            return NOTHING.model_copy(update=say)
        history = self.votes.history(self.entered)
        say |= {"generation": self.entered.hash64(), "number": self.entered.number, "history": history}
        return (held or NOTHING).model_copy(update=say)

    def commit(self, enter: Enter, now_s: float) -> bool:
        """All have promised. Returns whether nothing is lacking up to the cut, so that it can be entered at once."""
        assert self.standing is not None, "not promised"
        self._committed = enter
        self._told = enter.digest()
        self.phase = MembershipPhase.CATCHING_UP
        self.until_s = now_s + self.timeouts.catch_up_s
        reload = self.rank in enter.reload
        if not reload and self.standing.complete == enter.cut:
            return True
        if reload:
            if enter.way != "back":
                self.entered = None  # going back, the own history counts until the saved one is here: that may be lost
                self.holding = Holding()
            self.own_request.forget()
        source = self.change.members[enter.source].device
        self.effects.append(CatchUpFrom(enter.source, source, self.change, enter, reload))
        return False

    def enter(self, now_s: float) -> None:
        """All rounds up to the cut are here. Receiving is on before the others hear of it."""
        generation = self.entered = self.change
        self.way, self.awaited = self._committed.way, self._committed.awaited
        if self.way != "wait":
            self._went_on = generation
        if self.awaited and not self._committed.given:
            self.own_request.unready()  # it starts from no state that is given from now on, unless it is the giver
        self._gone -= {(member.device, member.incarnation) for member in generation.live.values()}
        self.unsure -= {member.device for member in generation.live.values()}
        self.phase = MembershipPhase.ENTERED
        self.requests.settle(self._promised_at_s)
        self.own_request.follow(self._committed.counted, computes=self.rank in self._committed.learning)
        self.effects.append(EnterGeneration(generation, self._committed))
        if self._committed.way in ("lost", "failed"):
            self.effects.append(NobodyLearns(generation, failed=self._committed.way == "failed"))
        told = self._committed.digest()
        self.send_members(Entered(job=self.job, generation=generation.hash64(), told=told))
        live = {member.device for member in generation.live.values()}
        hear = {member.device for member in generation.members} | self._told_where
        for device in sorted(hear if self.way != "lost" else ()):  # nobody is to come to what is being laid down
            if device not in live and device in self.links:
                self.send_where(device)
        self.has_entered(self.rank, told, now_s)

    def has_entered(self, rank: int, told: bytes, now_s: float) -> None:
        """Of this member or another, perhaps before this one. When all have, by one word, rounds go on.

        Args:
            told: digest of the `Enter` that it goes by. Its first word counts.
        """
        self._heard.setdefault(rank, told)
        self.requests.unready(self.change.members[rank].device)
        entered = self.phase in (MembershipPhase.ENTERED, MembershipPhase.RUNNING)
        if entered and (self.change.provisional or not {*self.change.counted} & {*self.missing}):
            self.votes.settle(self.change)
        if self.phase is not MembershipPhase.ENTERED or self.missing:
            return
        self.phase = MembershipPhase.RUNNING
        if self._settings_met:
            self.settings_asked = None  # not before: others may go on without those that have entered
        self.until_s = None
        self.refusals.against_me.clear()
        self.rejoin.came_in(now_s)
        begins = self.own_request.run(self.change.number, computes=self.computes)
        if begins:
            self.holding = self.holding.model_copy(update={"base": True})
        self.effects.append(Resume(self.change, begins))
        self.tell_wish(now_s)

    def tell_wish(self, now_s: float) -> None:
        """The own one, to a generation that does not fulfil it."""
        if (kind := self.own_request.due(computes=self.computes)) is not None:
            self.requests.wish(self.me.device, kind, now_s)
            self.send_members(Wish(job=self.job, kind=kind))

    def leave(self, reason: str, now_s: float, kept: Where | None = None) -> None:
        """This member's history is not kept, but that of `kept` if another is: it is in no generation, and those that
        still count on it are told."""
        self.send_members(Wish(job=self.job, kind="leave", returns=not self.own_request.leaves))
        self.phase = MembershipPhase.OUT
        self.entered = self.standing = self.until_s = None
        self.holding = Holding()
        self._lineage = ()
        self.requests = MemberRequests()
        self.own_request.forget()
        self.rejoin.left(now_s, self.timeouts)
        self.effects.append(HistoryLeft(reason, kept))
