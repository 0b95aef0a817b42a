"""How the members of a job keep in step: the bound s or the period H and what goes with it, from what a person typed
(R8, R9, O2, X4a)."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from meshwire import limits
from meshwire.message_base import Wire

Straggler = Literal["carry", "wait"]
Visibility = Literal["eager", "fixed"]
Own = Literal["0", "1/m", "1"]
Shares = Literal["equal", "speed"]
Outer = Literal["average", "nesterov"]


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
    """Equal batch sizes, or sizes that follow the measured speed when that differs (X4a)."""
    signs: bool = False
    """The optimizer steps on the signs of the mean (DeMo)."""
    period: Annotated[int, Field(ge=0, le=limits.PERIOD_MAX)] = 0
    """H: a round is of what so many steps on a learner's own weights have changed (R9). 0: each step is a round of
    gradients."""
    outer: Outer = "average"
    """With a period, the base becomes the mean of all weights (`average`), or takes DiLoCo's step (`nesterov`)."""
    sparse: bool = False
    """With a period, a small part of what local steps have changed travels, and the rest fades (SparseLoCo)."""
    muon: bool = False
    """With a period, Muon takes the local steps of hidden matrices (MuLoCo)."""

    @property
    def local(self) -> Outer | None:
        """The outer rule, where learners step on weights of their own between two rounds (R9)."""
        return self.outer if self.period else None

    @property
    def lockstep(self) -> bool:
        """Whether every learner is in every round with a batch of equal size, so that samples go by turns (X4).

        Else each learner claims what it needs to go on at its own speed (X2).
        """
        return self.straggler == "wait" and self.shares == "equal"

    def text(self) -> str:
        """As typed after --sync."""
        if self.signs:
            return "demo"
        if self.sparse:
            return f"sparseloco:{self.period}"
        if self.muon:
            return f"muloco:{self.period}"
        if self.period:
            return f"local:{self.period}" + (f",{self.outer}" if self.outer != "average" else "")
        return f"ssp:{self.staleness}" if self.staleness else "bsp"


def sync_settings(
    sync: str,
    straggler: str | None = None,
    visibility: str | None = None,
    own: str | None = None,
    shares: str | None = None,
    *,
    unequal_peers: bool = False,
) -> SyncSettings:
    """What a person asked for, with the defaults filled in; None: not asked for.

    Shares follow speed by default where peers that wait for each other would be slower by far: with s=0 they do so
    only if the peers are known to be unequal, for equal shares give the same run again.

    Args:
        unequal_peers: whether the members' machines are of different kinds.

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
    if period and (visibility == "fixed" or own is not None):
        refused = f"--own {own}" if own is not None else "--visibility fixed"
        raise ValueError(
            f"{refused} is for gradients on their way, and with --sync {sync} there are none: omit it (R9)"
        )
    if visibility == "fixed" and straggler == "carry":
        raise ValueError("--visibility fixed needs --straggler wait: every learner takes part in every round (R8)")
    if visibility == "fixed" and shares == "speed":
        raise ValueError("--visibility fixed needs --shares equal: measured speeds differ between two runs (X4a)")
    fixed = visibility == "fixed"
    return SyncSettings.model_validate(
        {
            "staleness": staleness,
            "straggler": straggler or ("wait" if fixed or staleness == 0 else "carry"),
            "visibility": visibility or "eager",
            "own": own or "1",
            "shares": shares or ("equal" if fixed or (staleness == 0 and not unequal_peers) else "speed"),
            "period": period,
            "outer": mode.outer,
            "sparse": mode.sparse,
            "muon": mode.muon,
            "signs": mode.signs,
        }
    )


def own_coefficient(own: Own, members: int) -> float:
    """c: 1 takes own gradients for the mean's (delayed gradient averaging), 1/m is SSP's read-my-writes, 0 a delay."""
    return {"0": 0.0, "1/m": 1.0 / members, "1": 1.0}[own]


class _Mode(NamedTuple):
    staleness: int = 0
    period: int = 0
    outer: Outer = "average"
    sparse: bool = False
    muon: bool = False
    signs: bool = False


def _mode(sync: str) -> _Mode:
    """What --sync says. Raises ValueError."""
    if sync in ("bsp", "demo"):
        return _Mode(signs=sync == "demo")
    kind, _, rest = sync.partition(":")
    number, comma, outer = rest.partition(",")
    count = int(number) if number.isascii() and number.isdigit() and len(number) < 6 else -1
    if kind == "ssp" and not comma and 0 <= count <= limits.STALENESS_MAX:
        return _Mode(staleness=count)
    if kind in ("local", "sparseloco", "muloco") and 1 <= count <= limits.PERIOD_MAX:
        if kind == "muloco" and not comma:
            return _Mode(period=count, outer="nesterov", muon=True)
        if not comma:
            return _Mode(period=count, sparse=kind == "sparseloco")
        if kind == "local" and outer == "nesterov":
            return _Mode(period=count, outer="nesterov")
    raise ValueError(
        f"--sync {sync}: use bsp; demo; ssp:S with a bound S from 0 to {limits.STALENESS_MAX}, such as ssp:2; or "
        f"local:H, local:H,nesterov, sparseloco:H or muloco:H with a period H from 1 to {limits.PERIOD_MAX} steps, "
        "such as sparseloco:30"
    )
