"""A journal in which stated figures lie as if they had been measured: for tests of what pages say."""

from pathlib import Path

from tests.bench.journal import Conditions, Entry, Figures, Journal

QUIET = Conditions(0.1, 1.0, "2026-11-26T10:00:00+00:00", {"commit": "abc", "torch": "2.13.0", "python": "3.11"})


def filled(folder: Path, *entries: tuple[str, Figures]) -> Journal:
    """Each case's figures in order, as its repeats from 0, behind what the folder's file holds."""
    journal = Journal(folder / "proof.jsonl")
    repeats: dict[str, int] = {}
    for case, figures in entries:
        repeats[case] = repeats.get(case, -1) + 1
        journal.add(Entry(case, repeats[case], False, figures, QUIET))
    return journal
