"""X3: of one rank, two learners never compute without a generation between them in which it rests."""

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.membership.requests import OwnRequest


def founder() -> OwnRequest:
    wish = OwnRequest()
    wish.found(1, computes=True)
    return wish


def test_a_founder_wishes_nothing() -> None:
    wish = founder()
    assert not wish.run(2, computes=True)
    assert wish.due(computes=True) is None


def test_the_next_learner_is_ready_before_anybody_has_heard_that_the_one_before_is_lost() -> None:
    """It took the place of that one, with what had been dealt to it and was in rounds already."""
    wish = founder()
    wish.say("rest")
    wish.say("learn")
    assert not wish.run(2, computes=True)
    assert wish.due(computes=True) == "rest"
    assert wish.due(computes=False) is None, "that generation may be replaced before the ledger follows it"
    assert not wish.run(3, computes=False)
    assert wish.due(computes=False) == "learn"
    assert wish.run(4, computes=True)
    assert wish.due(computes=True) is None


def test_whoever_is_left_out_and_listed_as_computing_rests() -> None:
    """Who proposes may not have heard it; all waited for a learner that nobody had started."""
    wish = founder()
    wish.forget()
    wish.follow(6, computes=True)
    assert not wish.run(7, computes=True)
    assert wish.due(computes=True) == "rest"
    wish.run(8, computes=False)
    assert wish.due(computes=False) is None
    assert not wish.run(9, computes=True)
    assert wish.due(computes=True) == "rest", "by a wish of before, that somebody heard late"


def test_a_newcomer_wishes_nothing_until_it_is_ready() -> None:
    wish = OwnRequest()
    wish.run(2, computes=False)
    assert wish.due(computes=False) is None
    wish.say("learn")
    assert wish.due(computes=False) == "learn"


def test_a_learner_begins_though_only_others_have_seen_it_listed_first() -> None:
    """The generation that listed it counts, for rounds went on there with others; here it was replaced before."""
    wish = OwnRequest()
    wish.run(2, computes=False)
    wish.say("learn")
    wish.follow(3, computes=True)
    assert wish.run(4, computes=True)


def test_a_process_that_ends_late_owes_no_second_rest() -> None:
    """The rank rests already: to wish it again would be to wait for a generation that nobody has a reason for."""
    wish = founder()
    wish.forget()
    wish.run(2, computes=False)
    wish.say("rest")
    wish.say("learn")
    assert wish.due(computes=False) == "learn"


def test_an_older_generation_that_is_followed_late_changes_nothing() -> None:
    wish = founder()
    wish.run(3, computes=True)
    wish.follow(2, computes=False)
    wish.say("rest")
    assert wish.due(computes=True) == "rest"


def test_whoever_leaves_wishes_nothing_else() -> None:
    wish = founder()
    wish.say("leave")
    wish.forget()
    assert wish.leaves
    assert (wish.due(computes=True), wish.due(computes=False)) == ("leave", "leave")


CHANGES = ["replaced", "runs elsewhere", "runs", "runs, and its proposer had heard nothing"]
MISHAPS = st.lists(st.sampled_from(["lost", "forgotten", "ready", *CHANGES]), max_size=12)
LATER = st.lists(st.sampled_from(CHANGES), max_size=3)


class Rank:
    """One rank, and others who grant what they hear of it in time."""

    def __init__(self) -> None:
        self.wish = founder()
        self.listed = True  # in the newest generation
        self.counted = 1, True  # the newest generation that counts, and whether this rank was listed
        self.rested = False  # since a learner of it has begun
        self.ready = self.computes = False  # the newest learner, when that of the first generation is lost

    def befall(self, what: str) -> None:
        if what in CHANGES:
            self.change(what)
        elif what == "ready":
            self.ready = True
            self.wish.say("learn")
        else:
            self.ready = self.computes = False
            if what == "lost":
                self.wish.say("rest")
            else:
                self.wish.forget()

    def change(self, how: str) -> None:
        """The next generation is entered, and rounds go on in it unless it is replaced before."""
        number, listed = self.counted
        self.wish.follow(number, computes=listed)
        heard = None if "nothing" in how else self.wish.due(computes=self.listed)
        assert not (heard == "rest" and self.computes), "nobody sends a learner away that computes"
        self.listed = {"learn": True, "rest": False}.get(heard or "", self.listed)
        if how == "replaced":
            return
        self.counted = number + 1, self.listed
        self.rested = self.rested or not self.listed
        if how != "runs elsewhere" and self.wish.run(number + 1, computes=self.listed):
            assert self.ready, "there is a learner"
            assert self.rested, "X3: no learner takes the place of another"
            self.computes, self.rested = True, False


@settings(max_examples=500)
@given(MISHAPS, LATER, LATER)
def test_whatever_befalls_it_a_learner_that_is_ready_begins_after_a_rest(
    mishaps: list[str], until: list[str], since: list[str]
) -> None:
    rank = Rank()
    for mishap in [*mishaps, "lost", *until, "ready", *since]:
        rank.befall(mishap)
    for _ in range(3):
        rank.change("runs")
    assert rank.computes
    assert rank.wish.due(computes=rank.listed) is None, "and nothing more is wished"
