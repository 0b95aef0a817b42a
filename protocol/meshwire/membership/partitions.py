"""Where others are in the history of a job, and where this device is: told, compared, and followed or left (G4, G7)."""

from meshwire.membership.checks import list_wrong, number_wrong
from meshwire.membership.effects import Phase, TurnedAway
from meshwire.membership.lineage import Relation, ballot, keeps_history, relation
from meshwire.membership.proposer import Proposer
from meshwire.membership.state import State
from meshwire.messages.generation import Where


class Whereabouts:
    """Of one daemon and one job."""

    def __init__(self, state: State, proposer: Proposer) -> None:
        self._state = state
        self._proposer = proposer
        self._told: dict[str, tuple[int, int]] = {}  # by device: generation and samples as last told to it

    def relinked(self, device: str) -> None:
        """The link to a device is new, or gone: what was told on the old one may be lost."""
        self._told.pop(device, None)

    def tell(self, device: str) -> None:
        """Tells a device where this one is, which has entered a generation."""
        entered = self._state.entered
        assert entered is not None, "nowhere"
        self._told[device] = entered.hash64(), self._state.send_where(device)

    def leave(self, reason: str, now_s: float, kept: Where | None = None) -> None:
        """This device goes on in no generation, until it is taken into one. `kept`: where its history is not kept."""
        self._proposer.forget()
        self._state.leave(reason, now_s, kept)

    def heard(self, device: str, where: Where, now_s: float) -> None:
        """A device tells where it is: who is behind is told, and this one leaves its history where another is kept."""
        state, other = self._state, where.generation
        if wrong := list_wrong(other) or number_wrong(other.number, state.highest):
            state.protest(device, f"is in generation {other.number}: {wrong}", now_s)
            return
        state.highest = max(state.highest, other.number)
        state.outside.heard(device, where)
        state.ahead.pop(device, None)
        state.unsure.discard(device)
        if state.entered is None:
            went_on = state.phase is Phase.CATCHING_UP and other.number > state.change.number
            if went_on and where.based and state.me not in other.live.values():
                self.leave(f"generation {other.number} went on while this device caught up", now_s)
            elif state.phase is Phase.OUT and state.has_no_room(other):
                names = ", ".join(member.name for member in other.members)
                state.effects.append(TurnedAway(f"the job has all the {len(other.members)} devices it takes: {names}"))
            return
        match relation(state.entered, state.lineage, other, where.ancestors):
            case Relation.OLDER | Relation.PARTED if where.based and not state.based:
                pass  # whoever has nothing of the own history yields to it (the proposer)
            case Relation.OLDER:
                self.tell(device)
            case Relation.NEWER if state.me in other.live.values() and ballot(other) > ballot(state.entered):
                pass  # it may be entered here, too
            case Relation.NEWER | Relation.PARTED if state.based and not where.based:
                self.tell(device)  # nobody there can go on from it: this device keeps what it has
            case Relation.NEWER if other.root == state.entered.root:
                state.ahead[device] = where  # those that are left here may be entitled, and it provisional
            case Relation.NEWER if now_s < state.back_until_s:
                state.ahead[device] = where  # what lay in the socket may be of before its sender was lost
            case Relation.NEWER:
                self.leave(f"generation {other.number} went on without this device", now_s, where)
            case Relation.PARTED:
                self._settle_partition(device, where, now_s)

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
            self.leave(reason, now_s, where)
        elif lowest == state.me and device == other.members[other.ranks[0]].device:
            if self._told.get(device, (0, 0))[0] != state.entered.hash64():
                self.tell(device)
            _, samples = self._told[device]
            if keeps_history(state.entered, samples, other, where.samples):
                self.tell(device)
            else:
                state.send_members(where)
                self.leave(reason, now_s, where)
