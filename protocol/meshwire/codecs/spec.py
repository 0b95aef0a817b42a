"""One codec as chosen, and the family it is of: what peers must agree on to encode alike (DESIGN section 8, C2)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from meshwire.codecs.schedules import ByteSize, Ramp, Rate, is_number, number_text, size_text

Value = float | str | Ramp


class Reduction(Enum):
    """What a collective may do with encoded vectors, and all that follows from it.

    Attributes:
        text: for people and documents.
        own_kept: the own part is encoded at any s, as soon as it is ready, and kept beside what is on its way.
        owner_feedback: a shard's owner encodes its mean, and owes what that leaves out.
        gathered: a round is kept as all its contributors' vectors, and not as the mean's.
        buffers: the codec of float buffers (O5); None: as the values themselves.
        whole: the codec of tensors that the job's codec does not take, for "values" as typed behind its +; None: as
            the values themselves.
    """

    # decode, add, encode again at every hop
    LINEAR = "linear", False, False, False, None, None
    # sketches add; decoded once at the end
    SKETCH = "sketch", True, False, False, "fp16", "threshold:rms=0+{values}"
    # messages travel whole; every peer decodes and adds them in rank order
    GATHER = "gather", True, False, True, "threshold:rms=0+fp16", "threshold:rms=0+{values}"
    # encoded to the shard's owner, and once more from it
    TWO_SIDED = "two-sided", True, True, False, "threshold:rms=0+fp16", "threshold:rms=0+{values}"

    def __init__(
        self, text: str, own_kept: bool, owner_feedback: bool, gathered: bool, buffers: str | None, whole: str | None
    ) -> None:
        self.text = text
        self.own_kept = own_kept
        self.owner_feedback = owner_feedback
        self.gathered = gathered
        self.buffers = buffers
        self.whole = whole


@dataclass(frozen=True, slots=True)
class Number:
    """A parameter that is a number in [low, high]. As typed: bare, or NAME=NUMBER."""

    name: str
    low: float
    high: float
    default: float
    about: str
    whole: bool = False

    @property
    def legal(self) -> str:
        """For people."""
        return f"a {'whole ' * self.whole}number from {number_text(self.low)} to {number_text(self.high)}"

    def parse(self, text: str) -> float | None:
        """None if it is not legal."""
        try:
            value = float(text)
        except ValueError:
            return None
        legal = self.low <= value <= self.high and (value.is_integer() or not self.whole)
        return value if legal else None

    def bare(self, text: str) -> bool:
        """Whether it is meant where no name is typed."""
        return is_number(text)


DECAY = Number("decay", 0.0, 1.0, 1.0, "what a round leaves of what the rounds before it have left out")
"""For codecs with error feedback."""

BUDGET = ByteSize("budget", 100, 10**12, "bytes that a vector takes at most in a round, however much is to be sent")
"""For codecs that send the more the larger a part is. See `meshwire.encoded_layout.budget`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A parameter that is one of a few words. As typed: bare, or NAME=WORD."""

    name: str
    words: tuple[str, ...]
    default: str
    about: str

    @property
    def legal(self) -> str:
        """For people."""
        return f"one of {', '.join(self.words)}"

    def parse(self, text: str) -> str | None:
        """None if it is not legal."""
        return text if text in self.words else None

    def bare(self, text: str) -> bool:
        """Whether it is meant where no name is typed."""
        return self.name != "values" and text in self.words


Parameter = Number | Choice | Rate | ByteSize


_EXCHANGES = {"sharded": Reduction.TWO_SIDED, "gather": Reduction.GATHER, "senders": Reduction.GATHER}
EXCHANGE = Choice(
    "exchange", ("sharded", "gather"), "sharded", "by way of each shard's owner, or from everybody to everybody"
)
"""The parameter of families that allow both: it decides their reduction."""

EXCHANGE_OR_SENDERS = Choice(
    EXCHANGE.name,
    tuple(_EXCHANGES),
    EXCHANGE.default,
    f"{EXCHANGE.about}; senders: so, and each value's mean is over those that sent it",
)
"""The same, of those whose parts say which values were sent."""


MAP = Choice("map", ("linear", "conv"), "linear", "what makes numbers of values: a basis, or an autoencoder")
"""The parameter of LGC that says how."""


ITERATION = Choice("iteration", ("full", "half"), "full", "both factors in each round, or in turn one of them")
"""The parameter of PowerSGD that says how much of a power iteration a round is."""


OF = Choice(
    "of",
    ("gradients", "momentum"),
    "gradients",
    "what is encoded: gradients, or the momentum of AdamW, whose second moments stay as a warm-up has left them",
)
"""The parameter of codecs that can be a part of 1-bit Adam (`CodecSpec.of_momentum`)."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Runs of a segment's values that share what is written once for them. They end at the borders of tensors.

    Attributes:
        length: of values, where no tensor ends before.
        header_bytes: of each.
    """

    length: int
    header_bytes: int

    def starts(self, count: int, borders: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Where those of a segment of `count` values begin. `borders`: as of `CodecSpec.segment_bytes_max`."""
        ends = (*borders, count)
        return tuple(
            at for first, end in zip((0, *borders), ends, strict=True) for at in range(first, end, self.length)
        )


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A codec with its parameters. `str()` gives the shortest text that is parsed to the same.

    Attributes:
        values: of the family's parameters, in their order.
    """

    family: "Family"
    values: tuple[Value, ...]

    def __str__(self) -> str:
        return self.family.text(self.values)

    @property
    def name(self) -> str:
        """Of the family."""
        return self.family.name

    @property
    def reduction(self) -> Reduction:
        """What a collective does with what it encodes."""
        if self.family.exchanges:
            return _EXCHANGES[self.choice(EXCHANGE.name)]
        return self.family.reduction

    @property
    def of_senders(self) -> bool:
        """Whether the mean of each value is over those alone that sent it, none of them with more than the median of
        their norms (SparseLoCo). Its segments are gathered, and say which values were sent."""
        return bool(self.family.exchanges) and self.choice(EXCHANGE.name) == "senders"

    @property
    def fixed(self) -> bool:
        """Whether every segment of `count` values takes exactly `segment_bytes_max(count)`."""
        return self.family.fixed

    @property
    def error_feedback(self) -> bool:
        """Whether what one encoding leaves out is added to the next."""
        return self.family.error_feedback(self)

    @property
    def decay(self) -> float:
        """What each round leaves of what the rounds before it have left out: its parameter of this name, or all."""
        return self.number(DECAY.name) if DECAY in self.family.parameters else 1.0

    @property
    def norm_known(self) -> bool:
        """Whether what travels has the norm of what it stands for (O4): what an autoencoder makes has another."""
        return MAP not in self.family.parameters or self.choice(MAP.name) == "linear"

    @property
    def two_phases(self) -> bool:
        """Whether what a member adds in a round follows in part from what all have added in it before. It takes s=0:
        with a bound, a member would have computed on by then."""
        return ITERATION in self.family.parameters and self.choice(ITERATION.name) == "full"

    @property
    def budget_bytes(self) -> int:
        """What a vector takes at most in a round: its parameter of this name; 0: whatever it takes."""
        return int(self.number(BUDGET.name)) if BUDGET in self.family.parameters else 0

    @property
    def warmup(self) -> int:
        """How many rounds leave nothing out, from the first of a job on: they travel as fp16."""
        warms_up = any(parameter.name == "warmup" for parameter in self.family.parameters)
        return int(self.number("warmup")) if warms_up else 0

    @property
    def momentum(self) -> bool:
        """Whether the momentum of the script's optimizer goes into what is encoded, and is kept by each worker."""
        return self.family.momentum and self.error_feedback

    @property
    def of_momentum(self) -> bool:
        """Whether learners send the momentum that each gradient makes of the one that all have, and not the gradient
        (1-bit Adam). It takes s=0 without a period: there all have one momentum."""
        return OF in self.family.parameters and self.choice(OF.name) == "momentum"

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether it is for tensors of this shape. Others travel whole, in buckets of their own."""
        return self.family.takes(self, shape)

    def segment_bytes_max(self, count: int, borders: tuple[int, ...] = ()) -> int:
        """Upper limit of an encoded segment of `count` values, header included.

        Args:
            borders: where in it other tensors begin than its first one, ascending.
        """
        size = self.family.segment_bytes_max(self, count)
        blocks = self.family.blocks
        if not borders or blocks is None:
            return size
        return size + blocks.header_bytes * (len(blocks.starts(count, borders)) - len(blocks.starts(count)))

    def number(self, name: str) -> float:
        """A parameter's value. Raises KeyError for a name that the family does not have."""
        value = self._value(name)
        assert isinstance(value, float)
        return value

    def ramp(self, name: str) -> Ramp:
        """A parameter's value. Raises KeyError for a name that the family does not have."""
        value = self._value(name)
        assert isinstance(value, Ramp)
        return value

    def choice(self, name: str) -> str:
        """A parameter's value. Raises KeyError for a name that the family does not have."""
        value = self._value(name)
        assert isinstance(value, str)
        return value

    def _value(self, name: str) -> Value:
        for parameter, value in zip(self.family.parameters, self.values, strict=True):
            if parameter.name == name:
                return value
        raise KeyError(name)


WARMUP_MAX = 100_000


def warmup(default: float) -> Number:
    """The parameter that `CodecSpec.warmup` reads."""
    return Number("warmup", 0, WARMUP_MAX, default, "first rounds of a job that travel as fp16 instead", whole=True)


def never(_: CodecSpec) -> bool:
    """For `Family.error_feedback`."""
    return False


def always(_: CodecSpec) -> bool:
    """For `Family.error_feedback`."""
    return True


def every_shape(_: CodecSpec, __: tuple[int, ...]) -> bool:
    """For `Family.takes`."""
    return True


@dataclass(frozen=True, slots=True)
class Family:
    """A codec with all that may be chosen about it: NAME[:VALUE,...][+WORD].

    Attributes:
        reduction: by default (`EXCHANGE`).
        segment_bytes_max: upper limit of an encoded segment of so many values of one tensor, header included.
        blocks: those that end at the borders of tensors; None: what its values share does not.
        fixed: it is the exact size of every segment of so many values.
        selects: which of a segment's values travel depends on the others.
        transforms: segments are of a shorter vector, which the model's is turned into
            (`meshwire.encoded_layout.projections`).
        parameters: a bare text as typed is the first one's that takes it bare, before all others a Choice's; the one
            named "values" is typed behind the +.
        takes: see `CodecSpec.takes`.
        momentum: see `CodecSpec.momentum`.
        example: as typed, with parameters if there are any.
        about: one line.
        source: one line.
    """

    name: str
    reduction: Reduction
    segment_bytes_max: Callable[[CodecSpec, int], int]
    about: str
    source: str
    parameters: tuple[Parameter, ...] = ()
    fixed: bool = True
    selects: bool = False
    transforms: bool = False
    error_feedback: Callable[[CodecSpec], bool] = never
    takes: Callable[[CodecSpec, tuple[int, ...]], bool] = every_shape
    momentum: bool = False
    example: str = ""
    blocks: Blocks | None = None

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The words of the parameter that decides its reduction; none: it has only one."""
        return next((each.words for each in self.parameters if each in (EXCHANGE, EXCHANGE_OR_SENDERS)), ())

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """All that may be chosen, the default first."""
        return tuple(dict.fromkeys(_EXCHANGES[word] for word in self.exchanges)) or (self.reduction,)

    def spec(self, typed: str, after_plus: str | None) -> CodecSpec:
        """The codec with the parameters as typed. Raises ValueError, which names what is legal."""
        given: dict[str, Value] = {}
        for piece in typed.split(",") if typed else ():
            name, equals, text = piece.rpartition("=")
            parameter = self._named(name) if equals else self._taking(text)
            if parameter is None or parameter.name in given:
                raise ValueError(f"codec {self.name}: {piece!r} is none of its parameters. {self._legal()}")
            given[parameter.name] = self._parsed(parameter, text)
        if after_plus is not None:
            parameter = self._named("values")
            if parameter is None:
                raise ValueError(f"codec {self.name}: nothing can follow a + here. {self._legal()}")
            if parameter.name in given:
                raise ValueError(f"codec {self.name}: values is given twice. {self._legal()}")
            given[parameter.name] = self._parsed(parameter, after_plus)
        return CodecSpec(self, tuple(given.get(parameter.name, parameter.default) for parameter in self.parameters))

    def text(self, values: tuple[Value, ...]) -> str:
        """The canonical text of a choice: what is as it is by default is left out."""
        chosen: Mapping[str, Value] = dict(zip((each.name for each in self.parameters), values, strict=True))
        pieces: list[str] = []
        plus = ""
        for parameter in self.parameters:
            value = chosen[parameter.name]
            if value == parameter.default:
                continue
            text = _text(parameter, value)
            if parameter.name == "values":
                plus = f"+{text}"
            else:
                pieces.append(text if self._taking(text) is parameter else f"{parameter.name}={text}")
        return self.name + (f":{','.join(pieces)}" if pieces else "") + plus

    def _named(self, name: str) -> Parameter | None:
        return next((parameter for parameter in self.parameters if parameter.name == name), None)

    def _taking(self, text: str) -> Parameter | None:
        """Whose value it is if it is typed bare."""
        by_words = sorted(self.parameters, key=lambda parameter: not isinstance(parameter, Choice))
        return next((parameter for parameter in by_words if parameter.bare(text)), None)

    def _parsed(self, parameter: Parameter, text: str) -> Value:
        value = parameter.parse(text)
        if value is None:
            raise ValueError(
                f"codec {self.name}: {parameter.name} is {text!r}; it must be {parameter.legal}, as in "
                f"{self.example or self.name}"
            )
        return value

    def _legal(self) -> str:
        if not self.parameters:
            return f"It takes none: {self.name}"
        each = "; ".join(f"{parameter.name} is {parameter.legal}" for parameter in self.parameters)
        return f"It takes: {each}, as in {self.example or self.name}"


def _text(parameter: Parameter, value: Value) -> str:
    if isinstance(value, float):
        return size_text(value) if isinstance(parameter, ByteSize) else number_text(value)
    return str(value)
