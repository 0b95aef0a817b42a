"""The membership machine: in which generation of a job this daemon is, and how the next one comes about (G1 to G7).

Pure, like the round machine: an input in (`inputs.py`), a list of effects out (`effects.py`), `now_s` of any monotonic
clock as an argument, one timer. So a list of inputs with their times is all that there is to know of a membership: it
can be written down and decided again (`record.py`). What other devices send never raises: what breaks the protocol
becomes a `MessageIgnored` and changes nothing; what is only outdated is ignored or answered. Links deliver in order,
and after `LinkDown` nothing of the old link is handed in.

What the rules leave open, and how it is settled here, stands in RULES.md after G8.
"""

from collections.abc import Collection
from dataclasses import replace

from meshwire import limits
from meshwire.membership.effects import Effect, MembershipPhase, Message, TurnedAway, WaitingFor
from meshwire.membership.inputs import (
    CannotCatchUp,
    CaughtUpToCut,
    FarthestRoundTrip,
    HoldingLost,
    Input,
    LinkDown,
    LinkUp,
    MessageFrom,
    PeerGone,
    RequestMade,
    RoundsCounted,
    SettingsAsked,
    SteppedOut,
    TimerDue,
    ViolationSeen,
    WasAway,
)
from meshwire.membership.lineage import Relation, ballot, keeps_history, rank_of, relation
from meshwire.membership.proposal_checks import (
    enter_wrong,
    extension_wrong,
    list_wrong,
    number_wrong,
    promise_wrong,
    proposal_wrong,
)
from meshwire.membership.proposer import Departure, FalsePromise, Proposer
from meshwire.membership.state import MembershipState
from meshwire.messages.generation import (
    Accuse,
    AskIn,
    Enter,
    Entered,
    Holding,
    Promised,
    Propose,
    Refused,
    Standing,
    Where,
    Wish,
)
from meshwire.messages.job import Generation, Member
from meshwire.timeouts import Timeouts


class Membership:
    """One daemon's membership in one job: `handle` takes whatever happens and returns what is to be done.

    With `generation` (the first one of the job, committed) rounds go on from the start; without, this device asks the
    linked ones of `known` to take it in. Hand in `LinkUp` for every live link at once. `members_max`: so many devices
    may ever be in the job; a device that comes later is turned away.
    """

    def __init__(
        self,
        me: Member,
        job: str,
        timeouts: Timeouts,
        now_s: float,
        *,
        generation: Generation | None = None,
        known: Collection[str] = (),
        members_max: int = limits.MEMBERS_MAX,
    ) -> None:
        self._state = MembershipState(me, job, timeouts, now_s, generation, known, members_max)
        self._proposer = Proposer(self._state)
        self._told_where: dict[str, tuple[int, int]] = {}  # by device: generation and samples as last told to it
        self._split_since_s: float | None = None  # members say that they were told to enter by different words
        self._waiting = ""
        self._wake_s: float | None = None

    # What is known.

    @property
    def phase(self) -> MembershipPhase:
        """Where this daemon is."""
        return self._state.phase

    @property
    def generation(self) -> Generation | None:
        """The one that was entered last; None while this device is out, or loads without a history."""
        return self._state.entered

    @property
    def promised(self) -> Generation | None:
        """The newest one promised."""
        return self._state.promised

    def waiting(self) -> str:
        """For people: what is waited for, of whom and why. Empty: for nothing."""
        return self._waiting

    @property
    def why_proposed(self) -> str:
        """For people: why this member proposed a generation last, or wants to."""
        return self._proposer.reasons

    def deadline(self) -> float | None:
        """When to hand in `TimerDue` next, on the clock of `now_s`; None if nothing is due at any time."""
        return self._wake_s

    def refuses(self, device: str) -> bool:
        """Whether the device is refused now (G10)."""
        return device in self._state.refusals

    @property
    def unprepared(self) -> list[Member]:
        """G9: whose learners are not ready, of those that are to begin the first round together."""
        return self._state.unprepared

    @property
    def asks_settings(self) -> bool:
        """C3: other settings are asked for here, and not those of a generation that all have entered."""
        return self._state.settings_asked is not None

    @property
    def elsewhere(self) -> frozenset[str]:
        """Linked devices that have told lately in which generation they are."""
        return self._state.rejoin.told

    # What happens.

    def handle(self, input_: Input, now_s: float) -> list[Effect]:
        """Takes one input, and returns the effects to perform, in order.

        Whatever has become possible by then is done with it, so an input that changes nothing, like `TimerDue`, may
        still have effects when its time has come. Three inputs only say how things are: they wait for the next one.
        """
        state = self._state
        match input_:
            case RoundsCounted(samples):
                state.samples = samples
                return []
            case Holding():
                if state.entered is not None:  # nobody leaves a base for a history that has none (G4)
                    state.holding = input_
                return []
            case FarthestRoundTrip(rtt_s):
                state.timeouts = replace(state.timeouts, rtt_s=rtt_s)
                return []
            case LinkUp(device, incarnation):
                self._on_link_up(device, incarnation, now_s)
            case LinkDown(device, reason):
                self._on_link_down(device, reason, now_s)
            case PeerGone(device, incarnation):
                state.note_gone(device, incarnation)
            case MessageFrom(device, message):
                self._on_message(device, message, now_s)
            case ViolationSeen(device, reason):
                state.shun(device, reason, now_s)
            case WasAway():
                self._proposer.note_away(now_s)
            case RequestMade(kind):
                state.own_request.say(kind)
                if state.phase is not MembershipPhase.OUT:
                    state.tell_wish(now_s)
            case SettingsAsked(wish):
                state.settings_asked = wish
            case SteppedOut(reason):
                if state.phase is not MembershipPhase.OUT:
                    self._leave(reason, now_s)
            case HoldingLost():
                self._on_holding_lost(now_s)
            case Standing():
                self._on_standing(input_, now_s)
            case CaughtUpToCut():
                if state.phase is MembershipPhase.CATCHING_UP:
                    self._enter(now_s)
            case CannotCatchUp(reason):
                if state.phase is MembershipPhase.CATCHING_UP:
                    state.rejoin.failed()
                    self._leave(reason, now_s)
            case TimerDue():
                pass
        return self._settle(now_s)

    def _on_link_up(self, device: str, incarnation: int, now_s: float) -> None:
        """Messages on the link before this one may be lost: within a generation it is entered anew (G6)."""
        state = self._state
        if device == state.me.device:
            return
        state.links.opened(device, incarnation)
        state.note_linked(device, incarnation)
        self._told_where.pop(device, None)  # what was told on the old link may be lost
        first = device in state.unseen
        state.unseen.discard(device)
        if not first:
            state.unsure.add(device)
        if state.phase is not MembershipPhase.OUT and state.is_listed(device):
            for refused in state.refusals.own():  # what was said on another link may be lost
                state.accuse(device, refused)
        if state.entered is not None and not first:
            self._tell_where(device)
        if state.phase is not MembershipPhase.OUT and state.is_listed(device, incarnation) and not first:
            reason = f"the link to {state.name(device)} was renewed"
            if self._proposer.proposal is not None:
                self._proposer.again(reason, now_s)
            elif state.phase is not MembershipPhase.PROMISED:
                self._proposer.note_torn(device, reason)

    def _on_link_down(self, device: str, reason: str, now_s: float) -> None:
        state = self._state
        state.links.closed(device, reason, now_s + state.timeouts.relink_grace_s)
        state.rejoin.forget(device)
        self._proposer.note_apart(device, None)
        self._proposer.forget_newer(device)
        self._told_where.pop(device, None)  # what was told on the old link may be lost

    def _on_standing(self, standing: Standing, now_s: float) -> None:
        """The answer to `Fence`, at once: complete rounds, chain hashes of the newest of them (at least that of the
        last one; h_0 if there is none), samples in them. A device without a history says `generation=None`.

        Which generation it is and who is linked is known here, whatever `standing` says.
        """
        state = self._state
        if state.phase is not MembershipPhase.PROMISED or state.standing is not None:
            return
        promised = Promised(job=state.job, generation=state.change.hash64(), standing=state.stand(standing))
        if state.change.proposer != state.me.device:
            state.send(state.change.proposer, promised)
        elif self._proposer.proposal is not None:
            self._promised(state.rank, promised.standing, now_s)

    def _on_holding_lost(self, now_s: float) -> None:
        state = self._state
        if state.phase is not MembershipPhase.OUT and not state.change.learning:
            state.requests.wish(state.me.device, "anew", now_s)
            state.send_members(Wish(job=state.job, kind="anew"))

    # Messages.

    def _on_message(self, device: str, message: Message, now_s: float) -> None:
        """Of a device that is linked; those of a refused one are not heard, but where it asks in, accuses or goes."""
        state = self._state
        job = message.generation.job if isinstance(message, Propose) else message.job
        if device not in state.links:
            return
        if job != state.job:
            state.protest(device, f"{type(message).__name__} of job {job}", now_s)
            return
        goes = isinstance(message, Wish) and message.kind == "leave"
        if device in state.refusals and not goes and not isinstance(message, Propose | AskIn | Accuse):
            return
        match message:
            case Propose():
                self._on_propose(device, message.generation, now_s)
            case Promised():
                self._on_promised(device, message, now_s)
            case Refused():
                self._on_refused(device, message, now_s)
            case Enter():
                self._on_enter(device, message, now_s)
            case Entered():
                self._on_entered(device, message, now_s)
            case Where():
                self._on_where(device, message, now_s)
            case AskIn():
                self._on_ask(device, message, now_s)
            case Accuse():
                if state.phase is not MembershipPhase.OUT and state.is_listed(device):
                    state.believe(device, message, now_s)
                elif message.device == state.me.device:
                    state.refusals.accused_by(device, message.reason)
            case Wish():
                if state.phase is not MembershipPhase.OUT and state.is_listed(device):
                    state.requests.wish(device, message.kind, now_s)
                    if message.kind == "leave" and not message.returns:
                        state.note_gone(device, state.links.incarnation(device))
                elif state.entered is not None and goes and not message.returns:
                    state.note_gone(device, state.links.incarnation(device))
                    self._tell_where(device)  # no generation without it follows, of which it would hear

    def _on_propose(self, device: str, generation: Generation, now_s: float) -> None:
        state = self._state
        if generation == state.promised:
            return
        listed = rank_of(generation, device)
        incarnation = None if listed is None else generation.members[listed].incarnation
        wrong = proposal_wrong(generation, state.me, device)
        wrong = wrong or number_wrong(generation.number, state.highest)
        if wrong is None and not state.links.leads_to(device, incarnation):
            wrong = "it lists its proposer with another incarnation"
        if wrong:
            state.protest(device, f"proposal of generation {generation.number}: {wrong}", now_s)
            return
        state.note_number(generation.number)
        entered_number = 0 if state.entered is None else state.entered.number
        newer = state.promised is None or ballot(generation) > ballot(state.promised)
        if not newer or generation.number <= entered_number:
            state.refuse(device, generation, "a newer generation is promised")
        elif state.phase is MembershipPhase.OUT and state.own_request.leaves:
            state.refuse(device, generation, "this device has left the job")
        elif state.entered is not None and not state.is_listed(device, incarnation):
            state.refuse(device, generation, "its proposer is not in the generation that was entered")
            self._tell_where(device)
        elif (later := state.later) is not None and later.root > generation.number:
            state.refuse(device, generation, "others have gone on in a later generation", later.number)
        elif wrong := extension_wrong(generation, state.entered):
            state.protest(device, f"proposal of generation {generation.number}: {wrong}", now_s)
        elif refused := [m for m in generation.live.values() if not state.refusals.pardon(m.device, now_s)]:
            for member in refused:
                state.accuse(device, member.device)
            reason = f"{refused[0].name} was refused: {state.refusals.reason(refused[0].device)}"
            state.refuse(device, generation, reason, generation.number)
        elif state.own_request.computes and rank_of(generation, state.me.device) not in generation.learning:
            # What the proposer has heard is of before this learner began: the next one would take its own place (X3).
            state.send(device, Wish(job=state.job, kind="learn"))
            state.refuse(device, generation, "its learner computes, and has not asked to rest", generation.number)
        else:
            self._proposer.forget()
            self._promise(generation, now_s)

    def _on_promised(self, device: str, promised: Promised, now_s: float) -> None:
        proposal = self._proposer.proposal
        if proposal is None or promised.generation != proposal.generation.hash64():
            return
        rank = rank_of(proposal.generation, device)
        wrong = promise_wrong(promised, proposal.generation)
        if rank not in proposal.generation.ranks or wrong:
            self._state.protest(device, f"promise: {wrong or 'it is not in the generation that was proposed'}", now_s)
            return
        self._promised(rank, promised.standing, now_s)

    def _promised(self, rank: int, standing: Standing, now_s: float) -> None:
        decided = self._proposer.promised(rank, standing, now_s)
        if isinstance(decided, FalsePromise):
            self._state.protest(decided.device, decided.reason, now_s)
        elif decided is not None:
            self._state.send_members(decided)
            self._commit(decided, now_s)

    def _on_refused(self, device: str, refused: Refused, now_s: float) -> None:
        state = self._state
        if number_wrong(refused.number, state.highest):
            state.protest(
                device, f"refusal: it names generation {refused.number}, {state.highest} is the highest known", now_s
            )
            return
        state.note_number(refused.number)
        if state.promised is None or refused.generation != state.promised.hash64() or not state.is_listed(device):
            return
        reason = f"{state.name(device)} refused: {refused.reason}"
        if self._proposer.proposal is not None:
            if refused.number < state.promised.number:  # it is unwilling
                self._proposer.note_overdue(device)
                self._proposer.again(reason, now_s)
            else:
                self._proposer.outbid(reason, now_s)
        elif state.phase in (MembershipPhase.CATCHING_UP, MembershipPhase.ENTERED):
            self._proposer.note_torn(device, reason)
            self._proposer.postpone(now_s + state.timeouts.turn_s)

    def _on_enter(self, device: str, enter: Enter, now_s: float) -> None:
        state = self._state
        promised = state.promised
        if promised is None or enter.generation != promised.hash64():
            if not state.was_promised(enter.generation) and state.phase is not MembershipPhase.OUT:
                state.protest(device, "told to enter a generation that was not promised", now_s)
            return
        if state.phase is not MembershipPhase.PROMISED:
            return
        if device != promised.proposer or state.standing is None or device == state.me.device:
            state.protest(device, "told to enter by somebody else than the proposer, or before the promise", now_s)
        elif wrong := enter_wrong(enter, promised, state.rank, state.standing):
            state.protest(device, f"told to enter generation {promised.number}: {wrong}", now_s)
        else:
            self._proposer.forget()
            self._commit(enter, now_s)

    def _on_entered(self, device: str, entered: Entered, now_s: float) -> None:
        promised = self._state.promised
        if promised is not None and entered.generation == promised.hash64():
            rank = rank_of(promised, device)
            if rank in promised.ranks:
                self._state.has_entered(rank, entered.told, now_s)
                self._note_running()

    def _on_ask(self, device: str, ask: AskIn, now_s: float) -> None:
        state = self._state
        if ask.member.device != device or not state.links.holds(ask.member):
            state.protest(device, "asks in for another device or incarnation", now_s)
        elif not state.refusals.pardon(device, now_s):
            state.accuse(device, device)  # it may have been started again, and not know
        elif state.entered is not None:
            state.rejoin.forget(device)  # where it was before
            self._proposer.note_apart(device, None)
            self._proposer.forget_newer(device)
            self._tell_where(device)
            state.requests.ask(ask, now_s)

    # Where this device is in the job's history, and where others are (G4, G7).

    def _tell_where(self, device: str) -> None:
        """Tells a device where this one is, which has entered a generation."""
        entered = self._state.entered
        assert entered is not None, "nowhere"
        self._told_where[device] = entered.hash64(), self._state.send_where(device)

    def _on_where(self, device: str, where: Where, now_s: float) -> None:
        """A device tells where it is: who is behind is told, and this one leaves its history where another is kept."""
        state, other = self._state, where.generation
        if wrong := list_wrong(other) or number_wrong(other.number, state.highest):
            state.protest(device, f"is in generation {other.number}: {wrong}", now_s)
            return
        state.note_number(other.number)
        state.note_root(other)
        state.rejoin.heard(device, where)
        self._proposer.note_apart(device, None)
        state.unsure.discard(device)
        if state.entered is None:
            went_on = state.phase is MembershipPhase.CATCHING_UP and other.number > state.change.number
            if went_on and where.based and state.me not in other.live.values():
                self._leave(f"generation {other.number} went on while this device caught up", now_s)
            elif state.phase is MembershipPhase.OUT and state.has_no_room(other):
                names = ", ".join(member.name for member in other.members)
                state.effects.append(TurnedAway(f"the job has all the {len(other.members)} devices it takes: {names}"))
            return
        match relation(state.entered, state.lineage, other, where.ancestors):
            case Relation.OLDER | Relation.PARTED if where.based and not state.has_base:
                pass  # whoever has nothing of the own history yields to it (the proposer), or loads first
            case Relation.OLDER:
                self._tell_where(device)
            case Relation.NEWER if state.me in other.live.values() and ballot(other) > ballot(state.entered):
                pass  # it may be entered here, too
            case Relation.NEWER | Relation.PARTED if state.based and not where.based:
                if state.has_base:
                    self._tell_where(device)  # nobody there has what it needs: this device keeps what it has
            case Relation.NEWER if other.root == state.entered.root:
                self._proposer.note_apart(device, where)  # those that are left here may be entitled, and it provisional
            case Relation.NEWER if self._proposer.was_away(now_s):
                self._proposer.note_newer(device, where)
                return
            case Relation.NEWER:
                self._leave(f"generation {other.number} went on without this device", now_s, where)
            case Relation.PARTED:
                self._settle_partition(device, where, now_s)
        self._proposer.forget_newer(device)

    def _settle_partition(self, device: str, where: Where, now_s: float) -> None:
        """G4: the lowest ranks of both sides compare; whoever loses tells its members.

        One pair compares, by what both have told each other last: samples only grow, so not both can lose.
        """
        state, other = self._state, where.generation
        assert state.entered is not None, "nowhere"
        reason = f"after a partition the history of generation {other.number} of {other.members[other.ranks[0]].name}"
        reason += f" is kept, with {where.samples} samples"
        lowest = state.entered.members[state.entered.ranks[0]]
        if device == lowest.device:
            self._leave(reason, now_s, where)
        elif lowest == state.me and device == other.members[other.ranks[0]].device:
            if self._told_where.get(device, (0, 0))[0] != state.entered.hash64():
                self._tell_where(device)
            _, samples = self._told_where[device]
            if keeps_history(state.entered, samples, other, where.samples):
                self._tell_where(device)
            else:
                state.send_members(where)
                self._leave(reason, now_s, where)

    # Steps of the above.

    def _leave(self, reason: str, now_s: float, kept: Where | None = None) -> None:
        """This device goes on in no generation, until it is taken into one. `kept`: where its history is not kept."""
        self._proposer.left()
        self._state.leave(reason, now_s, kept)

    def _propose(self, generation: Generation, now_s: float) -> None:
        """To all that it lists; those that were not in the one before are told where this device is, so that they know
        what it comes after. The own promise is the last effect, so that the shell may answer within it."""
        state = self._state
        assert state.entered is not None, "no history"
        before = {member.device for member in state.entered.live.values()}
        proposal = Propose(generation=generation)  # one message for all: it is encoded once
        for member in generation.live.values():
            if member.device not in before:
                state.send_where(member.device)
            state.send(member.device, proposal)
        self._proposer.begin(generation, now_s)
        self._promise(generation, now_s)

    def _promise(self, generation: Generation, now_s: float) -> None:
        self._proposer.promise_given()
        self._state.promise(generation, now_s)

    def _commit(self, enter: Enter, now_s: float) -> None:
        if self._state.commit(enter, now_s):
            self._enter(now_s)

    def _enter(self, now_s: float) -> None:
        self._proposer.entered()
        self._state.enter(now_s)
        self._note_running()

    def _note_running(self) -> None:
        if self._state.phase is MembershipPhase.RUNNING:
            self._proposer.ran()

    def _ask_in(self, now_s: float) -> str:
        """G7: asks when it is time. Returns what is waited for."""
        state, outside = self._state, self._state.rejoin
        self._wake_s = None
        if state.own_request.leaves:
            return ""
        devices, why_not = outside.target(state.links)
        if devices and outside.asks_now(state.links, now_s):
            linked = tuple(sorted(state.links))[: limits.PEERS_MAX]
            for device in devices:
                state.send(device, AskIn(job=state.job, member=state.me, linked=linked))
            outside.asked(devices, linked, now_s, state.timeouts)
            devices, why_not = outside.target(state.links)
        if devices:
            self._wake_s = outside.ask_at_s
        told = [f"{state.name(who)} refuses this device: {why}" for who, why in state.refusals.against_me.items()]
        whom = why_not or ", ".join(state.name(device) for device in devices)
        return "to be taken in: " + "; ".join([whom, *told])

    def _judge_split(self, now_s: float) -> float | None:
        """G10: all members are told to enter by one word. Where two were told different ones, their proposer lies, or
        one of them does. The proposer knows what it has told, and accuses whoever says otherwise: the others wait for
        that. If it keeps silent, it was the one. Returns when that will be clear; None: nothing is to be judged.
        """
        state = self._state
        differ = state.told_otherwise
        if not differ:
            self._split_since_s = None
            return None
        number, proposer = state.change.number, state.change.proposer
        if proposer == state.me.device:
            for member in differ:
                state.protest(member.device, f"enters generation {number} by another word than it was told", now_s)
            return None
        self._split_since_s = now_s if self._split_since_s is None else self._split_since_s
        at_s = self._split_since_s + state.timeouts.answer_s
        if now_s < at_s and proposer not in [member.device for member in differ]:
            return at_s
        names = ", ".join(member.name for member in differ)
        text = f"told {names} to enter generation {number} by another word than this device"
        state.protest(proposer, text, now_s)
        return None

    def _settle(self, now_s: float) -> list[Effect]:
        """Does what the last input has made possible, and hands out all effects."""
        state = self._state
        split_at_s = self._judge_split(now_s)
        if state.phase is not MembershipPhase.OUT:
            while isinstance(decision := self._proposer.consider(now_s), Generation):
                self._propose(decision, now_s)
            if isinstance(decision, Departure):
                self._leave(decision.reason, now_s, decision.kept)
            wake_s, waiting = self._proposer.wake_s, self._proposer.waiting
            self._wake_s = min((at_s for at_s in (wake_s, split_at_s) if at_s is not None), default=None)
            to_prepare = self._proposer.waits_to_prepare
        if state.phase is MembershipPhase.OUT:
            self._proposer.forget()
            waiting, to_prepare = self._ask_in(now_s), False
        effects, state.effects = state.effects, []
        if waiting != self._waiting:
            self._waiting = waiting
            # First: performing the last effect may make the machine say more.
            effects.insert(0, WaitingFor(waiting, to_prepare))
        return effects
