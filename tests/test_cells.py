"""No third outcome: what is done with a whole table gives what ``nn.Embedding`` gives, or raises one of our errors."""

from __future__ import annotations

import re

import pytest
from cell_verbs import ALL, BEGIN, END, MAKING, OWNERS, PAGE, REFUSED, VERBS, ends_of, listed, section
from sweeps import cover

LISTED = listed()
CELLS = [(*place, verb) for place in ALL for verb in (VERBS if place not in LISTED[MAKING] else ["nothing"])]
# Those that always run have every pair of a verb, a kind, an owner and a form, with few of the owners that are two processes.
COSTLY = {"-".join(it) for it in CELLS if OWNERS[it[1]] > 1}
QUICK = cover({"-".join(it): list(zip("kofv", it, strict=True)) for it in CELLS}, 2, COSTLY)


def places(quick: bool) -> list:
    """Return the parameters of a test of the cells that always run, or of the others."""
    verbs: dict[tuple[str, ...], list[str]] = {}
    for *place, verb in (cell for cell in CELLS if ("-".join(cell) in QUICK) is quick):
        verbs.setdefault(tuple(place), []).append(verb)
    return [pytest.param(place, some, id="-".join(place)) for place, some in verbs.items()]


def wrong(pool, place, verbs, folder) -> list[str]:
    """Run cells and return what is wrong with them."""
    ends = ends_of(pool, *place, verbs, folder)
    found = []
    for verb, end in ends.items():
        refuses, unmade = end.startswith(REFUSED), end.startswith(REFUSED + MAKING)
        if end and not refuses:
            found.append(f"{verb}: {end}")
        elif refuses is not (tuple(place) in LISTED[MAKING if unmade else verb]):
            found.append(f"{verb}: docs/limits.md lists another end than {end or 'done'!r}; python tests/cell_verbs.py")
    return found


@pytest.mark.parametrize(("place", "verbs"), places(quick=True))
def test_cells(pool, place, verbs, tmp_path):
    assert not wrong(pool, place, verbs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "verbs"), places(quick=False))
def test_all_other_cells(pool, place, verbs, tmp_path):
    assert not wrong(pool, place, verbs, tmp_path)


def test_the_page_counts_what_it_lists():
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert text == section(LISTED)
    assert re.match(r"[\d,]+ of [\d,]+ cells refuse\.\n", text)
