"""What a recorded membership tells a person: who was lost, who proposed what and why, what was entered and left."""

from collections.abc import Iterable, Iterator

from meshwire.membership.effects import (
    CatchUpFrom,
    Effect,
    EnterGeneration,
    Fence,
    HistoryLeft,
    MessageIgnored,
    NobodyLearns,
    Resume,
    Send,
    Shunned,
    TurnedAway,
    WaitingFor,
)
from meshwire.membership.inputs import (
    CannotCatchUp,
    HoldingLost,
    Input,
    LinkDown,
    LinkUp,
    MessageFrom,
    PeerGone,
    RequestMade,
    SteppedOut,
    ViolationSeen,
    WasAway,
)
from meshwire.membership.machine import Membership
from meshwire.membership.record import MembershipStart
from meshwire.membership.requests import Kind
from meshwire.messages.generation import Accuse, AskIn, Promised, Refused, Where, Wish
from meshwire.messages.job import Generation, Member
from meshwire.text import printable

LINE_CHARS_MAX = 300
REQUESTS: dict[Kind, str] = {
    "learn": "learner is ready to compute",
    "rest": "learner computes no more",
    "leave": "device leaves the job",
    "anew": "learner may have lost the base that all would go on from",
}


class MembershipStory:
    """Fed with every input and its effects; `told` is the story, each line with its time since the first input."""

    def __init__(self, start: MembershipStart) -> None:
        self._me = start.me
        self._begin_s = start.now_s
        self._names: dict[str, str] = {start.me.device: start.me.name}
        self.told: list[tuple[float, str]] = []
        if start.generation is None:
            begins = "in no generation: it asks to be taken in"
        else:
            self._learn_names(start.generation.members)
            begins = f"in generation {start.generation.number} of {_who(start.generation)}"
        self._tell(start.now_s, f"{start.me.name} begins in job {start.job} {begins}")

    def take(self, now_s: float, input_: Input, effects: list[Effect], machine: Membership) -> None:
        """An input, what followed from it, and the machine right after it."""
        for generation in (machine.promised, *(_named(input_))):
            if generation is not None:
                self._learn_names(generation.members)
        waits = [f"waits for {effect.reason}" for effect in effects if isinstance(effect, WaitingFor) and effect.reason]
        for text in (*self._of_input(input_), *self._of_effects(effects, machine), *waits):
            self._tell(now_s, text)

    def text(self) -> str:
        """A line for each, with its time in seconds."""
        return "".join(f"{at_s:10.3f}  {printable(text[:LINE_CHARS_MAX])}\n" for at_s, text in self.told)

    def _tell(self, now_s: float, text: str) -> None:
        self.told.append((round(now_s - self._begin_s, 6), text))

    def _learn_names(self, members: Iterable[Member]) -> None:
        self._names |= {member.device: member.name for member in members}

    def _name(self, device: str) -> str:
        return self._names.get(device, device[:8])

    def _of_input(self, input_: Input) -> Iterator[str]:
        match input_:
            case LinkUp(device, _):
                yield f"is linked to {self._name(device)}"
            case LinkDown(device, reason):
                yield f"has lost its link to {self._name(device)}: {reason}"
            case PeerGone(device, _):
                yield f"hears that the daemon of {self._name(device)} has ended"
            case WasAway():
                yield "was away itself: asleep, standing still, or in no network or another"
            case ViolationSeen(device, reason):
                yield f"has seen {self._name(device)} break the protocol: {reason}"
            case RequestMade(kind):
                yield f"says to all: the own {REQUESTS[kind]}"
            case SteppedOut(reason):
                yield f"steps out: {reason}"
            case HoldingLost():
                yield f"says to all: the own {REQUESTS['anew']}"
            case CannotCatchUp(reason):
                yield f"cannot catch up: {reason}"
            case MessageFrom(device, message):
                yield from (f"hears from {self._name(device)}: {text}" for text in self._of_message(message))

    def _of_message(self, message: object) -> Iterator[str]:
        match message:
            case Promised(standing=standing):
                held = "no history" if standing.generation is None else f"{standing.complete} rounds"
                yield f"it promises, and holds {held}"
            case Refused(reason=reason):
                yield f"it refuses the generation: {reason}"
            case Where(generation=generation, samples=samples):
                yield f"it is in generation {generation.number} of {_who(generation)}, with {samples} samples"
            case AskIn():
                yield "it asks to be taken in"
            case Wish(kind=kind):
                yield f"its {REQUESTS[kind]}"
            case Accuse(device=device, reason=reason):
                yield f"{self._name(device)} broke the protocol: {reason}"

    def _of_effects(self, effects: Iterable[Effect], machine: Membership) -> Iterator[str]:
        for effect in effects:
            match effect:
                case Fence(generation) if generation.proposer == self._me.device:
                    kind = "provisional generation" if generation.provisional else "generation"
                    yield f"proposes {kind} {generation.number} of {_who(generation)}: {machine.why_proposed}"
                case Fence(generation):
                    proposer = self._name(generation.proposer)
                    yield f"promises generation {generation.number} of {_who(generation)} to {proposer}"
                case Send(device, Refused(reason=reason)):
                    yield f"refuses the generation of {self._name(device)}: {reason}"
                case CatchUpFrom(_, device, generation, enter, reload):
                    lacks = f"the state after round {enter.cut}" if reload else f"the rounds up to {enter.cut}"
                    yield f"has to get {lacks} from {self._name(device)} before generation {generation.number}"
                case EnterGeneration(generation, enter):
                    yield f"enters generation {generation.number} of {_who(generation)}, with rounds up to {enter.cut}"
                case Resume(generation, begins):
                    learner = "; its learner computes from now on" if begins else ""
                    yield f"goes on in generation {generation.number}: all have entered it{learner}"
                case HistoryLeft(reason):
                    yield f"is in no generation any more: {reason}"
                case TurnedAway(reason):
                    yield f"is turned away: {reason}"
                case NobodyLearns(_, failed):
                    after = "scripts have failed" if failed else "it begins again from what lies on disks"
                    yield f"gives up: nothing is left that a learner could compute with; {after}"
                case MessageIgnored(device, text):
                    yield f"ignores a message of {self._name(device)}, which is no member: {text}"
                case Shunned(device, reason, accuser):
                    yield f"refuses {self._name(device)}, on the word of {self._name(accuser)}: {reason}"


def _who(generation: Generation) -> str:
    """The names of its members, and who of them does not compute."""
    live = generation.live.items()
    return ", ".join(member.name + ("" if rank in generation.learning else " (loading)") for rank, member in live)


def _named(input_: Input) -> tuple[Generation, ...]:
    """The generations that a message names."""
    generation = getattr(input_.message, "generation", None) if isinstance(input_, MessageFrom) else None
    return (generation,) if isinstance(generation, Generation) else ()
