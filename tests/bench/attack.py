"""`python -m tests.bench.attack`: attacks live daemons as an unpaired host, a lying paired device and another user of
the machine would, and says what held.

Three daemons, each in a network namespace of its own, on a network with the attacker's (root; else on loopback, and
what needs a network or another user is left out). Nothing of them stays. Exit code 1 when something did not hold.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMeshError
from tests.bench import attackliar, attacklocal, attackmutations, attackunpaired
from tests.bench.attackscene import ATTACKER, ATTACKS, RATE_MBIT, Attack, LeftOutError, NotHeldError, Scene
from tests.bench.soak import interruptible
from tests.lab.lab import Lab, LabError, lab_unavailable

GROUPS = {
    "unpaired": attackunpaired,  # before the job begins: cables are pulled
    "local": attacklocal,
    "liar": attackliar,
    "mutations": attackmutations,
}
ATTACK_TIMEOUT_S = 420.0  # a bench that hangs says so


@dataclass(frozen=True)
class Outcome:
    """What came of an attack.

    Attributes:
        held: None: it was left out.
    """

    attack: Attack
    held: bool | None
    found: str
    took_s: float


def say(text: str) -> None:
    """To people; stdout is for the table."""
    print(text, file=sys.stderr, flush=True)


def perform(scene: Scene, attack: Attack) -> Outcome:
    """One attack, with what it cost."""
    if attack.needs_lab and scene.lab is None:
        return Outcome(attack, None, "needs namespaces", 0.0)
    began_s = time.monotonic()
    for victim in scene.victims:
        if not victim.up:
            scene.start(victim)  # the attack before has ended it, which was said
    scene.watch.begin()
    wrong: list[str] = []
    found = ""
    held: bool | None = True
    try:
        found = asyncio.run(_limited(scene, attack))
    except LeftOutError as error:
        found, held = str(error), None
    except NotHeldError as error:
        wrong.append(str(error))
    except Exception as error:  # one attack that breaks does not hide what came of the others
        wrong.append(f"not carried out: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    wrong += scene.watch.end(attack.bounds)
    took_s = time.monotonic() - began_s
    if wrong:
        return Outcome(attack, False, "; ".join([*wrong, *([found] if found else [])]), took_s)
    return Outcome(attack, held, found, took_s)


async def _limited(scene: Scene, attack: Attack) -> str:
    async with asyncio.timeout(ATTACK_TIMEOUT_S):
        return await attack.run(scene)


def attacked(scene: Scene, groups: list[str], names: list[str]) -> Iterator[Outcome]:
    """All attacks of these groups (and, where there are names, of these names), one after the other."""
    for group in GROUPS:
        if group not in groups:
            continue
        chosen = [attack for attack in ATTACKS if attack.group == group and (not names or attack.name in names)]
        if group != "unpaired" and chosen and scene.job is None:
            scene.begin_job()
        for attack in chosen:
            say(f"{group}: {attack.name}")
            outcome = perform(scene, attack)
            verdict = {True: "held", False: "DID NOT HOLD", None: "left out"}[outcome.held]
            say(f"  {verdict}, {outcome.took_s:.0f} s: {outcome.found}")
            yield outcome
    if scene.job is not None:
        yield _job_ended(scene)


def _job_ended(scene: Scene) -> Outcome:
    async def nothing(_scene: Scene) -> str:
        return ""

    tried = "all of that, while bert and cleo train a small model, which then may end"
    attack = Attack("all", "a job meanwhile", tried, nothing, ATTACKS[0].bounds, False)
    began_s = time.monotonic()
    try:
        summary = scene.end_job()
    except (RequestError, ConnectionLost, TimeoutError, OSError, AssertionError) as error:
        return Outcome(attack, False, f"its end is not known: {error}", time.monotonic() - began_s)
    held = summary.state == "succeeded" and summary.replicas_equal is True
    text = f"{summary.state} after {summary.rounds} rounds, replicas equal: {summary.replicas_equal}"
    error_text = f"; {' '.join(summary.error.split())[:200]}" if summary.error else ""
    return Outcome(attack, held, text + error_text, time.monotonic() - began_s)


def show(outcomes: list[Outcome]) -> None:
    """The table."""
    print("| attack | what was tried | | what was seen |\n|---|---|---|---|")
    for outcome in outcomes:
        verdict = {True: "held", False: "**DID NOT HOLD**", None: "left out"}[outcome.held]
        cells = (f"{outcome.attack.group}: {outcome.attack.name}", outcome.attack.tried, verdict, outcome.found)
        print("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    failed = sum(outcome.held is False for outcome in outcomes)
    left_out = sum(outcome.held is None for outcome in outcomes)
    print(f"\n{len(outcomes)} attacks: {failed} did not hold, {left_out} left out")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.attack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m tests.bench.attack\n  python -m tests.bench.attack --only liar --minutes 3\n"
        "  python -m tests.bench.attack --only unpaired --attack 'junk bytes'",
    )
    parser.add_argument("--only", choices=tuple(GROUPS), action="append", help="these attacks; repeatable")
    parser.add_argument("--attack", metavar="NAME", action="append", default=[], help="this one alone; repeatable")
    parser.add_argument("--minutes", type=float, default=15.0, help="floods and counts are cut to it (default 15)")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="of all that is drawn")
    options = parser.parse_args()
    if not 0 < options.minutes <= 15:
        parser.error("--minutes: more than 0, at most 15")
    if unknown := set(options.attack) - {attack.name for attack in ATTACKS}:
        parser.error(f"--attack: no attack is called {', '.join(sorted(unknown))}")
    unavailable = lab_unavailable()
    if unavailable is not None:
        say(f"on loopback, for {unavailable}: what needs namespaces or another user is left out")
    say(f"seed {options.seed}, {options.minutes:g} minutes")
    outcomes: list[Outcome] = []
    try:
        with interruptible(), contextlib.ExitStack() as stack:
            lab = stack.enter_context(Lab(ATTACKER + 1, RATE_MBIT)) if unavailable is None else None
            scene = stack.enter_context(Scene(lab, options.minutes, options.seed))
            outcomes.extend(attacked(scene, options.only or list(GROUPS), options.attack))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (LabError, LocalMeshError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
        say(f"error: {error}")
        show(outcomes)
        return 1
    print(f"seed {options.seed}")
    show(outcomes)
    return int(any(outcome.held is False for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
