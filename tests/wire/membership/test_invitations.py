"""Whom a member asks to join a job that runs, and when (`submit --peers N:MAX`; G7, J1)."""

from hypothesis import given
from hypothesis import strategies as st

from meshwire.membership.invitations import Invitations
from meshwire.messages.job import Generation, Member
from meshwire.timeouts import ASK_S_MAX, Timeouts
from tests.computing import computing

JOB = "j" + "0" * 11
TIMEOUTS = Timeouts()


def member(n: int) -> Member:
    return Member(device=f"{n:064x}", incarnation=n + 10, name=f"peer{n}")


def device(n: int) -> str:
    return member(n).device


def generation(*numbers: int) -> Generation:
    return computing(JOB, device(numbers[0]), tuple(member(n) for n in numbers))


def links(*numbers: int) -> dict[str, int]:
    return {member(n).device: member(n).incarnation for n in numbers}


TWO = generation(1, 2)


def test_a_new_link_is_asked_a_second_later_and_members_never_are() -> None:
    """A second: its links to the other members come up meanwhile."""
    guests = Invitations(5, TIMEOUTS)
    assert guests.due(TWO, links(1, 3), 7.0) == ()
    assert guests.due(TWO, links(1, 3), 7.9) == ()
    assert guests.due(TWO, links(1, 3), 8.0) == (device(3),)
    assert guests.due(TWO, links(1, 3), 60.0) == (), "it was asked, and answers when it has the files"


def test_who_refuses_is_asked_again_with_back_off_and_people_hear_each_reason_once() -> None:
    """G7: 1, 2, 4 .. 60 s."""
    guests, now_s, waits_s = Invitations(3, TIMEOUTS), 0.0, []
    guests.due(TWO, links(3), now_s)
    for number in range(9):
        asked_s = now_s
        while guests.due(TWO, links(3), now_s) != (device(3),):
            now_s += 0.25
        waits_s.append(now_s - asked_s)
        assert guests.answered(device(3), "no torch", now_s) is (number == 0)
    assert waits_s == [1, 1, 2, 4, 8, 16, 32, 60, 60]
    assert guests.refusals == {device(3): "no torch"}
    guests.due(TWO, links(3), now_s + 60)
    assert guests.answered(device(3), "no space", now_s + 60) is True


def test_a_new_incarnation_and_a_new_link_begin_anew() -> None:
    guests = Invitations(3, TIMEOUTS)
    for at_s in (0.0, 1.0):
        guests.due(TWO, links(3), at_s)
    guests.answered(device(3), "no torch", 1.0)
    restarted = {device(3): 99}
    assert guests.due(TWO, restarted, 1.1) == ()
    assert guests.refusals == {}
    assert guests.due(TWO, restarted, 2.1) == (device(3),)
    guests.unanswered(device(3))
    assert guests.due(TWO, restarted, 2.2) == ()
    assert guests.due(TWO, restarted, 3.2) == (device(3),)


def test_no_more_are_asked_than_there_is_room_for_and_all_members_choose_the_same() -> None:
    guests = Invitations(3, TIMEOUTS)
    guests.due(TWO, links(5, 4, 3), 0.0)
    assert guests.due(TWO, links(5, 4, 3), 1.0) == (device(3),)
    assert guests.due(TWO, links(5, 4, 3), 2.0) == ()
    guests.answered(device(3), "no torch", 2.0)
    assert guests.due(TWO, links(5, 4, 3), 2.5) == (device(4),), "the next one, while the first is not to be asked"
    guests.answered(device(4), None, 2.5)
    assert set(guests.asked) == {device(4)}
    assert guests.due(TWO, links(5, 4, 3), 30.0) == ()
    assert guests.due(generation(1, 2, 4), links(5, 4, 3), 99.0) == (), "it has joined, the job is full"
    assert not guests.asked


def test_who_would_join_and_does_not_come_is_asked_again() -> None:
    """It may have lost what it had; whoever has it all says the same again."""
    guests = Invitations(3, TIMEOUTS)
    for at_s in (0.0, 1.0):
        guests.due(TWO, links(3), at_s)
    guests.answered(device(3), None, 1.0)
    assert guests.due(TWO, links(3), 1.0 + ASK_S_MAX - 0.1) == ()
    assert guests.due(TWO, links(3), 1.0 + ASK_S_MAX) == (device(3),)


def test_an_answer_that_comes_too_late_changes_nothing() -> None:
    guests = Invitations(3, TIMEOUTS)
    for at_s in (0.0, 1.0):
        guests.due(TWO, links(3), at_s)
    guests.due(generation(1, 2, 3), links(3), 1.5)
    assert guests.answered(device(3), "no torch", 2.0) is False
    assert (guests.refusals, guests.asked) == ({}, ())


@given(
    st.integers(2, 6),
    st.lists(
        st.tuples(
            st.sets(st.integers(1, 7)),  # linked
            st.sampled_from(["yes", "no", "lost", "later"]),  # what those say that were asked
            st.booleans(),  # whether one that is willing is taken in
            st.floats(0.1, 70.0),
        ),
        max_size=30,
    ),
)
def test_whatever_happens_nobody_is_asked_twice_at_once_nor_without_room(
    members_max: int, steps: list[tuple[set[int], str, bool, float]]
) -> None:
    guests, of, now_s = Invitations(members_max, TIMEOUTS), TWO, 0.0
    waiting: set[str] = set()
    for linked, answer, taken_in, wait_s in steps:
        now_s += wait_s
        live = links(*linked)
        waiting &= live.keys()  # a new link begins anew
        asked = guests.due(of, live, now_s)
        assert not waiting & {*asked}
        assert not {*asked} & {one.device for one in of.members}
        assert {*asked} <= live.keys()
        waiting |= {*asked}
        assert len(of.members) + len(guests.asked) <= max(members_max, len(of.members))
        for one in sorted(waiting):
            if answer in ("yes", "no"):
                guests.answered(one, None if answer == "yes" else "no", now_s)
            elif answer == "lost":
                guests.unanswered(one)
        if answer != "later":
            waiting.clear()
        if taken_in and guests.asked and len(of.members) < members_max:
            numbers = [int(one.device, 16) for one in of.members]
            of = generation(*numbers, int(guests.asked[0], 16))
            waiting.discard(guests.asked[0])
