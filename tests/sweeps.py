"""``@pytest.mark.sweep``: of the many cases of a test `make test` runs those that cover all values, `make test-slow` all.

| mark | cases that always run |
|---|---|
| ``sweep`` | have every value of every parameter |
| ``sweep(strength=2)`` | have every pair of values of two parameters |
| ``sweep("case", "dtype")`` | have every value of these parameters |

Arguments of one ``parametrize`` are one parameter, unless the mark names them. The class counts as a parameter: classes of a
module that inherit a test and have the mark share its cases. The other cases are marked `slow`. A case is chosen among those
that are collected, so one that is named on the command line runs.
"""

import collections
import itertools
import zlib
from typing import Any

import pytest
import torch

# A parameter, or several of one `parametrize`, and its value.
Factor = tuple[str, Any]


def few(cases, *kept):
    """Return the cases of a `parametrize`, tuples of several names: those that are not among `kept` are slow."""
    some = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [pytest.param(*values, marks=() if case in kept else pytest.mark.slow) for case, values in some]


def mark_the_rest_as_slow(items):
    """Mark as slow the cases of swept tests that add nothing to what the others cover."""
    sweeps = collections.defaultdict(dict)
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark and not item.get_closest_marker("slow"):
            key = item.path, item.function.__qualname__, mark.args, mark.kwargs.get("strength", 1)
            sweeps[key][item.nodeid] = item
    for (*_, names, strength), cases in sweeps.items():
        kept = cover({nodeid: factors(item, names) for nodeid, item in cases.items()}, strength)
        for nodeid, item in cases.items():
            if nodeid not in kept:
                item.add_marker(pytest.mark.slow)


def factors(item, names=()):
    """Return the class of a case and the values of its parameters, or of those of these `names`."""
    found = [("class", item.cls.__qualname__)] if item.cls else []
    values = {name: _key(value) for name, value in item.callspec.params.items()} if hasattr(item, "callspec") else {}
    if names:
        if unknown := set(names) - values.keys():
            given = ", ".join(values)
            raise pytest.UsageError(f"{item.nodeid}: the mark sweep names {', '.join(unknown)}; choose from {given}")
        return found + [(name, values[name]) for name in names]
    for mark in item.iter_markers("parametrize"):
        together = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found.append((",".join(together), tuple(values.pop(name) for name in together)))
    return found + list(values.items())


def cover(cases, strength, costly=()):
    """Return ids of cases that have all combinations of `strength` factors that any case has.

    Greedy: those that cover most come first. Among equals `costly` ones come last, and then a hash of the id decides and not
    the order, so a case that is added changes few of the others, and the same run in every process.
    """
    groups = {name: set(itertools.combinations(case, min(strength, len(case)))) for name, case in cases.items()}
    order = sorted(groups, key=lambda name: (name in costly, zlib.crc32(name.encode()), name))
    left, kept = set().union(*groups.values()), set()
    for gain in range(max(map(len, groups.values())), 0, -1):
        for name in order:
            if len(groups[name] & left) >= gain:
                kept.add(name)
                left -= groups[name]
    return kept


def _key(value):
    """Return what is equal for equal values, of objects that cannot be compared for the same object."""
    plain = isinstance(value, str | bytes | int | float | type | torch.dtype | None)
    return (type(value), value) if plain else id(value)
