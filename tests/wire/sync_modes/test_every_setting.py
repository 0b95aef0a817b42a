"""Every mode with every codec over every topology: it is legal, or refused with what leads to one that is (C2)."""

import re
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.collectives.strategy import TOPOLOGIES as ALL_TOPOLOGIES
from meshwire.collectives.strategy import collective_for, topology_of
from meshwire.model.fragments import check_fragments
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from tests.everysetting import MODES, TOPOLOGIES, codecs

OPTIONS = ("straggler", "visibility", "own", "shares")  # which are typed by themselves
STEPS_MAX = 2  # of who does what refusals say
Combination = tuple[str, str | None, str | None]


@cache
def refusal(of: Combination) -> str | None:
    """What is said where such a job is submitted; None: nothing."""
    sync, typed, topology = of
    try:
        settings = sync_settings(sync)
        codec = codec_of(settings, typed)
        collective_for(codec, topology)
        check_fragments(settings, codec, partial=False)
    except ValueError as error:
        return str(error)
    return None


def is_codec(text: str) -> bool:
    try:
        parse_codec(text)
    except ValueError:
        return False
    return True


def is_topology(text: str) -> bool:
    try:
        topology_of(text)
    except ValueError:
        return False
    return True


def is_mode(text: str) -> bool:
    try:
        sync_settings(text)
    except ValueError:
        return False
    return True


@cache
def named(text: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Modes, codecs and topologies that stand in a text. A period H is any number."""
    words = [word.strip(".,:;()") for word in text.replace(":H", ":2").split()]
    return (
        tuple(word for word in words if is_mode(word)),
        tuple(word for word in words if is_codec(word)),
        tuple(word for word in words if is_topology(word)),
    )


def advised(of: Combination, text: str) -> Iterator[Combination]:
    """What does one thing that a refusal of `of` says."""
    sync, codec, topology = of
    modes, coders, ways = named(text)
    yield from ((other, codec, topology) for other in modes)
    yield from ((sync, other, topology) for other in coders)
    yield from ((sync, codec, other) for other in ways)
    for option in re.findall(r"omit (?:it, or )?(,\w+|--codec)", text):
        if option == "--codec":
            yield sync, None, topology
        else:
            yield re.sub(rf"{option}(=\w+)?(?=,|$)", "", sync), codec, topology


def steps_to_a_legal_one(of: Combination, most: int) -> int | None:
    """Of who does what refusals say; None: more than `most`."""
    text = refusal(of)
    if text is None:
        return 0
    if not most:
        return None
    found = [steps_to_a_legal_one(other, most - 1) for other in {*advised(of, text)} - {of}]
    return min((1 + steps for steps in found if steps is not None), default=None)


EVERY = [*product(MODES, (None, *codecs()), (None, *TOPOLOGIES))]


def test_each_mode_codec_and_topology_is_looked_at() -> None:
    """Whoever adds one adds it to what is looked at."""
    assert [each.partition(":")[0] for each in TOPOLOGIES] == [*ALL_TOPOLOGIES]
    assert {parse_codec(each).name for each in codecs()} == {*FAMILIES}
    settings = [sync_settings(each) for each in MODES]
    assert [each.text() for each in settings] == [*MODES]
    fields = set(SyncSettings.model_fields) - {*OPTIONS}
    usual = sync_settings("bsp")
    assert {name for name in fields if all(getattr(each, name) == getattr(usual, name) for each in settings)} == set()


def test_each_has_something_that_it_goes_with() -> None:
    legal = [each for each in EVERY if refusal(each) is None]
    for column, all_of in enumerate((MODES, codecs(), TOPOLOGIES)):
        assert {each[column] for each in legal} - {None} == {*all_of}
    assert len(legal) > len(EVERY) / 5


def test_what_is_illegal_names_what_is_legal() -> None:
    """Who does one thing that a refusal says, and one that the next one says, if there is a next one, has a job."""
    refused = [each for each in EVERY if refusal(each) is not None]
    assert len(refused) > 1000
    lost = [(each, refusal(each)) for each in refused if steps_to_a_legal_one(each, STEPS_MAX) is None]
    assert not lost, f"{len(lost)} of {len(refused)}, such as {lost[:3]}"


@pytest.mark.parametrize("sync", MODES)
def test_a_refusal_says_which_option_it_is_about(sync: str) -> None:
    """As typed, so that it can be found on the command line."""
    for of in EVERY:
        text = refusal(of) if of[0] == sync else None
        if text is not None:
            typed = (f"--sync {of[0]}", f"--codec {of[1]}", f"--topology {of[2]}")
            assert any(each in text for each in typed), text
