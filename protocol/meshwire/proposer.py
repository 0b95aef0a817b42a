"""When a member proposes a generation, and how it brings its proposal to an end (G2, G4, G7)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshwire.membershipevents import Phase
from meshwire.membershipstate import State
from meshwire.messages.generation import Enter, Propose, Standing
from meshwire.messages.job import Generation, Member
from meshwire.petitions import Kind
from meshwire.proposing import Roll, enter_message, is_minority, worst_linked

WISHES: Mapping[Kind, str] = MappingProxyType(
    {
        "leave": "leaves",
        "learn": "is ready to compute",
        "rest": "computes no more",
        "anew": "holds the base no more",
    }
)


@dataclass(slots=True)
class Proposal:
    """The own one, until all have promised."""

    generation: Generation
    until_s: float
    standings: dict[int, Standing] = field(default_factory=dict)


class Proposer:
    """Looks at the state after every input: is another generation wanted, and is it this member's turn?"""

    def __init__(self, state: State) -> None:
        self._state = state
        self._wanted_since_s: float | None = None
        self._minority_since_s: float | None = None
        self._not_before_s = float("-inf")
        self._failed = ""  # why the own proposal is to be replaced
        self._judged_links = False  # a missing link between members was given time already
        self.proposal: Proposal | None = None
        self.wake_s: float | None = None
        self.waiting = ""

    # What happens to the own proposal.

    def forget(self) -> None:
        """Another proposal was promised, or a generation entered, or this device is out."""
        self.proposal = None
        self._failed = ""
        self._wanted_since_s = None
        self._not_before_s = float("-inf")

    def ran(self) -> None:
        """Rounds go on."""
        self._judged_links = False
        self._minority_since_s = None

    def again(self, reason: str, now_s: float, *, wait_s: float = 0.0) -> None:
        """The own proposal leads nowhere: another one, by the list as it is then."""
        if self.proposal is not None:
            self.proposal = None
            self._failed = reason
            self._wanted_since_s = None
            self._not_before_s = now_s + wait_s

    def postpone(self, until_s: float) -> None:
        """Somebody else may be about to propose."""
        self._not_before_s = max(self._not_before_s, until_s)

    def promised(self, rank: int, standing: Standing, now_s: float) -> Enter | None:
        """A member's promise. The last one decides, unless two members have no link to each other (G7)."""
        state, proposal = self._state, self.proposal
        assert proposal is not None, "no proposal"
        proposal.standings[rank] = standing
        if len(proposal.standings) < len(proposal.generation.ranks):
            return None
        if apart := worst_linked(proposal.standings, state.rank):
            worst, other = (proposal.generation.members[rank] for rank in apart)
            grace = not self._judged_links and proposal.standings[apart[0]].generation is not None
            if not grace:
                state.overdue.add(worst.device)
            self._judged_links = True
            reason = f"{worst.name} and {other.name} have no link"
            self.again(reason, now_s, wait_s=state.timeouts.relink_grace_s if grace else 0.0)
            return None
        self.forget()
        return enter_message(proposal.generation, proposal.standings, state.rank)

    # Whether to propose.

    def consider(self, now_s: float) -> None:
        """Proposes, or notes in `wake_s` and `waiting` when to look again and why."""
        state = self._state
        self.wake_s, self.waiting = None, ""
        if self.proposal is not None:
            self._watch(self.proposal, now_s)
        if self.proposal is not None or (state.wish.leaves and state.phase is not Phase.PROMISED):
            return
        everyone = state.next_roll()
        absent = {rank for rank in everyone.ranks if not state.links.holds(everyone.members[rank])}
        reasons = self._reasons(everyone, absent, now_s)
        if not reasons:
            self._wanted_since_s = None
            self._wait_for_phase()
            return
        self.waiting = "a new generation: " + ", ".join(reasons)
        since_s = self._wanted_since_s = now_s if self._wanted_since_s is None else self._wanted_since_s
        if state.entered is None:
            if self._reached(since_s + state.timeouts.enter_s, now_s):
                state.leave("the change of generation failed: " + ", ".join(reasons), now_s)
            return
        roll = self._roll(everyone, absent)
        if self._reached(self._propose_at_s(everyone, absent, roll, since_s, now_s), now_s):
            self._propose(roll, now_s)

    def _watch(self, proposal: Proposal, now_s: float) -> None:
        state = self._state
        waits_for = [m for rank, m in proposal.generation.live.items() if rank not in proposal.standings]
        self.waiting = f"promises of generation {proposal.generation.number}: {_names(waits_for)}"
        gone = [member for member in proposal.generation.live.values() if not state.links.holds(member)]
        if any(self._reached(state.links.suspect_at_s(member), now_s) for member in gone):
            self.again(state.links.missing(gone), now_s)
        elif self._reached(proposal.until_s, now_s):
            state.overdue |= {member.device for member in waits_for} - {state.me.device}
            self.again(f"no promise of {_names(waits_for)}", now_s)

    def _reasons(self, everyone: Roll, absent: set[int], now_s: float) -> list[str]:
        state = self._state
        members = everyone.members
        if state.phase is Phase.PROMISED:
            if self._failed:
                return [self._failed]
            proposer = next(member for member in members if member.device == state.change.proposer)
            if not state.links.holds(proposer) and self._reached(state.links.suspect_at_s(proposer), now_s):
                return [f"{state.links.missing([proposer])}, who proposed generation {state.change.number}"]
            if state.until_s is not None and self._reached(state.until_s, now_s):
                return [f"{proposer.name} did not commit generation {state.change.number}"]
            return []
        lost = [members[r] for r in sorted(absent) if self._reached(state.links.suspect_at_s(members[r]), now_s)]
        reasons = [state.links.missing(lost)] if lost else []
        reasons += state.torn.values()
        if state.until_s is not None and state.phase is Phase.ENTERED and self._reached(state.until_s, now_s):
            late = [members[rank] for rank in state.missing]
            state.overdue |= {member.device for member in late}
            reasons.append(f"{_names(late)} did not enter generation {state.change.number}")
        if state.phase is Phase.CATCHING_UP:  # petitions of before are being fulfilled
            if state.until_s is not None and self._reached(state.until_s, now_s):
                reasons.append("this device has not caught up in time")
            return reasons
        for kind, text in WISHES.items():
            if ranks := state.petitions.wishing(kind, state.change):
                reasons.append(f"{_names([members[rank] for rank in sorted(ranks)])} {text}")
        if joining := self._joining(everyone, absent):
            reasons.append(f"{_names(list(joining))} asks in")
        return reasons

    def _roll(self, everyone: Roll, absent: set[int]) -> Roll:
        state = self._state
        overdue = {rank for rank in everyone.ranks if everyone.members[rank].device in state.overdue}
        # Whoever proposes is in the generation, and repeats that it wishes to leave.
        leaving = state.petitions.wishing("leave", state.change) - {state.rank}
        return state.next_roll(
            without=absent | overdue | leaving,
            joining=self._joining(everyone, absent),
            learn=state.petitions.wishing("learn", state.change),
            rest=state.petitions.wishing("rest", state.change),
        )

    def _joining(self, everyone: Roll, absent: set[int]) -> tuple[Member, ...]:
        """Who asks in and can be taken in; not who was listed just now and did not do its part."""
        state = self._state
        reached = {everyone.members[rank].device for rank in everyone.ranks if rank not in absent}
        joining = state.petitions.joining(state.links, everyone.members, reached - state.overdue, state.members_max)
        return tuple(member for member in joining if member.device not in state.overdue)

    def _propose_at_s(self, everyone: Roll, absent: set[int], roll: Roll, since_s: float, now_s: float) -> float:
        """After its turn (G7), not while somebody may be back within the grace, and in a minority much later."""
        state, timeouts = self._state, self._state.timeouts
        suspect_s = [state.links.suspect_at_s(everyone.members[rank]) for rank in absent]
        grace_s = min(since_s + timeouts.relink_grace_s, max(suspect_s, default=since_s))
        others = {rank for rank in everyone.ranks if rank != state.rank}
        reached = others & {*roll.ranks}
        turns = 0 if self._failed else sum(rank < state.rank for rank in reached)
        if 0 < 2 * len(reached) < len(others):
            turns += 2  # the many that this member does not reach may reach the few that it does
        at_s = max(since_s + turns * timeouts.turn_s, grace_s, self._not_before_s)
        if not self._is_minority(roll, everyone, absent):
            self._minority_since_s = None
            return at_s
        if self._minority_since_s is None:
            self._minority_since_s = now_s
        self.waiting += "; fewer than half of the learners are here, the others may be together elsewhere"
        return max(at_s, self._minority_since_s + timeouts.minority_s)

    def _is_minority(self, roll: Roll, everyone: Roll, absent: set[int]) -> bool:
        state = self._state
        assert state.entered is not None, "no history"
        restarted = {rank for rank in absent if everyone.members[rank].device in state.links}
        accounted = restarted | state.petitions.wishing("leave", state.change)
        return is_minority(state.entered, roll.ranks, accounted)

    def _propose(self, roll: Roll, now_s: float) -> None:
        state = self._state
        assert state.entered is not None, "no history"
        before = {member.device for member in state.entered.live.values()}
        generation = Generation(
            job=state.job,
            number=state.highest + 1,
            proposer=state.me.device,
            parent=state.entered.digest(),
            members=roll.members,
            ranks=roll.ranks,
            learning=roll.learning,
        )
        for member in generation.live.values():
            if member.device not in before:
                state.send_where(member.device)
            state.send(member.device, Propose(generation=generation))
        self.forget()
        self.proposal = Proposal(generation, now_s + state.timeouts.answer_s)
        state.promise(generation, now_s)
        self.consider(now_s)

    def _wait_for_phase(self) -> None:
        state = self._state
        match state.phase:
            case Phase.PROMISED:
                proposer = state.name(state.change.proposer)
                self.waiting = f"{proposer} to commit generation {state.change.number}"
            case Phase.CATCHING_UP:
                self.waiting = f"the rounds before generation {state.change.number}"
            case Phase.ENTERED:
                late = [state.change.members[rank] for rank in state.missing]
                self.waiting = f"{_names(late)} to enter generation {state.change.number}"

    def _reached(self, at_s: float, now_s: float) -> bool:
        """Has the time come? If not, look again then."""
        if now_s < at_s:
            self.wake_s = at_s if self.wake_s is None else min(self.wake_s, at_s)
        return now_s >= at_s


def _names(members: list[Member]) -> str:
    return ", ".join(member.name for member in members)
