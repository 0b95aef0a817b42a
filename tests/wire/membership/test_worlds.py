"""P6: whose scripts run together after a change of the generation, and what counts as a failure: pure functions."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.membership.proposal_checks import enter_wrong, promise_wrong
from meshwire.membership.proposals import enter_message
from meshwire.messages.generation import Electorate, Enter, Holding, Promised, Standing
from meshwire.messages.group import GroupWorld, WorldHere
from meshwire.messages.job import Generation, Member
from meshwire.rounds.chain import START

JOB = "j" + "0" * 11
NAMES = ("anna", "bert", "cleo", "dora")
FIRST = GroupWorld(number=1, restarts=0, ranks=(0, 1, 2))


def generation(number: int, *ranks: int) -> Generation:
    members = tuple(Member(device=f"{rank + 1:064x}", incarnation=1, name=name) for rank, name in enumerate(NAMES))
    return Generation(
        job=JOB,
        number=number,
        proposer=members[ranks[0]].device,
        parent=None,
        members=members,
        ranks=ranks,
        learning=(),
        root=number,
        counted=ranks,
    )


def standing(here: WorldHere | None, number: int = 1) -> Standing:
    """Of a member that was in this world; None: it brings no history."""
    return Standing(
        generation=None if here is None else number,
        number=0 if here is None else number,
        complete=0,
        chains=() if here is None else (START,),
        samples=0,
        linked=(),
        holding=Holding(loads_after=0, prepared=None if here is None else False),
        world=here,
    )


def decided(proposed: Generation, said: Mapping[int, WorldHere | None]) -> Enter:
    return enter_message(proposed, {rank: standing(here) for rank, here in said.items()}, proposed.ranks[0])


STAYS = WorldHere(world=FIRST)


@pytest.mark.parametrize(
    ("said", "restarts", "ranks", "why"),
    [
        ({1: STAYS, 2: STAYS}, 1, (1, 2), "anna was lost"),
        ({2: STAYS}, 1, (2,), "anna and bert were lost"),
        ({0: STAYS, 1: STAYS.model_copy(update={"broken": "bert: x"}), 2: STAYS}, 1, (0, 1, 2), "bert: x"),
        ({0: STAYS, 1: STAYS, 2: STAYS, 3: None}, 0, (0, 1, 2, 3), "dora has come"),
        ({0: None, 1: STAYS, 2: STAYS}, 1, (1, 2, 0), "anna was lost"),  # and is back, with an older checkpoint
        ({0: STAYS.model_copy(update={"done": True}), 1: STAYS}, 1, (1,), "cleo was lost"),
    ],
)
def test_the_next_world_is_of_those_that_are_there(
    said: dict[int, WorldHere | None], restarts: int, ranks: tuple[int, ...], why: str
) -> None:
    world = decided(generation(2, *sorted(said)), said).world
    assert world == GroupWorld(number=2, restarts=restarts, ranks=ranks, why=why)


def test_a_generation_that_changes_nothing_restarts_nothing() -> None:
    """A wish that was heard late brings one more generation: no script is ended for it."""
    assert decided(generation(2, 0, 1, 2), dict.fromkeys(range(3), STAYS)).world == FIRST
    done = {0: STAYS.model_copy(update={"done": True}), 1: STAYS, 2: STAYS}
    assert decided(generation(2, 0, 1, 2), done).world == FIRST, "who has ended well is waited for by nobody"


def test_who_was_not_in_the_newest_world_comes_last() -> None:
    """It was left behind in the one before: its checkpoint may be older, and rank 0 is whose weights DDP copies."""
    second = GroupWorld(number=2, restarts=1, ranks=(1, 2), why="anna was lost")
    standings = {
        0: standing(STAYS, 1),
        1: standing(WorldHere(world=second), 2),
        2: standing(WorldHere(world=second), 2),
    }
    world = enter_message(generation(3, 0, 1, 2), standings, 0).world
    assert world == GroupWorld(number=3, restarts=1, ranks=(1, 2, 0), why="anna has come")


def test_jobs_without_restarts_have_no_worlds() -> None:
    one = standing(STAYS).model_copy(update={"world": None})
    assert enter_message(generation(2, 0, 1), {0: one, 1: one}, 0).world is None


HERE = st.none() | st.builds(WorldHere, world=st.just(FIRST), broken=st.none() | st.just("x"), done=st.booleans())


@given(st.dictionaries(st.integers(0, 3), HERE, min_size=1).filter(lambda said: any(said.values())))
def test_all_accept_what_is_decided_and_nobody_is_forgotten(said: dict[int, WorldHere | None]) -> None:
    """In the next world is everybody who is there, once, but those whose scripts have ended well."""
    proposed = generation(2, *sorted(said))
    proposer = min(rank for rank, here in said.items() if here is not None)
    standings = {rank: standing(here) for rank, here in said.items()}
    enter = enter_message(proposed, standings, proposer)
    assert not [wrong for rank in said if (wrong := enter_wrong(enter, proposed, rank, standings[rank]))]
    assert enter.way == "on"
    assert enter.world is not None
    assert len({*enter.world.ranks}) == len(enter.world.ranks)
    if enter.world != FIRST:
        done = {rank for rank, here in said.items() if here is not None and here.done}
        assert {*enter.world.ranks} == {*said} - done


def test_a_promise_of_a_world_that_cannot_be_is_refused() -> None:
    """Else whoever proposes would look for a member that there is not."""
    proposed = generation(2, 0, 1)
    history = Electorate(generation=1, number=1, entered=True, counted=((0, 1),), gone=(), listed=((0, 1),))

    def wrong(world: GroupWorld) -> str | None:
        held = standing(WorldHere(world=world)).model_copy(update={"history": history})
        return promise_wrong(Promised(job=JOB, generation=proposed.hash64(), standing=held), proposed)

    assert wrong(FIRST) is None
    for world in (FIRST.model_copy(update={"ranks": (0, 7)}), FIRST.model_copy(update={"number": 3})):
        assert wrong(world) == "its world is of later, or of others than the members"


def test_a_world_of_others_is_refused() -> None:
    proposed = generation(2, 0, 1)
    enter = decided(proposed, {0: STAYS, 1: STAYS})
    held = standing(STAYS)
    for world in (
        None,
        FIRST,
        GroupWorld(number=3, restarts=1, ranks=(0, 1)),
        GroupWorld(number=2, restarts=1, ranks=(0, 0)),
    ):
        assert enter_wrong(enter.model_copy(update={"world": world}), proposed, 1, held) is not None
