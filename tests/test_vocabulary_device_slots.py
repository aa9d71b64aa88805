"""The hash table of ids in device memory, its kernels run on the CPU, against a dict; and the first values they write."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import nvrtc
import pytest
import torch
from cpu_kernels import CpuKernels, cpu_kernels
from hypothesis import given, settings
from hypothesis import strategies as some

from speedtransfer.cuda import kernel_source
from speedtransfer.errors import InvalidValueError
from speedtransfer.vocabulary import device_slots
from speedtransfer.vocabulary.device_slots import Slots, fill_unseen
from speedtransfer.vocabulary.initial import Initial, initial_values, stream_key
from speedtransfer.vocabulary.mixing import GOLDEN

LOW, HIGH = -(2**63), 2**63 - 1


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    """Launches run on the CPU, the last thread first or last."""
    built = cpu_kernels()

    def launch(num_items: int, source: str, name: str, device: torch.device, packed: np.ndarray) -> None:
        assert source == "ids.cu"
        built.launch(name, 3, 5, packed, request.param)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_slots, "launch_over", launch)
        yield built


def found(slots: Slots, ids: list[int], unseen: int = 0) -> tuple[list[int], int]:
    unknown = torch.zeros(1, dtype=torch.int64)
    return slots.find(torch.tensor(ids, dtype=torch.int64), unknown, unseen).tolist(), int(unknown)


def change(slots: Slots, changes: dict[int, int]) -> None:
    slots.change(torch.tensor(list(changes)), torch.tensor(list(changes.values())))


IDS = some.sampled_from([0, 1, -1, 5, 64, LOW, HIGH, *(7**k for k in range(3, 12))])


@settings(max_examples=60, deadline=None)
@given(some.lists(some.dictionaries(IDS, some.integers(-1, 40), min_size=1), max_size=12), some.data())
def test_it_is_a_dict(steps: list[dict[int, int]], data: some.DataObject) -> None:
    # As few slots as there may be: long runs, that wrap around, and marks that are taken again.
    slots = Slots(torch.zeros(32, 2, dtype=torch.int64), data.draw(IDS), data.draw(IDS) | 1)
    known: dict[int, int] = {}
    for step in steps:
        change(slots, step)
        known = {id: row for id, row in (known | step).items() if row >= 0}
        ids = data.draw(some.lists(IDS, max_size=20))
        rows = [known.get(id, 50) for id in ids]
        assert found(slots, ids, unseen=50) == (rows, rows.count(50))
        assert len({id for id, complement in slots.memory.tolist() if complement}) <= 32


def test_a_full_table_ends_every_search() -> None:
    slots = Slots.over(torch.zeros(8, 2, dtype=torch.int64))
    change(slots, {id: id for id in range(8)})
    assert found(slots, [*range(9)]) == ([*range(8), 0], 1)
    change(slots, {9: 9})
    assert found(slots, [9, 3]) == ([0, 3], 1)


def test_removed_ids_leave_slots_for_others() -> None:
    slots = Slots.over(torch.zeros(16, 2, dtype=torch.int64))
    for first in range(0, 200, 8):
        change(slots, {id: id for id in range(first, first + 8)})
        change(slots, dict.fromkeys(range(first, first + 8), -1))
    change(slots, {HIGH: 3})
    assert found(slots, [HIGH, 199]) == ([3, 0], 1)


@pytest.mark.sweep("dtype", "initial")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "initial", [("normal", 0.0, 1.0), ("normal", 0.3, 2e-3), ("uniform", -0.1, 0.3), 1 / 3], ids=str
)
def test_first_values_have_the_bits_of_the_host(initial: Initial, dtype: torch.dtype) -> None:
    ids = torch.from_numpy(np.random.default_rng(1).integers(LOW, HIGH, 3000))
    ids[:3] = torch.tensor([0, LOW, HIGH])
    rows = torch.arange(len(ids)) % 3
    values = torch.full((len(ids), 7), 9.0, dtype=dtype)
    fill_unseen(values, ids, rows, 0, -5, initial)
    unseen = rows == 0
    assert torch.equal(values[unseen], initial_values(ids[unseen].numpy(), 7, -5, initial, dtype))
    assert (values[~unseen] == 9).all()


def test_first_values_far_out_have_the_bits_of_the_host() -> None:
    # Ids whose first word is that: of random ones none lies where the last formula begins.
    words = [*range(0, 5 << 12, 1 << 12), *(1 << k for k in range(13, 64)), *(3 << k for k in range(13, 62))]
    ids = torch.tensor([id_with(word, seed=3) for word in [*words, *(2**64 - 1 - word for word in words)]])
    values = torch.empty(len(ids), 2, dtype=torch.float64)
    fill_unseen(values, ids, torch.zeros_like(ids), 0, 3, ("normal", 0.0, 1.0))
    assert values[:, 0].max() > 8.2
    assert values[:, 0].min() < -8.2
    assert torch.equal(values, initial_values(ids.numpy(), 2, 3, ("normal", 0.0, 1.0), torch.float64))


def id_with(word: int, seed: int) -> int:
    """Return the id whose first random word is `word`."""
    key = int(stream_key(seed)[0])
    id = unmixed((unmixed((unmixed(word) - int(GOLDEN)) % 2**64) - key) % 2**64) ^ key
    return id - 2**64 if id >= 2**63 else id


def unmixed(x: int) -> int:
    """Return what `mix64` makes `x` of."""
    for shift, factor in ((27, 0x1C69B3F74AC4AE35), (33, 0x3C79AC492BA7B653), (27, 1)):
        found = x
        for _ in range(3):
            found = x ^ found >> shift
        x = found * pow(factor, -1, 2**64) % 2**64
    return x


def test_values_beyond_the_dtype_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="ends at 65504"):
        fill_unseen(torch.zeros(1, 1).half(), torch.zeros(1).long(), torch.zeros(1).long(), 0, 0, 1e6)


@pytest.mark.skipif(nvrtc.library() is None, reason="nvidia-cuda-nvrtc is not installed")
def test_every_operation_is_rounded() -> None:
    """A product and a sum must not become one operation, which rounds once."""
    code, _ = nvrtc.compile_cubin(kernel_source("ids.cu"), "ids.cu", "compute_90", kind="PTX")
    found = set(re.findall(rb"\b((?:mul|fma|mad|add|sub|div|sqrt)[.\w]*\.f(?:32|64))\b", code))
    assert found == {kind + b".rn.f64" for kind in (b"mul", b"add", b"sub", b"div", b"sqrt")}
