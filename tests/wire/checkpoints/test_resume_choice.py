"""J3: from what the members of a generation go on in which no learner computes."""

import pytest

from meshwire.checkpoints.resume_choice import WayOn, way_on
from meshwire.membership.proposals import enter_message
from meshwire.messages.generation import Enter, Holding, Standing
from meshwire.rounds.chain import START
from tests.wire.membership.test_proposing import generation

CUT = 20


def standing(holding: Holding, complete: int = CUT) -> Standing:
    chains = (complete.to_bytes(16, "little"),)
    return Standing(generation=5, number=2, complete=complete, chains=chains, samples=0, linked=(), holding=holding)


def saved(round_: int) -> tuple[int, bytes]:
    return round_, round_.to_bytes(16, "little")


BASE = Holding(base=True, loads_after=CUT)
LOADS = Holding(loads_after=CUT)
EARLY = Holding(loads_after=12)
DONOR = Holding(loads_after=CUT, state=14)
SAVED, OLDER = (Holding(loads_after=CUT, state=round_, saved=saved(round_)) for round_ in (10, 8))
FORWARDS = Holding(state=10, saved=saved(10))
NOTHING = Holding()


@pytest.mark.parametrize(
    ("holdings", "way"),
    [
        ((LOADS, BASE, SAVED), WayOn("on")),  # a learner that is killed between two rounds finds its base in memory
        ((LOADS, DONOR, EARLY), WayOn("on")),  # a state that was given can still be loaded where rounds are kept
        ((LOADS, SAVED, EARLY), WayOn("back", 1)),  # it is too old for what is kept
        ((OLDER, LOADS, SAVED), WayOn("back", 2)),  # the newest
        ((LOADS, SAVED, SAVED), WayOn("back", 1)),  # the lower rank's
        ((LOADS, FORWARDS), WayOn("back", 1)),  # from a disk, for whoever has a learner
        ((FORWARDS, NOTHING), WayOn("failed")),  # no learner will ever load it
        ((LOADS, DONOR), WayOn("wait")),  # a state without its deal of samples, and too old
        ((LOADS, LOADS, NOTHING), WayOn("wait")),  # for somebody who is not here
    ],
)
def test_what_all_go_on_from(holdings: tuple[Holding, ...], way: WayOn) -> None:
    """J3."""
    assert way_on({rank: standing(holding) for rank, holding in enumerate(holdings)}, CUT, ()) == way


def test_a_state_of_another_history_is_none() -> None:
    """G4: a member that reloads has been elsewhere."""
    standings = {0: standing(LOADS), 1: standing(BASE), 2: standing(SAVED)}
    assert way_on(standings, CUT, (1, 2)) == WayOn("wait")


@pytest.mark.parametrize("failed", [None, 0, 1])
def test_a_base_that_nobody_has_any_more_is_looked_for_on_disks(failed: int | None) -> None:
    """J3, J5: unless it was lost by an error of the script, which would come again."""
    holdings = [LOADS.model_copy(update={"failed": rank == failed}) for rank in (0, 1)]
    standings = {rank: standing(holding) for rank, holding in enumerate(holdings)}
    standings[1] = standings[1].model_copy(update={"generation": None})
    rests = generation(3, (0, 1)).model_copy(update={"learning": ()})
    assert enter_message(rests, standings, 0).way == "wait"
    assert enter_message(rests, standings, 0, awaited=False).way == ("lost" if failed is None else "failed")


BEGINS = LOADS.model_copy(update={"saved": (0, START), "begins": True})
PREPARES = BEGINS.model_copy(update={"prepared": False})
GIVES = BEGINS.model_copy(update={"prepared": True, "base": True})


def first(holding: Holding) -> Standing:
    """Of a member that holds no round."""
    return standing(holding).model_copy(update={"complete": 0, "chains": (START,)})


def without_learners(*holdings: Holding, provisional: bool = False) -> Enter:
    """What follows from the promises of members that hold no round."""
    ranks = tuple(range(len(holdings)))
    proposed = generation(3, ranks).model_copy(update={"learning": (), **({"root": 1} if provisional else {})})
    return enter_message(proposed, {rank: first(holding) for rank, holding in enumerate(holdings)}, 0)


@pytest.mark.parametrize("provisional", [True, False])
def test_learners_that_prepare_are_waited_for(provisional: bool) -> None:
    """G9: nobody has the start yet, and the lowest rank gives it."""
    gone = PREPARES.model_copy(update={"loads_after": None})
    enter = without_learners(gone, PREPARES, PREPARES, provisional=provisional)
    assert (enter.way, enter.awaited, enter.giver, enter.given) == ("on", (1, 2), 1, False)


def test_the_start_that_a_learner_has_is_the_one_of_all() -> None:
    """G9: the giver is lost, or its process, and another one has loaded what it gave."""
    enter = without_learners(PREPARES, PREPARES, GIVES)
    assert (enter.way, enter.awaited, enter.giver, enter.given) == ("on", (0, 1, 2), 2, True)


def test_scripts_that_fail_on_all_members_before_the_first_round_end_the_job() -> None:
    """J3, G9: whoever left first has nothing that they lack."""
    gone = PREPARES.model_copy(update={"loads_after": None})
    assert without_learners(gone, gone).way == "failed"


@pytest.mark.parametrize("provisional", [True, False])
def test_all_go_back_to_the_beginning(provisional: bool) -> None:
    """J3, G9: once learners have computed it stands for a checkpoint. Who may have gone on elsewhere is waited for."""
    enter = without_learners(BEGINS, BEGINS, provisional=provisional)
    if provisional:
        assert enter.way == "wait"
        return
    assert (enter.way, enter.cut, enter.chain, enter.reload) == ("back", 0, START, (0, 1))
    assert (enter.awaited, enter.giver, enter.given) == ((0, 1), 0, False), "they begin together"
    gone = BEGINS.model_copy(update={"loads_after": None})
    assert without_learners(gone, gone).way == "failed", "a script that fails on all members ends the job"


def test_after_a_checkpoint_nobody_waits_for_the_others_learners() -> None:
    """J3: who has loaded it goes on."""
    assert (
        enter_message(
            generation(3, (0, 1)).model_copy(update={"learning": ()}), {0: standing(LOADS), 1: standing(SAVED)}, 0
        ).awaited
        == ()
    )


def test_where_a_learner_computes_nothing_is_given_up() -> None:
    """J3: checkpoints are older than what learners hold."""
    standings = {0: standing(LOADS), 1: standing(SAVED)}
    computes = generation(3, (0, 1))
    assert enter_message(computes, standings, 0).way == "on"
    rests = computes.model_copy(update={"learning": ()})
    enter = enter_message(rests, standings, 0)
    assert (enter.way, enter.cut, enter.chain, enter.source) == ("back", 10, saved(10)[1], 1)
    assert enter.reload == (0, 1)
    assert enter.complete == ((0, 10), (1, 10))
    assert (enter.counted, enter.learning) == (0, ()), "the deal of samples is that of the checkpoint"
    apart = rests.model_copy(update={"root": 1})
    assert enter_message(apart, standings, 0).way == "wait", "the base may be with those that are silent"
