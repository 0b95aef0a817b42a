"""The membership machine: in which generation of a job this daemon is, and how the next one comes about (G1 to G7).

Pure, like the round machine: inputs in, a list of effects out (`membershipevents`), `now_s` of any monotonic clock as
an argument, one timer. What other devices send never raises: what breaks the protocol becomes a `Refusal` and changes
nothing; what is only outdated is ignored or answered. Links deliver in order, and after `unlinked` nothing of the old
link is fed in.

What the rules leave open, and how it is settled here, stands in RULES.md after G8.
"""

from collections.abc import Collection
from dataclasses import replace

from meshwire import limits
from meshwire.membership.checks import (
    enter_wrong,
    extension_wrong,
    number_wrong,
    promise_wrong,
    proposal_wrong,
)
from meshwire.membership.effects import Effect, Message, Phase, Waiting
from meshwire.membership.lineage import ballot, rank_of
from meshwire.membership.partitions import Whereabouts
from meshwire.membership.proposer import Proposer
from meshwire.membership.requests import Kind
from meshwire.membership.state import State
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
    """One daemon's membership in one job. Every input returns the effects to perform, in order.

    With `generation` (the first one of the job, committed) rounds go on from the start; without, this device asks the
    linked ones of `known` to take it in. Feed `linked` for every live link at once. `members_max`: so many devices may
    ever be in the job; whoever comes later is turned away.
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
        self._state = State(me, job, timeouts, now_s, generation, known, members_max)
        self._proposer = Proposer(self._state)
        self._whereabouts = Whereabouts(self._state, self._proposer)
        self._waiting = ""
        self._wake_s: float | None = None

    # What is known.

    @property
    def phase(self) -> Phase:
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

    def deadline(self) -> float | None:
        """When to call `timer` next, on the clock of `now_s`; None if nothing is due at any time."""
        return self._wake_s

    # Links.

    def linked(self, device: str, incarnation: int, now_s: float) -> list[Effect]:
        """A link to a device that may take part is up, or has replaced another to it."""
        state = self._state
        if device == state.me.device:
            return self._settle(now_s)
        state.links.opened(device, incarnation)
        state.note_linked(device, incarnation)
        self._whereabouts.relinked(device)
        first = device in state.unseen
        state.unseen.discard(device)
        if not first:
            state.unsure.add(device)
        if state.phase is not Phase.OUT and state.is_listed(device):
            for refused in state.refusals.own():  # what was said on another link may be lost
                state.accuse(device, refused)
        if state.entered is not None and not first:
            self._whereabouts.tell(device)
        if state.phase is not Phase.OUT and state.is_listed(device, incarnation) and not first:
            reason = f"the link to {state.name(device)} was renewed"
            if self._proposer.proposal is not None:
                self._proposer.again(reason, now_s)
            elif state.phase is not Phase.PROMISED:
                state.torn[device] = reason
        return self._settle(now_s)

    def unlinked(self, device: str, reason: str, now_s: float) -> list[Effect]:
        """The link is gone: closed, or given up after a silence."""
        state = self._state
        state.links.closed(device, reason, now_s + state.timeouts.relink_grace_s)
        state.outside.forget(device)
        state.ahead.pop(device, None)
        self._whereabouts.relinked(device)
        return self._settle(now_s)

    def gone(self, device: str, incarnation: int, now_s: float) -> list[Effect]:
        """This incarnation is gone for good: it said so, or its link ended, and where it was nobody listens any more.

        It is not waited for as one that may be together with others elsewhere. The second can be wrong.
        """
        self._state.note_gone(device, incarnation)
        return self._settle(now_s)

    def away(self, now_s: float) -> list[Effect]:
        """This machine slept, stood still, or was in no network or another: what is missed here was not lost here.

        Even if it is entitled to go on without the others, it looks for them first: they may have done so
        provisionally.
        """
        self._state.back_until_s = now_s + self._state.timeouts.back_s
        return self._settle(now_s)

    # Answers of the shell.

    def standing(self, standing: Standing, now_s: float) -> list[Effect]:
        """Answer to `Fence`, at once: complete rounds, chain hashes of the newest of them (at least that of the last
        one; h_0 if there is none), samples in them. Whoever has no history any more says `generation=None`.

        Which generation it is and who is linked is known here, whatever `standing` says.
        """
        state = self._state
        if state.phase is Phase.PROMISED and state.standing is None:
            promised = Promised(job=state.job, generation=state.change.hash64(), standing=state.stand(standing))
            if state.change.proposer != state.me.device:
                state.send(state.change.proposer, promised)
            elif self._proposer.proposal is not None:
                self._promised(state.rank, promised.standing, now_s)
        return self._settle(now_s)

    def caught_up(self, now_s: float) -> list[Effect]:
        """Answer to `CatchUpFrom`: all rounds up to the cut are here, or whoever reloads starts from it."""
        if self._state.phase is Phase.CATCHING_UP:
            self._state.enter(now_s)
            self._note_running()
        return self._settle(now_s)

    def cannot_catch_up(self, reason: str, now_s: float) -> list[Effect]:
        """The other answer, if what came was wrong; then this device asks in anew.

        A source that is gone needs no answer: a new generation follows.
        """
        if self._state.phase is Phase.CATCHING_UP:
            self._state.outside.failed()
            self._whereabouts.leave(reason, now_s)
        return self._settle(now_s)

    def step_out(self, reason: str, now_s: float) -> list[Effect]:
        """This device has nothing to bring into the rounds: it asks to be taken in, and gets what it lacks."""
        if self._state.phase is not Phase.OUT:
            self._whereabouts.leave(reason, now_s)
        return self._settle(now_s)

    def wish(self, kind: Kind, now_s: float) -> list[Effect]:
        """The learner is ready to compute (`learn`) or computes no more (`rest`), or this device goes (`leave`).

        It is repeated until a generation fulfils it; a newer wish replaces it, but rest comes before `learn` (X3).
        Whoever leaves does not ask in again.
        """
        state = self._state
        state.wish.say(kind)
        if state.phase is not Phase.OUT:
            state.tell_wish(now_s)
        return self._settle(now_s)

    def refuse(self, device: str, reason: str, now_s: float) -> list[Effect]:
        """This daemon has seen a member break the protocol (G10): it enters no generation with it until it asks in
        again, later. Nothing of it is to be heard until then."""
        self._state.shun(device, reason, now_s)
        return self._settle(now_s)

    def refuses(self, device: str) -> bool:
        """Whether the device is refused now."""
        return device in self._state.refusals

    @property
    def elsewhere(self) -> frozenset[str]:
        """Linked devices that have told lately in which generation they are."""
        return self._state.outside.told

    def look_again(self, now_s: float) -> list[Effect]:
        """What this member told of its `Holding` is so no more: where nobody computes, it may be what all wait for."""
        state = self._state
        if state.phase is not Phase.OUT and not state.change.learning:
            state.petitions.wish(state.me.device, "anew", now_s)
            state.send_members(Wish(job=state.job, kind="anew"))
        return self._settle(now_s)

    def note_progress(self, samples: int) -> None:
        """Samples in the rounds that are complete here, for `Where`."""
        self._state.samples = samples

    def note_holding(self, holding: Holding) -> None:
        """What there is here of the history entered: nobody leaves a base for a history that has none (G4)."""
        if self._state.entered is not None:
            self._state.holding = holding

    def note_round_trip(self, rtt_s: float) -> None:
        """As it is now to the farthest member. What is waited for already keeps its deadline."""
        self._state.timeouts = replace(self._state.timeouts, rtt_s=rtt_s)

    def timer(self, now_s: float) -> list[Effect]:
        """Does what is due. Harmless when nothing is."""
        return self._settle(now_s)

    # Messages.

    def receive(self, device: str, message: Message, now_s: float) -> list[Effect]:
        """A message on the live link to `device`."""
        state = self._state
        job = message.generation.job if isinstance(message, Propose) else message.job
        if device not in state.links:
            return self._settle(now_s)
        if job != state.job:
            state.protest(device, f"{type(message).__name__} of job {job}", now_s)
            return self._settle(now_s)
        goes = isinstance(message, Wish) and message.kind == "leave"
        if device in state.refusals and not goes and not isinstance(message, Propose | AskIn | Accuse):
            return self._settle(now_s)
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
                self._whereabouts.heard(device, message, now_s)
            case AskIn():
                self._on_ask(device, message, now_s)
            case Accuse():
                if state.phase is not Phase.OUT and state.is_listed(device):
                    state.believe(device, message, now_s)
                elif message.device == state.me.device:
                    state.refusals.accused_by(device, message.reason)
            case Wish():
                if state.phase is not Phase.OUT and state.is_listed(device):
                    state.petitions.wish(device, message.kind, now_s)
                    if message.kind == "leave" and not message.returns:
                        state.note_gone(device, state.links.incarnation(device))
        return self._settle(now_s)

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
        state.highest = max(state.highest, generation.number)
        entered_number = 0 if state.entered is None else state.entered.number
        newer = state.promised is None or ballot(generation) > ballot(state.promised)
        if not newer or generation.number <= entered_number:
            state.refuse(device, generation, "a newer generation is promised")
        elif state.phase is Phase.OUT and state.wish.leaves:
            state.refuse(device, generation, "this device has left the job")
        elif state.entered is not None and not state.is_listed(device, incarnation):
            state.refuse(device, generation, "its proposer is not in the generation that was entered")
            self._whereabouts.tell(device)
        elif wrong := extension_wrong(generation, state.entered):
            state.protest(device, f"proposal of generation {generation.number}: {wrong}", now_s)
        elif refused := [m for m in generation.live.values() if not state.refusals.pardon(m.device, now_s)]:
            for member in refused:
                state.accuse(device, member.device)
            reason = f"{refused[0].name} was refused: {state.refusals.reason(refused[0].device)}"
            state.refuse(device, generation, reason, generation.number)
        else:
            self._proposer.forget()
            state.promise(generation, now_s)

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
        enter = self._proposer.promised(rank, standing, now_s)
        if enter is not None:
            self._state.send_members(enter)
            self._state.commit(enter, now_s)
            self._note_running()

    def _on_refused(self, device: str, refused: Refused, now_s: float) -> None:
        state = self._state
        if number_wrong(refused.number, state.highest):
            state.protest(
                device, f"refusal: it names generation {refused.number}, {state.highest} is the highest known", now_s
            )
            return
        state.highest = max(state.highest, refused.number)
        if state.promised is None or refused.generation != state.promised.hash64() or not state.is_listed(device):
            return
        reason = f"{state.name(device)} refused: {refused.reason}"
        turn_s = state.timeouts.turn_s
        if self._proposer.proposal is not None:
            unwilling = refused.number < state.promised.number
            if unwilling:
                state.overdue.add(device)
            self._proposer.again(reason, now_s, wait_s=0.0 if unwilling else turn_s)
        elif state.phase in (Phase.CATCHING_UP, Phase.ENTERED):
            state.torn[device] = reason
            self._proposer.postpone(now_s + turn_s)

    def _on_enter(self, device: str, enter: Enter, now_s: float) -> None:
        state = self._state
        promised = state.promised
        if promised is None or enter.generation != promised.hash64():
            if enter.generation not in state.lineage and state.phase is not Phase.OUT:
                state.protest(device, "told to enter a generation that was not promised", now_s)
            return
        if state.phase is not Phase.PROMISED:
            return
        if device != promised.proposer or state.standing is None or device == state.me.device:
            state.protest(device, "told to enter by somebody else than the proposer, or before the promise", now_s)
        elif wrong := enter_wrong(enter, promised, state.rank, state.standing):
            state.protest(device, f"told to enter generation {promised.number}: {wrong}", now_s)
        else:
            self._proposer.forget()
            state.commit(enter, now_s)
            self._note_running()

    def _on_entered(self, device: str, entered: Entered, now_s: float) -> None:
        promised = self._state.promised
        if promised is not None and entered.generation == promised.hash64():
            rank = rank_of(promised, device)
            if rank in promised.ranks:
                self._state.has_entered(rank, now_s)
                self._note_running()

    def _on_ask(self, device: str, ask: AskIn, now_s: float) -> None:
        state = self._state
        if ask.member.device != device or not state.links.holds(ask.member):
            state.protest(device, "asks in for another device or incarnation", now_s)
        elif not state.refusals.pardon(device, now_s):
            state.accuse(device, device)  # it may have been started again, and not know
        elif state.entered is not None:
            state.outside.forget(device)  # where it was before
            self._whereabouts.tell(device)
            state.petitions.ask(ask, now_s)

    # Steps of the above.

    def _note_running(self) -> None:
        if self._state.phase is Phase.RUNNING:
            self._proposer.ran()

    def _ask_in(self, now_s: float) -> str:
        """G7: asks when it is time. Returns what is waited for."""
        state, outside = self._state, self._state.outside
        self._wake_s = None
        if state.wish.leaves:
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

    def _settle(self, now_s: float) -> list[Effect]:
        """Does what the last input has made possible, and hands out all effects."""
        state = self._state
        if state.phase is not Phase.OUT:
            self._proposer.consider(now_s)
            self._wake_s, waiting = self._proposer.wake_s, self._proposer.waiting
        if state.phase is Phase.OUT:
            self._proposer.forget()
            waiting = self._ask_in(now_s)
        effects, state.effects = state.effects, []
        if waiting != self._waiting:
            self._waiting = waiting
            effects.insert(0, Waiting(waiting))  # performing the last effect may make the machine say more
        return effects
