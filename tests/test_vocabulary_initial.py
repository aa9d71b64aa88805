"""Initial values of new ids: the same bits whatever is asked for beside them, and on a device; the table of ids there."""

import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
import torch
from cpu_kernels import cpu_kernels
from hypothesis import given, settings
from hypothesis import strategies as some

from speedtransfer.vocabulary import device_map, numba_initial
from speedtransfer.vocabulary.device_map import Slots, fill_unseen
from speedtransfer.vocabulary.initial import _rounded, initial_values, stream_key
from speedtransfer.vocabulary.mixing import GOLDEN

NORMAL, UNIFORM = ("normal", 0.0, 1.0), ("uniform", -0.1, 0.3)
NORMALS = """
0x1.740f0bc35aea1p-1 0x1.c4b444dcbd303p-2 0x1.a84b93e009a10p-2 0x1.5f3fad7c21648p-2 0x1.b27e47d21b680p-7
0x1.128e3949003a0p-1 0x1.5b17b06b2eec5p-2 0x1.7c99d6162aa60p-5 0x1.2d0252481962ap-1 0x1.fa2f2a78469a3p-1
0x1.2683f5b291c78p-1 0x1.6d91d3a742a80p-1
"""
UNIFORMS = """
0x1.d11372e7f506bp-3 0x1.038c0786d7324p-4 0x1.7bf2ad18f9758p-5 0x1.89d4436eeef30p-8 -0x1.6f61024d13d20p-4
0x1.f805bdba8908ap-4
"""
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LOW, HIGH = -(2**63), 2**63 - 1


def array(*values):
    return np.array(values, dtype=np.int64)


def hexes(values):
    return [value.hex() for value in values.flatten().tolist()]


def test_golden_bits():
    """On every machine, for ever: ids of a checkpoint get the rows they would have got elsewhere."""
    ids = array(0, 1, -1, LOW, HIGH, 2**32)
    normal = initial_values(ids, 2, 7, ("normal", 0.5, 0.25), torch.float64)
    uniform = initial_values(ids[:3], 2, 7, UNIFORM, torch.float64)
    assert hexes(normal) == NORMALS.split()
    assert hexes(uniform) == UNIFORMS.split()


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("initial", [NORMAL, UNIFORM, ("normal", 3.0, 1e-30), 0.1])
def test_a_value_depends_on_id_column_and_seed_alone(initial, dtype):
    rng = np.random.default_rng(0)
    ids = np.concatenate([array(LOW, HIGH, 0, -1), rng.integers(LOW, HIGH, 60)])
    values = initial_values(ids, 16, 3, initial, dtype)
    assert (values.shape, values.dtype, values.device.type) == ((64, 16), dtype, "cpu")
    order = rng.permutation(64)
    same = [
        (initial_values(ids, 8, 3, initial, dtype), values[:, :8]),
        (initial_values(ids, 1, 3, initial, dtype), values[:, :1]),
        (initial_values(ids[order], 16, 3, initial, dtype), values[order]),
        (initial_values(ids[::3], 16, 3, initial, dtype), values[::3]),
        (initial_values(ids[5:6], 16, 3 + 2**64, initial, dtype), values[5:6]),
        (initial_values(ids.repeat(40), 16, 3, initial, dtype), values.repeat_interleave(40, 0)),
    ]
    for found, expected in same:
        assert torch.equal(found, expected)
    if initial in (NORMAL, UNIFORM):
        assert not torch.equal(initial_values(ids, 16, 4, initial, dtype), values)


# Words of which the normal value is ever farther in the tail: of random ones none lies where the last formula begins.
FAR = [*range(0, 5 << 12, 1 << 12), *(1 << k for k in range(13, 64)), *(3 << k for k in range(13, 62))]
FAR += [2**64 - 1 - word for word in FAR]


def test_quantiles():
    """Against Python's, which computes the middle in the same way but has another logarithm in the tails."""
    words = np.array(
        [*FAR, *np.random.default_rng(2).integers(0, 2**64, 2000, dtype=np.uint64).tolist()], dtype=np.uint64
    )
    ids = array(*(id_with(word, seed=3) for word in words.tolist()))
    found = initial_values(ids, 1, 3, NORMAL, torch.float64).flatten()
    exact = statistics.NormalDist().inv_cdf
    for place, value in zip(numba_initial.half_range(words).tolist(), found.tolist(), strict=True):
        expected = exact(0.5 + place) if abs(place) < 0.4 else math.copysign(exact(0.5 - abs(place)), place)
        assert value == pytest.approx(expected, rel=2e-15, abs=0)
    assert found.max() == -found.min() == pytest.approx(8.2095, abs=1e-3)


def test_ties_between_two_roundings():
    """A value just above the middle of two numbers goes up, though float32 calls it the middle."""
    for dtype, half in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        steps = [1 + half * odd for odd in (1, 3, 5)]
        values = np.array(
            [sign * (step + by) for sign in (1, -1) for step in steps for by in (-(2.0**-50), 0, 2.0**-50)]
        )
        expected = []
        for value in values.tolist():
            quotient = Fraction(value) / Fraction(2 * half)
            expected.append(float(round(quotient)) * 2 * half)  # Python rounds ties to even
        assert _rounded(values, dtype).double().tolist() == expected


# --- on a device: kernels run on the CPU -------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def kernels(request):
    """Launches run on the CPU, the last thread first or last."""
    built = cpu_kernels()

    def launch(num_items, source, name, device, packed):
        assert source == "ids.cu"
        built.launch(name, 3, 5, packed, request.param)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_map, "launch_over", launch)
        yield built


def found(slots, ids, unseen=0):
    unknown = torch.zeros(1, dtype=torch.int64)
    return slots.find(torch.tensor(ids, dtype=torch.int64), unknown, unseen).tolist(), int(unknown)


def change(slots, changes):
    slots.change(torch.tensor(list(changes)), torch.tensor(list(changes.values())))


IDS = some.sampled_from([0, 1, -1, 5, 64, LOW, HIGH, *(7**k for k in range(3, 12))])


@pytest.mark.usefixtures("kernels")
@settings(max_examples=60, deadline=None)
@given(some.lists(some.dictionaries(IDS, some.integers(-1, 40), min_size=1), max_size=12), some.data())
def test_it_is_a_dict(steps, data):
    # As few slots as there may be: long runs, that wrap around, and marks that are taken again.
    slots = Slots(torch.zeros(32, 2, dtype=torch.int64), data.draw(IDS), data.draw(IDS) | 1)
    known = {}
    for step in steps:
        change(slots, step)
        known = {id: row for id, row in (known | step).items() if row >= 0}
        ids = data.draw(some.lists(IDS, max_size=20))
        rows = [known.get(id, 50) for id in ids]
        assert found(slots, ids, unseen=50) == (rows, rows.count(50))
        assert len({id for id, complement in slots.memory.tolist() if complement}) <= 32


@pytest.mark.usefixtures("kernels")
def test_a_full_table_ends_every_search():
    slots = Slots.over(torch.zeros(8, 2, dtype=torch.int64))
    change(slots, {id: id for id in range(8)})
    assert found(slots, [*range(9)]) == ([*range(8), 0], 1)
    change(slots, {9: 9})
    assert found(slots, [9, 3]) == ([0, 3], 1)


@pytest.mark.usefixtures("kernels")
@pytest.mark.sweep("dtype", "initial")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("initial", [NORMAL, ("normal", 0.3, 2e-3), UNIFORM, 1 / 3], ids=str)
def test_first_values_have_the_bits_of_the_host(initial, dtype):
    far = [id_with(word, seed=-5) for word in FAR]
    ids = torch.tensor([*far, 0, LOW, HIGH, *np.random.default_rng(1).integers(LOW, HIGH, 3000).tolist()])
    rows = torch.arange(len(ids)).sub(len(far)).clamp(min=0) % 3
    values = torch.full((len(ids), 7), 9.0, dtype=dtype)
    fill_unseen(values, ids, rows, 0, -5, initial)
    unseen = rows == 0
    assert torch.equal(values[unseen], initial_values(ids[unseen].numpy(), 7, -5, initial, dtype))
    assert (values[~unseen] == 9).all()
    if initial == NORMAL:
        assert -values[: len(far), 0].min() > 8.1 < values[: len(far), 0].max()


def id_with(word, seed):
    """Return the id whose first random word is `word`."""
    key = int(stream_key(seed)[0])
    id = unmixed((unmixed((unmixed(word) - int(GOLDEN)) % 2**64) - key) % 2**64) ^ key
    return id - 2**64 if id >= 2**63 else id


def unmixed(x):
    """Return what `mix64` makes `x` of."""
    for shift, factor in ((27, 0x1C69B3F74AC4AE35), (33, 0x3C79AC492BA7B653), (27, 1)):
        found = x
        for _ in range(3):
            found = x ^ found >> shift
        x = found * pow(factor, -1, 2**64) % 2**64
    return x
