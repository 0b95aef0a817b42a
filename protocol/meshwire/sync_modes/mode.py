"""How the members of a job keep in step: the bound s or the period H and what goes with it, from what a person typed
(R8, R9, O2, X4a)."""

import re
from typing import Annotated, Any, Literal, NamedTuple, Self, cast, get_args

from pydantic import Field, model_validator

from meshwire import limits
from meshwire.message_base import Wire
from meshwire.sync_modes.neighbours import Over

Straggler = Literal["carry", "wait"]
Visibility = Literal["eager", "fixed"]
Own = Literal["0", "1/m", "1"]
Shares = Literal["equal", "speed"]

OUTER_RATE_MAX = 10.0
OUTER_MOMENTUM_MAX = 0.999

# DiLoCo's outer step, Douillard et al. 2023, arXiv 2311.08105
DILOCO_RATE = 0.7
DILOCO_MOMENTUM = 0.9

# The central model's. CROSSBOW's code has 0.9 (Koliousis et al. 2019, arXiv 1901.02244; `kernels/optimisers/sma.cu`),
# after each step; after several it overshoots: tests/bench/results/codec_studies.md
SMA_MOMENTUM = 0.5


class SyncSettings(Wire):
    """Equal on all members of a job. Made by `sync_settings`, which refuses what does not go together."""

    staleness: Annotated[int, Field(ge=0, le=limits.STALENESS_MAX)] = 0
    """The bound s: how many rounds a learner may be ahead of what it has applied. 0 is BSP."""
    straggler: Straggler = "wait"
    """A late learner: the rounds go on without it (`carry`), or wait for it (R8)."""
    visibility: Visibility = "eager"
    """A round is applied when it is complete (`eager`), or exactly s+1 steps later (`fixed`, reproducible)."""
    own: Own = "1"
    """The coefficient c of what a learner's own gradients that no round has covered would change (O2)."""
    shares: Shares = "equal"
    """Equal batch sizes, or sizes that follow the measured speed when that differs (X4a). What a person gets who types
    nothing, `sync_settings` says."""
    signs: bool = False
    """The optimizer steps on the signs of the mean (DeMo)."""
    period: Annotated[int, Field(ge=0, le=limits.PERIOD_MAX)] = 0
    """H: a round is of what so many steps on a learner's own weights have changed (R9). 0: each step is a round of
    gradients."""
    after: Annotated[int, Field(ge=0, le=limits.PERIODS_AFTER_MAX)] = 0
    """So many rounds of one step each come before the periods of H (post-local SGD)."""
    outer_rate: Annotated[float, Field(gt=0, le=OUTER_RATE_MAX, allow_inf_nan=False)] = 1.0
    outer_momentum: Annotated[float, Field(ge=0, le=OUTER_MOMENTUM_MAX, allow_inf_nan=False)] = 0.0
    """With a period, how the base takes in the mean of what local steps have changed: by SGD with this learning rate
    and Nesterov momentum. 1 and 0 make it the mean of all weights."""
    sparse: bool = False
    """With a period, a small part of what local steps have changed travels, and the rest fades (SparseLoCo)."""
    muon: bool = False
    """With a period, Muon takes the local steps of hidden matrices (MuLoCo)."""
    fragments: Annotated[int, Field(ge=0, le=limits.FRAGMENTS_MAX)] = 0
    """P: with a period, so many parts of the model take turns, one a round, so each travels every H steps (streaming
    DiLoCo). 0: all of it travels in each round."""
    delay: Annotated[int, Field(ge=0, le=limits.PERIOD_MAX)] = 0
    """tau: with fragments, a round is taken in exactly so many local steps after it was begun. 0: it is waited for."""
    random: bool = False
    """With fragments, each has drawn values of every tensor, others in each cycle of P rounds, and no whole tensors
    (SPARTA)."""
    central: bool = False
    """With a period, a learner's own weights go on, a step towards the base, and do not begin again there (SMA)."""
    gossip: Annotated[int, Field(ge=0, le=limits.PERIOD_MAX)] = 0
    """G: within a period, behind each G local steps a learner mixes its weights with those of neighbours. 0: never."""
    over: Over = "pairs"
    """With `gossip`, which neighbours these are."""
    accumulate: Annotated[int, Field(ge=1, le=limits.PERIOD_MAX)] = 1
    """A: a round is of the gradients of so many steps of the script, of which the last one alone changes anything (O6):
    one batch that is A times as large."""

    @model_validator(mode="before")
    @classmethod
    def _as_earlier_versions_wrote(cls, fields: Any) -> Any:
        """In data folders of a format below 5: which outer step, by a name."""
        if not isinstance(fields, dict) or "outer" not in fields:
            return fields
        outer = fields["outer"]
        steps = {"average": (1.0, 0.0), "nesterov": (DILOCO_RATE, DILOCO_MOMENTUM)}
        rest = {name: value for name, value in fields.items() if name != "outer"}
        if not isinstance(outer, str) or outer not in steps or "outer_rate" in rest:
            return fields
        return rest | dict(zip(("outer_rate", "outer_momentum"), steps[outer], strict=True))

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Parts that take turns, and own weights that go on; another peer may send what nobody can type."""
        if self.central and (not self.period or self.staleness):
            raise ValueError("own weights go on between rounds that are waited for, of periods")
        if self.accumulate > 1 and (self.period or self.staleness or self.signs):
            raise ValueError(f"gradients of {self.accumulate} steps are added up where each round is waited for alone")
        if self.fragments and (not self.period or self.period % self.fragments):
            raise ValueError(f"{self.fragments} parts cannot take turns within {self.period} steps")
        if self.fragments and (self.central or self.after or self.sparse or self.signs):
            raise ValueError("parts that take turns go with equal periods of local:H, diloco:H and muloco:H")
        if self.random and (self.fragments < 2 or self.delay or self.muon or not self.plain_mean):
            raise ValueError("drawn parts take turns with plain averaging alone, and are waited for")
        if self.gossip and (self.gossip >= self.period or self.staleness or not self._starts_on_base):
            raise ValueError("weights are mixed within equal periods of local:H and diloco:H, which are waited for")
        if self.gossip == 0 and self.over != "pairs":
            raise ValueError("neighbours are of weights that are mixed")
        if self.delay and (not self.fragments or self.delay > self.round_steps):
            raise ValueError(f"a round is taken in at most {self.round_steps} steps later, not {self.delay}")
        if self.fragments and (self.staleness, self.straggler) != (1 if self.delay else 0, "wait"):
            raise ValueError(
                f"parts take turns with all of them, and s={self.staleness} is of {self.delay} steps' delay"
            )
        return self

    @property
    def _starts_on_base(self) -> bool:
        """Each period begins on the base, and all of what its steps have changed travels, by the script's optimizer."""
        return not (self.central or self.fragments or self.sparse or self.muon or self.signs)

    @property
    def ends_early(self) -> bool:
        """Whether a learner ends its period when a faster one has ended its own (R9): none waits for the others then,
        and who is slower takes fewer local steps."""
        return self.period > 1 and self.staleness > 0 and self.straggler == "carry"

    @property
    def lockstep(self) -> bool:
        """Whether every learner is in every round, so that samples go by turns (X4).

        Else each learner claims what it needs to go on at its own speed (X2).
        """
        return self.straggler == "wait"

    def text(self) -> str:
        """As typed after --sync."""
        if self.signs:
            return "demo"
        if not self.period:
            more = f",accumulate={self.accumulate}" if self.accumulate > 1 else ""
            return f"ssp:{self.staleness}" if self.staleness else f"bsp{more}"
        after = f",after={self.after}" if self.after else ""
        if self.fragments:
            how = (f",tau={self.delay}" if self.delay else "") + (",random" if self.random else "")
            return f"{self._kind()},stream={self.fragments}{how}"
        mixes = f",gossip={self.gossip}" if self.gossip else ""
        over = f",over={self.over}" if self.over != "pairs" else ""
        return self._kind() + after + mixes + over + (f",ssp:{self.staleness}" if self.staleness else "")

    @property
    def measured_as(self) -> str:
        """The mode, as typed, by whose loss this one is judged: a larger batch is the same mean."""
        return "bsp" if self.accumulate > 1 else self.text()

    def with_period(self, period: int | None) -> "SyncSettings":
        """The same with another period; None: as it is."""
        return self if period is None else self.model_copy(update={"period": period})

    def steps_in(self, round_: int) -> int:
        """How many steps a learner takes for a round, from 1: more than one with a period, or accumulation."""
        return 1 if round_ <= self.after else self.round_steps

    def rounds_of(self, steps: int) -> int:
        """How many rounds there are when so many steps have been taken; the last one is whole."""
        first = min(steps, self.after)
        return first - (first - steps) // self.round_steps

    @property
    def round_steps(self) -> int:
        """How many steps lie between two rounds, behind the first ones (`after`); at least 1."""
        return max(self.accumulate, self.period // max(1, self.fragments))

    @property
    def overlaps(self) -> bool:
        """Whether a learner takes a round in between two local steps of its next period (`delay`)."""
        return self.delay > 0

    @property
    def plain_mean(self) -> bool:
        """With a period: whether the mean of all weights is the next base."""
        return (self.outer_rate, self.outer_momentum) == (1.0, 0.0)

    def _kind(self) -> str:
        if self.sparse:
            return f"sparseloco:{self.period}"
        if self.muon:
            return f"muloco:{self.period}"
        if self.central:
            other = self.outer_momentum != SMA_MOMENTUM
            return f"sma:{self.period}" + f",momentum={_plain(self.outer_momentum)}" * other
        if self.plain_mean:
            return f"local:{self.period}"
        rate = f",rate={_plain(self.outer_rate)}" if self.outer_rate != DILOCO_RATE else ""
        momentum = f",momentum={_plain(self.outer_momentum)}" if self.outer_momentum != DILOCO_MOMENTUM else ""
        return f"diloco:{self.period}{rate}{momentum}"


def sync_settings(
    sync: str,
    straggler: str | None = None,
    visibility: str | None = None,
    own: str | None = None,
    shares: str | None = None,
) -> SyncSettings:
    """What a person asked for, with the defaults filled in; None: not asked for.

    Shares follow speed, so that a slow laptop holds nobody up, but where something else sees to that or where measured
    speeds must decide nothing.

    Raises:
        ValueError: naming the option, and what is possible instead.
    """
    mode = _mode(sync)
    staleness, period = mode.staleness, mode.period
    given = {"straggler": straggler, "visibility": visibility, "own": own, "shares": shares}
    for name, values in (
        ("straggler", ("carry", "wait")),
        ("visibility", ("eager", "fixed")),
        ("own", ("0", "1/m", "1")),
        ("shares", ("equal", "speed")),
    ):
        if given[name] is not None and given[name] not in values:
            raise ValueError(f"--{name} {given[name]}: use {' or '.join(values)}")
    if staleness == 0 and straggler == "carry":
        raise ValueError(f"--straggler carry needs a bound above 0, and --sync {sync} has none: use --sync ssp:2 (R7)")
    if mode.fragments and (visibility == "fixed" or own is not None):
        refused = f"--own {own}" if own is not None else "--visibility fixed"
        raise ValueError(
            f"{refused} with --sync {sync}: when a round is taken in, and what stays of the own weights then, is "
            "settled there: omit it (R9)"
        )
    if mode.central and staleness:
        raise ValueError(
            f"--sync {sync}: a laptop's own weights take a step towards the model of before their round, and with a "
            f"bound above 0 they would have gone on before it is there: use --sync sma:{period}, which waits, or "
            f"local:{period},ssp:{staleness} (R9)"
        )
    if period and not staleness and (visibility == "fixed" or own is not None):
        refused = f"--own {own}" if own is not None else "--visibility fixed"
        raise ValueError(
            f"{refused} is for rounds that a laptop does not wait for, and with --sync {sync} it waits for each: omit "
            f"it, or use --sync {sync},ssp:1 (R9)"
        )
    if period > 1 and shares == "speed" and staleness and straggler != "wait":
        raise ValueError(
            f"--shares speed with --sync {sync}: a slower laptop takes fewer local steps there, of equal batches: omit "
            "it, or use --straggler wait (R9)"
        )
    if visibility == "fixed" and straggler == "carry":
        raise ValueError("--visibility fixed needs --straggler wait: every learner takes part in every round (R8)")
    if visibility == "fixed" and shares == "speed":
        raise ValueError("--visibility fixed needs --shares equal: measured speeds differ between two runs (X4a)")
    fixed = visibility == "fixed"
    straggler = straggler or ("wait" if fixed or staleness == 0 else "carry")
    equal = fixed or (period > 1 and straggler == "carry")
    return SyncSettings.model_validate(
        {
            "staleness": 1 if mode.delay else staleness,
            "straggler": straggler,
            "visibility": visibility or "eager",
            "own": own or ("0" if mode.delay else "1"),
            "shares": shares or ("equal" if equal else "speed"),
            "period": period,
            "after": mode.after,
            "outer_rate": mode.outer_rate,
            "outer_momentum": mode.outer_momentum,
            "sparse": mode.sparse,
            "muon": mode.muon,
            "central": mode.central,
            "accumulate": mode.accumulate,
            "signs": mode.signs,
            "fragments": mode.fragments,
            "random": mode.random,
            "delay": mode.delay,
            "gossip": mode.gossip,
            "over": mode.over or "pairs",
        }
    )


def own_coefficient(own: Own, members: int) -> float:
    """c: 1 takes own gradients for the mean's (delayed gradient averaging), 1/m is SSP's read-my-writes, 0 a delay."""
    return {"0": 0.0, "1/m": 1.0 / members, "1": 1.0}[own]


class _Mode(NamedTuple):
    staleness: int = 0
    period: int = 0
    after: int = 0
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    sparse: bool = False
    muon: bool = False
    signs: bool = False
    fragments: int = 0
    random: bool = False
    delay: int = 0
    central: bool = False
    accumulate: int = 1
    gossip: int = 0
    over: Over | None = None  # nothing was typed


_KINDS = {
    "local": _Mode(),
    "diloco": _Mode(outer_rate=DILOCO_RATE, outer_momentum=DILOCO_MOMENTUM),
    "sparseloco": _Mode(sparse=True),
    "muloco": _Mode(outer_rate=DILOCO_RATE, outer_momentum=DILOCO_MOMENTUM, muon=True),
    "sma": _Mode(outer_momentum=SMA_MOMENTUM, central=True),
}
"""What goes with a period, by the word in front of it."""

_MIXING = ("local", "diloco")
"""With which of them weights are mixed between rounds."""

_GOSSIP = (
    "weights are mixed with neighbours within periods, each of which ends with an exact round: checkpoints, joining "
    "and the comparison of replicas rest on it; use local:32,gossip=4"
)
_UNDER_OTHER_NAMES = {
    "async": "rounds without any bound would have laptops keep without end what a slow one lacks: use a large one, "
    f"such as ssp:8 (at most {limits.STALENESS_MAX})",
    "dga": "averages that come late are periods here: with a delay of a whole period, dga:K,K, use local:K,ssp:1, of s "
    "of them local:K,ssp:s; of T steps, less than a period, local:K,stream=1,tau=T, which takes half of the average",
    "dpsgd": _GOSSIP,
    "easgd": "own weights beside a central average are typed as sma:H",
    "fedavg": "averages of weights after H own steps are typed as local:H",
    "gossip": _GOSSIP,
    "noloco": _GOSSIP,
    "post-local": "rounds after each step, and periods from round N on, are typed as local:H,after=N",
    "push-sum": _GOSSIP,
    "sgp": _GOSSIP,
    "sparta": "a drawn part of all values in each round is typed as local:64,stream=64,random (SPARTA: 1/64 of them "
    "behind each step)",
}
"""What the field calls by other names, and what to type for it."""

_NUMBERS = {"diloco": ("rate", "momentum"), "sma": ("momentum",)}
"""Which numbers of the outer step can be typed, by that word."""


def _mode(sync: str) -> _Mode:
    """What --sync says. Raises ValueError."""
    if sync in ("bsp", "demo"):
        return _Mode(signs=sync == "demo")
    first, *options = sync.split(",")
    kind, _, number = first.partition(":")
    if first == "bsp" and len(options) == 1 and (steps := _accumulated(options[0])) is not None:
        return _Mode(accumulate=steps)
    if kind == "ssp" and not options and (bound := _count(number, 0, limits.STALENESS_MAX)) is not None:
        return _Mode(staleness=bound)
    if kind in _KINDS and (number or first == "sma"):
        period = _whole(sync, f"{kind}:H", number, 1, limits.PERIOD_MAX) if number else 1
        made = _with_options(_KINDS[kind]._replace(period=period), kind, options, sync)
        if made is not None:
            _check_fragments(made, sync)
            _check_gossip(made, kind, sync)
            return made
    if kind in _UNDER_OTHER_NAMES:
        raise ValueError(f"--sync {sync}: {_UNDER_OTHER_NAMES[kind]}")
    raise ValueError(
        f"--sync {sync}: use bsp; demo; ssp:S with a bound S from 0 to {limits.STALENESS_MAX}, such as ssp:2; or "
        f"local:H, diloco:H, sparseloco:H, muloco:H or sma:H with a period H from 1 to {limits.PERIOD_MAX} steps, such "
        "as sparseloco:30, behind which ,ssp:S lets periods overlap with their exchange, but for sma, for diloco "
        ",rate=0.7 and ,momentum=0.9 set the outer step, for sma ,momentum=0.5 alone does, and for local ,after=N has "
        "the first N rounds come after each step; for local, diloco and muloco ,stream=P has P parts of the model take "
        "turns, and ,tau=T behind it has a part's round taken in T steps later, such as diloco:32,stream=4,tau=4 (P at "
        f"most {limits.FRAGMENTS_MAX}), and for local ,random has each part drawn from all values, such as "
        "local:64,stream=64,random; for local and diloco ,gossip=G has laptops mix their weights in pairs after each G "
        "steps of a period, ,over=ring behind it with both neighbours of a ring, such as local:32,gossip=4; "
        "behind bsp ,accumulate=A has a round after each A steps, of all their gradients"
    )


def _check_fragments(mode: _Mode, sync: str) -> None:
    """Raises ValueError for parts that take turns where they cannot."""
    if not mode.fragments and not mode.delay and not mode.random:
        return
    first = sync.split(",")[0]
    if mode.random:
        _check_random(mode, sync)
    option = ",stream=" if mode.fragments else ",tau="
    if mode.sparse:
        raise ValueError(
            f"--sync {sync}: sparseloco sends a small part of each value's change in each round, and no part of the "
            f"model by itself: omit {option}, or use diloco:H or local:H with it"
        )
    if mode.central:
        raise ValueError(
            f"--sync {sync}: own weights of sma go on beside the base as a whole: omit {option}, or use local:H with it"
        )
    if not mode.fragments:
        fits = [parts for parts in (4, 3, 2, 1) if mode.period % parts == 0 and mode.period // parts >= mode.delay]
        use = f"use {first},stream={fits[0]},tau={mode.delay}" if fits else f"use a tau of at most H, {mode.period}"
        raise ValueError(f"--sync {sync}: ,tau=T is of parts that take turns: {use}, or omit it")
    if mode.staleness or mode.after:
        other = f",ssp:{mode.staleness}" if mode.staleness else f",after={mode.after}"
        raise ValueError(f"--sync {sync}: ,stream= does not go with {other}: omit one (,tau=T overlaps rounds, too)")
    if mode.period % mode.fragments:
        legal = [parts for parts in range(1, limits.FRAGMENTS_MAX + 1) if mode.period % parts == 0]
        raise ValueError(
            f"--sync {sync}: {mode.fragments} parts cannot take turns within {mode.period} steps, each after as many: "
            f"use stream={', '.join(map(str, legal))}, or another H"
        )
    steps = mode.period // mode.fragments
    if mode.delay > steps:
        raise ValueError(
            f"--sync {sync}: the next part's round begins after {steps} steps, and one is on its way at a time: use "
            f"tau from 1 to {steps}, or omit it"
        )


def _check_gossip(mode: _Mode, kind: str, sync: str) -> None:
    """Raises ValueError for weights that are mixed where they cannot be."""
    if mode.over is not None and not mode.gossip:
        raise ValueError(f"--sync {sync}: ,over={mode.over} says with whom weights are mixed: use ,gossip=G with it")
    if not mode.gossip:
        return
    legal = f"use local:{mode.period} or diloco:{mode.period} with ,gossip={mode.gossip}"
    if kind not in _MIXING:
        raise ValueError(f"--sync {sync}: ,gossip= was tried with local:H and diloco:H alone: {legal}, or omit it")
    for option, typed in ((f",stream={mode.fragments}", mode.fragments), (f",ssp:{mode.staleness}", mode.staleness)):
        if typed:
            raise ValueError(
                f"--sync {sync}: weights are mixed in periods that begin on the base, all of it, with rounds that are "
                f"waited for, and {option} has others: omit one"
            )
    if mode.gossip >= mode.period:
        raise ValueError(
            f"--sync {sync}: behind {mode.period} steps comes the round, so weights are mixed after fewer: use gossip "
            f"from 1 to {mode.period - 1}, or omit it"
            if mode.period > 1
            else f"--sync {sync}: each step is a round, and nothing is left to mix: use a longer period, or omit gossip"
        )


def _check_random(mode: _Mode, sync: str) -> None:
    """Raises ValueError for drawn parts that cannot be."""
    legal = f"use local:{mode.period},stream=P,random"
    if mode.muon or mode.central or mode.sparse or (mode.outer_rate, mode.outer_momentum) != (1.0, 0.0):
        raise ValueError(
            f"--sync {sync}: ,random averages those values of each tensor that are drawn, and an outer step of its own "
            f"would move the others: {legal}"
        )
    if mode.fragments < 2:
        raise ValueError(f"--sync {sync}: ,random is of two and more parts that take turns: {legal}")
    if mode.delay:
        raise ValueError(f"--sync {sync}: rounds of drawn parts are waited for: omit ,tau={mode.delay}")


def _with_options(mode: _Mode, kind: str, options: list[str], sync: str) -> _Mode | None:
    """None: one of them is none. Raises ValueError for a number that cannot be, and what is there twice."""
    names = [re.split("[:=]", option)[0] for option in options]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--sync {sync}: {twice[0]} is there twice: omit one")
    for option in options:
        name, _, text = option.partition("=")
        if option.startswith("ssp:"):
            bound = _whole(sync, "ssp:S", option.removeprefix("ssp:"), 0, limits.STALENESS_MAX)
            mode = mode._replace(staleness=bound)
        elif kind == "local" and name == "after":
            mode = mode._replace(after=_whole(sync, "after=N", text, 1, limits.PERIODS_AFTER_MAX))
        elif name == "gossip":
            mode = mode._replace(gossip=_whole(sync, "gossip=G", text, 1, limits.PERIOD_MAX))
        elif name == "over":
            if text not in get_args(Over):
                raise ValueError(f"--sync {sync}: over takes {' or '.join(get_args(Over))}")
            mode = mode._replace(over=cast(Over, text))
        elif option == "random":
            mode = mode._replace(random=True)
        elif name == "stream":
            mode = mode._replace(fragments=_whole(sync, "stream=P", text, 1, limits.FRAGMENTS_MAX))
        elif name == "tau":
            mode = mode._replace(delay=_whole(sync, "tau=T", text, 1, limits.PERIOD_MAX))
        elif name in _NUMBERS.get(kind, ()):
            value = _number(text)
            if name == "rate":
                if value is None or not 0 < value <= OUTER_RATE_MAX:
                    told = f"rate=R takes a number above 0 and up to {_plain(OUTER_RATE_MAX)}, such as {DILOCO_RATE}"
                    raise ValueError(f"--sync {sync}: {told} (6 decimals at most)")
                mode = mode._replace(outer_rate=value)
            else:
                if value is None or value > OUTER_MOMENTUM_MAX:
                    told = f"momentum=M takes a number from 0 to {OUTER_MOMENTUM_MAX}, such as {mode.outer_momentum}"
                    raise ValueError(f"--sync {sync}: {told} (6 decimals at most)")
                mode = mode._replace(outer_momentum=value)
        else:
            return None
    return mode


def _whole(sync: str, name: str, text: str, least: int, most: int) -> int:
    """Raises ValueError where it is no number in these bounds."""
    count = _count(text, least, most)
    if count is None:
        raise ValueError(f"--sync {sync}: {name} takes a whole number from {least} to {most}")
    return count


def _accumulated(option: str) -> int | None:
    """A, of accumulate=A; None: it is something else."""
    name, _, text = option.partition("=")
    return _count(text, 1, limits.PERIOD_MAX) if name == "accumulate" else None


def _count(text: str, least: int, most: int) -> int | None:
    """None: it is no number in these bounds."""
    count = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
    return count if least <= count <= most else None


def _plain(value: float) -> str:
    """As `_number` reads it."""
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,3}(\.\d{1,6})?", text, re.ASCII) else None
