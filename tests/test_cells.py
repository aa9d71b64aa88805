"""No third outcome: what is done with a whole table gives what ``nn.Embedding`` gives, or raises one of our errors."""

import itertools
import re

import pytest
import torch
from cell_verbs import ALL, BEGIN, END, KINDS, MAKING, OWNERS, PAGE, REFUSED, VERBS, ends_of, listed, section
from sweeps import cover

LISTED = listed()
CELLS = [(*place, verb) for place in ALL for verb in (VERBS if place not in LISTED[MAKING] else ["nothing"])]
# Those that always run have every pair of a kind, an owner and a form, and every verb with each of these, or with one much
# like it; with few of the owners that are two processes.
LIKE = {"EmbeddingBag": "Embedding", "NgramEmbedding": "Embedding", "PerLayerEmbedding": "Embedding"}
LIKE |= {"MultiEmbeddingBag": "MultiEmbedding", "MemoryLayer": "Embedding"}
LIKE |= {"int8": "bfloat16", "layout": "mmap", "group of 1": "alone", "shared": "group of 2"}
COSTLY = {"-".join(it) for it in CELLS if OWNERS[it[1]] > 1}


def pairs(place, verb):
    """Return the pairs that a cell has."""
    return [*itertools.combinations(place, 2), *((LIKE.get(axis, axis), verb) for axis in place)]


QUICK = cover({"-".join(it): pairs(it[:3], it[3]) for it in CELLS}, 1, COSTLY)


def places(quick):
    """Return places with the verbs of those cells that always run, or of the others."""
    verbs = {}
    for *place, verb in (cell for cell in CELLS if ("-".join(cell) in QUICK) is quick):
        verbs.setdefault(tuple(place), []).append(verb)
    return [([*place], some) for place, some in verbs.items()]


# An older torch makes some of these by other operations, which may be done where those of a newer one are refused.
OLD = torch.__version__ < "2.13"


def wrong(pool, place, verbs, folder):
    """Run cells and return what is wrong with them."""
    ends = ends_of(pool, *place, verbs, folder)
    found = []
    for verb, end in ends.items():
        refuses, unmade = end.startswith(REFUSED), end.startswith(REFUSED + MAKING)
        if end and not refuses:
            found.append(f"{verb}: {end}")
        elif refuses is not (tuple(place) in LISTED[MAKING if unmade else verb]) and (refuses or not OLD):
            found.append(f"{verb}: docs/limits.md lists another end than {end or 'done'!r}; python tests/cell_verbs.py")
    return found


@pytest.mark.parametrize(("place", "verbs"), [pytest.param(*one, id="-".join(one[0])) for one in places(quick=True)])
def test_cells(pool, place, verbs, tmp_path):
    assert not wrong(pool, place, verbs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_other_cells(pool, kind, owner, tmp_path):
    for place, verbs in places(quick=False):
        if place[:2] == [kind, owner]:
            assert not wrong(pool, place, verbs, tmp_path)


def test_the_page_counts_what_it_lists():
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert text == section(LISTED)
    assert re.match(r"[\d,]+ of [\d,]+ cells refuse\.\n", text)


def test_every_value_and_every_pair_of_a_sweep_runs():
    axes = {"optimizer": "abcd", "dtype": "xyz", "idle": "le"}
    cases = {"".join(case): list(zip(axes, case, strict=True)) for case in itertools.product(*axes.values())}
    assert len(cover(cases, 1)) == 4
    kept = cover(cases, 2)
    pairs = {pair for name in kept for pair in itertools.combinations(name, 2)}
    assert len(pairs) == 4 * 3 + 4 * 2 + 3 * 2
    assert 12 <= len(kept) <= 14
