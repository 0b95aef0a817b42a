"""When a member proposes a generation, and how it brings its proposal to an end (G2, G4, G7 who changes it).

After every input `consider` asks, in this order: does the own proposal still lead anywhere (`_watch`)? Is there a
reason for another generation (`_reasons`)? Whom would it list (`_roll`)? Are those entitled to go on without the others
(`_judge`, `quorum.py`)? And is it this member's turn (`_propose_at_s`)? All members ask the same with what they know,
and mostly come to the same answer; the turns keep them from proposing all at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshwire.membership.effects import MembershipPhase
from meshwire.membership.proposals import (
    Roll,
    enter_message,
    lies_about_settings,
    told_other_settings,
    worst_linked,
)
from meshwire.membership.quorum import is_entitled, is_gone, newest_history, still_there
from meshwire.membership.requests import Kind
from meshwire.membership.state import MembershipState
from meshwire.messages.generation import Electorate, Enter, Standing, Where
from meshwire.messages.job import Generation, Member, without_hubs
from meshwire.timeouts import BASE_S

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


@dataclass(frozen=True, slots=True)
class FalsePromise:
    """A member has promised with what it cannot have: it breaks the protocol."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class Departure:
    """This device leaves its history, and asks to be taken into another. `kept`: where that is, if it is known."""

    reason: str
    kept: Where | None = None


class Proposer:
    """Decides, after every input, whether another generation is wanted and whether it is this member's turn to propose.

    It holds what speaks for another generation, and the own proposal. Of all that is known it reads the state and
    changes nothing there, but for taking back the promise to itself when it gives its proposal up.
    """

    def __init__(self, state: MembershipState) -> None:
        self._state = state
        self._wanted_since_s: float | None = None
        self._outvoted_since_s: float | None = None  # those that are here are not entitled to go on
        self._baseless_since_s: float | None = None  # nobody who is here has the base
        self._not_before_s = float("-inf")
        self._outbid_wait_s = 0.0  # the last one, since rounds went on
        self._failed = ""  # why the own proposal is to be replaced
        self._told: dict[Member, Standing] = {}  # by others to proposals of this member that failed
        # Others went on without this one, by the device that tells. Two kinds: who went on apart has the same root, and
        # is met in a generation of both, for each side's votes may be needed; a newer history has a later root, is only
        # followed, and no generation is made for it.
        self._apart: dict[str, Where] = {}
        self._newer: dict[str, Where] = {}
        self._overdue: set[str] = set()  # devices that did not do their part in time
        self._torn: dict[str, str] = {}  # devices with which messages of this generation may be lost: why
        self._back_s = float("-inf")  # since this machine was away: the others may have gone on without it
        self._judged_links = False  # a missing link between members was given time already
        self.proposal: Proposal | None = None
        self.wake_s: float | None = None
        self.waiting = ""
        self.waits_to_prepare = False  # for learners that are to come to mt.prepare
        self.reasons = ""  # of what was wanted last

    # What happens to the own proposal.

    def forget(self) -> None:
        """Another proposal was promised, or a generation entered, or this device is out."""
        self._withdraw()
        self._failed = ""
        self._wanted_since_s = None
        self._not_before_s = float("-inf")

    def promise_given(self) -> None:
        """A newer generation is promised: what was wrong with the one before matters no more."""
        self._overdue, self._torn = set(), {}

    def entered(self) -> None:
        """A generation is entered: what others said before is settled."""
        self._told, self._apart = {}, {}
        root = self._state.change.root
        self._newer = {device: where for device, where in self._newer.items() if where.generation.root > root}

    def left(self) -> None:
        """This device is in no generation any more."""
        self.forget()
        self.promise_given()
        self._told, self._apart, self._newer = {}, {}, {}

    def ran(self) -> None:
        """Rounds go on."""
        self._judged_links = False
        self._outvoted_since_s = None
        self._outbid_wait_s = 0.0
        self._overdue.clear()

    def begin(self, generation: Generation, now_s: float) -> None:
        """What `consider` returned has been proposed to all."""
        self.forget()
        self.proposal = Proposal(generation, now_s + self._state.timeouts.answer_s)

    def again(self, reason: str, now_s: float, *, wait_s: float = 0.0) -> None:
        """The own proposal leads nowhere: another one, by the list as it is then."""
        if self.proposal is not None:
            self._withdraw()
            self._failed = reason
            self._wanted_since_s = None
            self._not_before_s = now_s + wait_s

    def outbid(self, reason: str, now_s: float) -> None:
        """A member has promised another's generation, which should be here within a turn.

        If it is not, the link to its proposer has stalled, and that one hears nothing from here either: both would
        outbid each other in every turn until the link is closed. So the wait doubles each time until rounds go on.
        """
        timeouts = self._state.timeouts
        self._outbid_wait_s = min(max(timeouts.turn_s, 2 * self._outbid_wait_s), timeouts.answer_s)
        self.again(reason, now_s, wait_s=self._outbid_wait_s)

    def postpone(self, until_s: float) -> None:
        """Somebody else may be about to propose."""
        self._not_before_s = max(self._not_before_s, until_s)

    def promised(self, rank: int, standing: Standing, now_s: float) -> Enter | FalsePromise | None:
        """A member's promise. The last one decides, unless two members have no link to each other (G7), or those that
        promised are not what the proposal took them for: entitled, or not; or one of them would not enter, for another
        has told a lie."""
        state, proposal = self._state, self.proposal
        assert proposal is not None, "no proposal"
        proposal.standings[rank] = standing
        if len(proposal.standings) < len(proposal.generation.ranks):
            return None
        if apart := worst_linked(proposal.standings, state.rank):
            worst, other = (proposal.generation.members[rank] for rank in apart)
            grace = not self._judged_links and proposal.standings[apart[0]].generation is not None
            if not grace:
                self._overdue.add(worst.device)
            self._judged_links = True
            reason = f"{worst.name} and {other.name} have no link"
            self.again(reason, now_s, wait_s=state.timeouts.relink_grace_s if grace else 0.0)
            return None
        if wrong := self._misjudged(proposal):
            self._told = {proposal.generation.members[rank]: held for rank, held in proposal.standings.items()}
            self.again(wrong, now_s)
            return None
        awaited = self._hopes_for_base(BASE_S, now_s)
        missed = self._hopes_for_base(state.timeouts.missed_s, now_s)
        enter = enter_message(proposal.generation, proposal.standings, state.rank, awaited=awaited, missed=missed)
        if (one := told_other_settings(enter, proposal.standings)) is not None:
            return self._without_liar(one, enter.source, proposal, now_s)
        self.proposal = None  # it is not withdrawn: from now on somebody may enter it
        self.forget()
        return enter

    def _without_liar(self, one: int, source: int, proposal: Proposal, now_s: float) -> FalsePromise | None:
        """Members tell of different settings (C3). Where this one cannot tell who lies, it leaves it to those that can
        to propose."""
        state, members = self._state, proposal.generation.members
        liar = lies_about_settings(one, source, proposal.standings, state.rank)
        if liar is not None:
            text = "promises with other settings than the rounds that it may have bound can go by"
            return FalsePromise(members[liar].device, text)
        told = f"{members[one].name} and {members[source].name} tell of different settings"
        self.again(told, now_s, wait_s=state.timeouts.enter_s)
        return None

    # What speaks for another generation.

    def note_overdue(self, device: str) -> None:
        """It does not do its part: the next proposal is without it."""
        self._overdue.add(device)

    def note_torn(self, device: str, reason: str) -> None:
        """Messages of this generation between this device and that one may be lost (G6)."""
        self._torn[device] = reason

    def note_apart(self, device: str, where: Where | None) -> None:
        """Notes that a device is in a provisional generation that went on without this one; None: it is not, or is not
        linked any more."""
        self._apart.pop(device, None)
        if where is not None:
            self._apart[device] = where

    def note_newer(self, device: str, where: Where) -> None:
        """Notes that a device tells of a newer history, when this machine was away: it may be of before its sender was
        lost. It is no reason for a generation: each one that is entered would be answered by the same."""
        self._newer[device] = where

    def forget_newer(self, device: str) -> None:
        """Forgets it where the device says something else, or its link is lost."""
        self._newer.pop(device, None)

    def note_away(self, now_s: float) -> None:
        """This machine was away, and may not know who has gone on."""
        self._back_s = now_s

    def was_away(self, now_s: float) -> bool:
        """Whether it still looks for the others, who may have gone on without it."""
        return now_s < self._back_until_s

    @property
    def _back_until_s(self) -> float:
        return self._back_s + self._state.timeouts.back_s

    @property
    def _sure_s(self) -> float:
        """From when on what others have said is not of before this machine was away."""
        return self._back_s + self._state.timeouts.doubt_s

    # Whether to propose.

    def consider(self, now_s: float) -> Generation | Departure | None:
        """The generation that this member proposes now; or that it leaves its history; or None, and `wake_s` and
        `waiting` say when to look again and why."""
        state = self._state
        self.wake_s, self.waiting, self.waits_to_prepare = None, "", False
        if self.proposal is not None:
            self._watch(self.proposal, now_s)
        if self.proposal is not None or (state.own_request.leaves and state.phase is not MembershipPhase.PROMISED):
            return None
        if (newer := self._follow_newer(now_s)) is not None:
            return newer
        everyone = state.next_roll()
        absent = {rank for rank in everyone.ranks if not self._is_here(everyone.members[rank])}
        if (where := self._base_elsewhere(now_s)) is not None:
            return self._yield_for_base(where, now_s)
        reasons = self._reasons(everyone, absent, now_s)
        if not reasons:
            self._wanted_since_s = None
            self._wait_for_phase()
            return None
        self.reasons = ", ".join(reasons)
        self.waiting = f"a new generation: {self.reasons}"
        since_s = self._wanted_since_s = now_s if self._wanted_since_s is None else self._wanted_since_s
        if state.entered is None:
            if self._reached(since_s + state.timeouts.enter_s, now_s):
                return Departure(f"the change of generation failed: {self.reasons}")
            return None
        roll = self._roll(everyone, absent)
        if rival := self._rival(everyone, roll):
            self.waiting = (
                f"a person: this device and {rival.name} say of each other that they broke the protocol, and nobody "
                "else is left; `meshtrain leave` on the one that is wrong lets the other go on, `meshtrain cancel` "
                "ends the job"
            )
            return None
        entitled = self._judge(roll)
        at_s = self._propose_at_s(everyone, absent, roll, since_s)
        if entitled and not self._may_have_missed(roll, now_s):
            self._outvoted_since_s = None
        else:
            self._outvoted_since_s = now_s if self._outvoted_since_s is None else self._outvoted_since_s
            if entitled:
                self.waiting += "; this device was away, the others may have gone on without it"
                at_s = max(at_s, self._back_until_s)
            else:
                at_s = max(at_s, self._provisional_at_s(roll, at_s - since_s, now_s))
            if (departure := self._yield_to_apart(now_s)) is not None:
                return departure
        return self._following(roll, entitled=entitled) if self._reached(at_s, now_s) else None

    def _watch(self, proposal: Proposal, now_s: float) -> None:
        state = self._state
        waits_for = [m for rank, m in proposal.generation.live.items() if rank not in proposal.standings]
        self.waiting = f"promises of generation {proposal.generation.number}: {_names(waits_for)}"
        gone = [member for member in proposal.generation.live.values() if not state.links.holds(member)]
        refused = [member for member in proposal.generation.live.values() if member.device in state.refusals]
        if refused:
            self.again(self._refused(refused), now_s)
        elif any(self._reached(state.links.suspect_at_s(member), now_s) for member in gone):
            self.again(state.links.missing(gone), now_s)
        elif self._reached(proposal.until_s, now_s):
            self._overdue |= {member.device for member in waits_for} - {state.me.device}
            self.again(f"no promise of {_names(waits_for)}", now_s)

    def _reasons(self, everyone: Roll, absent: set[int], now_s: float) -> list[str]:
        """Why the generation of now cannot stay, for people; empty while it can.

        What counts depends on how far the newest generation has come:

        - promised: only that its proposer fails it, for nothing else is known of it yet;
        - told to enter, and catching up: that somebody is lost or refused, or that the rounds do not come in time;
        - entered or running: that, and who asks for a change (to come in, to compute, to rest, to leave).
        """
        state = self._state
        members = everyone.members
        if state.phase is MembershipPhase.PROMISED:
            if self._failed:
                return [self._failed]
            proposer = next(member for member in members if member.device == state.change.proposer)
            if proposer.device in state.refusals:
                return [f"{self._refused([proposer])}, who proposed generation {state.change.number}"]
            if not state.links.holds(proposer) and self._reached(state.links.suspect_at_s(proposer), now_s):
                return [f"{state.links.missing([proposer])}, who proposed generation {state.change.number}"]
            if state.until_s is not None and self._reached(state.until_s, now_s):
                return [f"{proposer.name} did not commit generation {state.change.number}"]
            return []
        lost = [members[r] for r in sorted(absent) if self._reached(state.links.suspect_at_s(members[r]), now_s)]
        reasons = [state.links.missing(lost)] if lost else []
        reasons += [f"generation {where.generation.number} went on apart" for where in self._apart.values()][:1]
        reasons += self._torn.values()
        if refused := self._refused_of(everyone):
            reasons.append(self._refused([members[rank] for rank in sorted(refused)]))
        if state.until_s is not None and state.phase is MembershipPhase.ENTERED and self._reached(state.until_s, now_s):
            late = [members[rank] for rank in state.missing]
            self._overdue |= {member.device for member in late}
            reasons.append(f"{_names(late)} did not enter generation {state.change.number}")
        if state.phase is MembershipPhase.CATCHING_UP and not refused:  # what was asked for before is being fulfilled
            if state.until_s is not None and self._reached(state.until_s, now_s):
                reasons.append("this device has not caught up in time")
            return reasons
        if state.phase is MembershipPhase.RUNNING and state.way == "wait":
            missed_s = state.timeouts.missed_s
            if not self._hopes_for_base(BASE_S, now_s):
                reasons.append("nobody is left who may have the model")
            elif state.holding.saved and not state.change.provisional and not self._hopes_for_base(missed_s, now_s):
                reasons.append(f"{_names(state.may_have_base)} did not come back with the model in time")
        for kind, text in WISHES.items():
            among = {*everyone.ranks} - absent
            if ranks := state.ready(among) if kind == "learn" else state.requests.wishing(kind, state.change):
                reasons.append(f"{_names([members[rank] for rank in sorted(ranks)])} {text}")
        if joining := self._joining(everyone, absent):
            reasons.append(f"{_names(list(joining))} asks in")
        if (asked := state.settings_to_come) is not None and state.change.learning:
            reasons.append(f"{state.me.name} asks for {asked.text()}")
        return reasons

    def _roll(self, everyone: Roll, absent: set[int]) -> Roll:
        state = self._state
        overdue = {rank for rank in everyone.ranks if everyone.members[rank].device in self._overdue}
        # Whoever proposes is in the generation, and repeats that it wishes to leave.
        leaving = state.requests.wishing("leave", state.change) - {state.rank}
        without = absent | overdue | leaving | self._refused_of(everyone)
        return state.next_roll(
            without=without,
            joining=self._joining(everyone, absent),
            learn=state.ready({*everyone.ranks} - without),
            rest=state.requests.wishing("rest", state.change),
        )

    def _refused_of(self, everyone: Roll) -> set[int]:
        return {rank for rank in everyone.ranks if everyone.members[rank].device in self._state.refusals}

    def _refused(self, members: list[Member]) -> str:
        """For people."""
        return ", ".join(
            f"{member.name} was refused: {self._state.refusals.reason(member.device)}" for member in members
        )

    def _rival(self, everyone: Roll, roll: Roll) -> Member | None:
        """Who accuses this member and is refused by it, where nobody else is left: no machine can tell who is right."""
        state = self._state
        if roll.ranks != (state.rank,):
            return None
        known = self._departed(everyone)
        rivals = [everyone.members[rank] for rank in sorted(self._refused_of(everyone) - known)]
        return next((rival for rival in rivals if rival.device in state.refusals.against_me), None)

    def _joining(self, everyone: Roll, absent: set[int]) -> tuple[Member, ...]:
        """Who asks in and can be taken in; not who was listed just now and did not do its part."""
        state = self._state
        reached = {everyone.members[rank].device for rank in everyone.ranks if rank not in absent}
        joining = state.requests.joining(state.links, everyone.members, reached - self._overdue, state.members_max)
        return tuple(member for member in joining if member.device not in self._overdue)

    def _is_here(self, member: Member) -> bool:
        """Is it linked, and not known to be together with others?"""
        state = self._state
        elsewhere = (member in where.generation.live.values() for where in self._apart.values())
        return state.links.holds(member) and not any(elsewhere)

    def _propose_at_s(self, everyone: Roll, absent: set[int], roll: Roll, since_s: float) -> float:
        """When it is this member's turn (G7, the lowest rank proposes), if nobody else has proposed by then.

        Each rank waits a turn for every lower one that is here: those would list the same, and one proposal is enough.
        A member waits longer where its own view may be the wrong one: if somebody who is missed may be back within the
        grace of a link; if it is alone because all others are refused; if nobody computes and some are ready to; and if
        it reaches but the smaller part, two turns, so that the larger part may propose first.
        """
        state, timeouts = self._state, self._state.timeouts
        suspect_s = [state.links.suspect_at_s(everyone.members[rank]) for rank in absent]
        grace_s = min(since_s + timeouts.relink_grace_s, max(suspect_s, default=since_s))
        others = {rank for rank in everyone.ranks if rank != state.rank}
        reached = others & {*roll.ranks}
        turns = 0 if self._failed else sum(rank < state.rank for rank in reached)
        if not reached and self._refused_of(everyone):
            turns += 1  # whoever is refused may have as much to say
        if state.requests.wishing("learn", state.change) and not state.change.learning and not state.awaited:
            turns += 1  # others may be ready at this very moment: they begin together
        if 0 < 2 * len(reached) < len(others):
            turns += 2  # the many that this member does not reach may reach the few that it does
        return max(since_s + turns * timeouts.turn_s, grace_s, self._not_before_s)

    # Who is entitled (`meshwire.membership.quorum`).

    def _judge(self, roll: Roll) -> bool:
        """Whether those on the roll are entitled, as far as is known here; their promises tell (`_misjudged`)."""
        state = self._state
        told = {rank: self._told[roll.members[rank]] for rank in roll.ranks if roll.members[rank] in self._told}
        return is_entitled(_part(roll), {**told, state.rank: state.would_say()}, state.gone(roll.members))

    def _departed(self, everyone: Roll) -> set[int]:
        """Who is known to go on nowhere else, refused or not."""
        departed = self._state.departed(everyone.members)
        return {rank for rank in everyone.ranks if (rank, everyone.members[rank].incarnation) in departed}

    def _misjudged(self, proposal: Proposal) -> str:
        """What is wrong with the proposal, by what all say; empty if nothing is."""
        state, generation, standings = self._state, proposal.generation, proposal.standings
        part = {rank: member.incarnation for rank, member in generation.live.items()}
        entitled = is_entitled(part, standings, state.gone(generation.members))
        history = newest_history([*standings.values()])
        if entitled == generation.provisional:
            return f"the members of generation {generation.number} are {'' if entitled else 'not '}entitled to go on"
        if history is None or not generation.provisional or history.number == generation.root:
            return ""
        return f"somebody has gone on in generation {history.number}"

    def _provisional_at_s(self, roll: Roll, turns_s: float, now_s: float) -> float:
        """When those that are here go on provisionally: others may be together elsewhere, with more right to go on.

        At once, if they did so before and have lost nobody since; after the partition's wait else; and not as long as
        nobody is here who computes and somebody who is away may have the model: there would be nothing to go on with.
        """
        state, entered = self._state, self._state.entered
        assert entered is not None, "no history"
        here = {rank for rank, member in entered.live.items() if rank in roll.ranks and roll.members[rank] == member}
        computes = here & {*entered.learning} | {*roll.learning}
        gone = {rank for rank, _ in state.gone(entered.members) if not state.links.holds(entered.members[rank])}
        if entered.provisional and {*entered.counted} & {*entered.ranks} - gone <= here:
            return now_s  # nobody is missed who was here when they went on
        if not without_hubs(roll.members, roll.ranks):  # what hubs have is on their disks: it begins again from there
            since_s = now_s if self._baseless_since_s is None else self._baseless_since_s
            self.waiting += "; none of them is here, and a hub does not train"
            return max(since_s + state.timeouts.missed_s, self._back_until_s)
        if not computes and not state.awaited and state.may_have_base:
            self.waiting += "; nobody who computes is here"
            return (now_s if self._baseless_since_s is None else self._baseless_since_s) + BASE_S
        assert self._outvoted_since_s is not None
        counted = f"{len(here & {*entered.counted})} of {len(entered.counted) + len(entered.gone)} that count are here"
        wait_s = state.timeouts.provisional_s
        then = "it waits for them" if wait_s == float("inf") else f"it goes on provisionally after {wait_s:g} s"
        self.waiting += f"; {counted}, the others may be together elsewhere: {then}"
        return max(self._outvoted_since_s + wait_s + turns_s, self._back_until_s)

    def _may_have_missed(self, roll: Roll, now_s: float) -> bool:
        """This machine was away, and one that counts may have gone on without it: provisionally, and for hours."""
        state, entered = self._state, self._state.entered
        assert entered is not None, "no history"
        if not self.was_away(now_s):
            return False
        counted = {rank: entered.members[rank].incarnation for rank in entered.counted}
        known = state.gone(roll.members)
        return any(_part(roll).get(r) != i and not is_gone(_part(roll), r, i, known) for r, i in counted.items())

    def _hopes_for_base(self, wait_s: float, now_s: float) -> bool:
        """Nobody here has the base: may somebody who is away come back with it, and is the wait for that not over?"""
        since_s = now_s if self._baseless_since_s is None else self._baseless_since_s
        return bool(self._state.may_have_base) and not self._reached(since_s + wait_s, now_s)

    def _base_elsewhere(self, now_s: float) -> Where | None:
        """Where the model is, if nobody here has it and this device could join others that do."""
        state = self._state
        if state.based:
            self._baseless_since_s = None
            return None
        self._baseless_since_s = now_s if self._baseless_since_s is None else self._baseless_since_s
        return state.basis_elsewhere

    def _yield_for_base(self, where: Where, now_s: float) -> Departure | None:
        """Nobody here has had the base for a while: this device leaves its history for one of which somebody has."""
        assert self._baseless_since_s is not None
        number = where.generation.number
        self.waiting = f"who has the model of this generation; then this device joins generation {number}"
        if not self._reached(max(self._baseless_since_s + self._state.timeouts.yield_s, self._sure_s), now_s):
            return None
        return Departure(f"nobody here has the model any more, but in generation {number} they have", where)

    def _follow_newer(self, now_s: float) -> Departure | None:
        """Leaves for a newer history that was heard of when this machine was away, if the link still holds, and once
        what has been promised has failed: it may be the own proposal, which those that went on have refused."""
        bound = self._state.phase is MembershipPhase.PROMISED and not self._failed
        if not self._newer or bound or not self._reached(self._sure_s, now_s):
            return None
        where = next(iter(self._newer.values()))
        return Departure(f"generation {where.generation.number} went on without this device", where)

    def _yield_to_apart(self, now_s: float) -> Departure | None:
        """Leaves for a provisional generation of which it heard, if those that are here stay too few to go on."""
        assert self._outvoted_since_s is not None
        at_s = max(self._outvoted_since_s + self._state.timeouts.yield_s, self._sure_s)
        if not self._apart or not self._reached(at_s, now_s):
            return None
        where = max(self._apart.values(), key=lambda where: where.generation.number)
        return Departure(f"generation {where.generation.number} went on without this device", where)

    def _following(self, roll: Roll, *, entitled: bool) -> Generation:
        """The generation that lists these, after the one that was entered.

        An entitled one is its own root, and those that compute in it are counted from then on: where none does, the
        members that were counted before and are still there, else all. A provisional one keeps the electorate of its
        root, without those that are known to be gone (G4).
        """
        state = self._state
        assert state.entered is not None, "no history"
        number = state.highest + 1
        root, counted = number, roll.learning
        gone: tuple[int, ...] = ()
        base = self._base(roll)
        if not entitled:
            root, counted, gone = self._electorate(base, roll)
        elif not counted:
            still = tuple(rank for rank, incarnation in base.counted if _part(roll).get(rank) == incarnation)
            counted = still or without_hubs(roll.members, roll.ranks) or roll.ranks
        return Generation(
            job=state.job,
            number=number,
            proposer=state.me.device,
            parent=state.entered.digest(),
            members=roll.members,
            ranks=roll.ranks,
            learning=roll.learning,
            root=root,
            counted=counted,
            gone=gone,
        )

    def _base(self, roll: Roll) -> Electorate:
        """Of the newest history that anybody in the roll is known to bring."""
        told = [held for member, held in self._told.items() if member in roll.members]
        base = newest_history([*told, self._state.would_say()])
        assert base is not None, "no history"
        return base

    def _electorate(self, base: Electorate, roll: Roll) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Root, counted and gone of a provisional generation after `base`."""
        known = self._state.gone(roll.members)
        voters = still_there(base, _listed(roll), known)
        gone = {rank for rank, incarnation in voters if is_gone(_listed(roll), rank, incarnation, known)}
        counted = {rank for rank, _ in voters} - gone
        # Of a rank that is gone another incarnation may be counted, where members count because all others are gone.
        return base.number, tuple(sorted(counted)), tuple(sorted((gone | {*base.gone}) - counted))

    def _withdraw(self) -> None:
        """The own proposal, which nobody was told to enter."""
        if self.proposal is not None:
            self._state.votes.withdraw(self.proposal.generation)
            self.proposal = None

    def _wait_for_phase(self) -> None:
        state = self._state
        match state.phase:
            case MembershipPhase.PROMISED:
                proposer = state.name(state.change.proposer)
                self.waiting = f"{proposer} to commit generation {state.change.number}"
            case MembershipPhase.CATCHING_UP:
                self.waiting = f"the rounds before generation {state.change.number}"
            case MembershipPhase.ENTERED:
                late = [state.change.members[rank] for rank in state.missing]
                self.waiting = f"{_names(late)} to enter generation {state.change.number}"
            case MembershipPhase.RUNNING if state.unprepared:
                self.waiting = f"{_names(state.unprepared)} to prepare; then the first round begins"
                self.waits_to_prepare = True
            case MembershipPhase.RUNNING if state.way == "wait":
                self.waiting = f"{_names(state.may_have_base)}, who may have the model: nobody who is here does"

    def _reached(self, at_s: float, now_s: float) -> bool:
        """Has the time come? If not, look again then."""
        if now_s < at_s < float("inf"):
            self.wake_s = at_s if self.wake_s is None else min(self.wake_s, at_s)
        return now_s >= at_s


def _part(roll: Roll) -> Mapping[int, int]:
    """Who is in it, by rank."""
    return {rank: roll.members[rank].incarnation for rank in roll.ranks}


def _listed(roll: Roll) -> Mapping[int, int]:
    """Who ever was, in the newest incarnation of each device."""
    return {rank: member.incarnation for rank, member in enumerate(roll.members)}


def _names(members: list[Member]) -> str:
    return ", ".join(member.name for member in members)
