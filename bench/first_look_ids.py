"""The part of bench/first_look.py about ids without a bound: how fast the device finds them, steps that admit them afterwards
(``deferred=True``), and how fast tables in page-locked memory grow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

DIM = 32
NEW = 0.01  # of the ids of a step
GROWN = 4  # times the rows of a call


def look(count: int, repeats: int, end: float) -> Iterator[dict[str, Any]]:
    """Yield what was measured with `count` ids a call, until the time `end`; a failure has its error in place of figures."""
    for name, measure in (("find", _find), ("step", _steps), ("grow", _grow)):
        if time.monotonic() > end:
            yield {"name": name, "error": "no time was left"}
            continue
        try:
            yield {"name": name, **measure(count, repeats)}
        except Exception as error:
            yield {"name": name, "error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}


def _find(count: int, repeats: int) -> dict[str, Any]:
    """Return ids found in a second, on the device and by the host."""
    import speedtransfer as st

    ids = torch.randint(-(2**63), 2**63 - 1, (4 * count,)).unique()
    vocabulary = st.Vocabulary(initial=0.0)
    module = st.Embedding(len(ids), 1, vocabulary=vocabulary, memory="pinned", device="cuda").eval()
    vocabulary.update(ids, torch.zeros(len(ids), 1))
    asked = ids[torch.randint(len(ids), (count,))]
    on_device = asked.to("cuda")
    found = vocabulary.find_on_device(on_device)
    if found is None:
        raise RuntimeError("the device has no memory for the map")
    if not torch.equal(found.cpu(), module.vocabulary.rows(asked)):
        raise RuntimeError("the device finds other rows than the host")
    rates = {
        "device": count / _seconds(lambda: vocabulary.find_on_device(on_device), repeats),
        "host": count / _seconds(lambda: vocabulary.rows(asked), repeats),
    }
    return {"ids": len(ids), "ids_per_s": {way: round(rate) for way, rate in rates.items()}}


def _steps(count: int, repeats: int) -> dict[str, Any]:
    """Return the time of a training step with some new ids, which the host waits for or which the step admits."""
    import speedtransfer as st

    taken = {}
    for deferred in (False, True):
        vocabulary = st.Vocabulary(evict="lru", seed=0, deferred=deferred)
        module = st.Embedding(4 * count, DIM, vocabulary=vocabulary, memory="pinned", device="cuda", idle="lazy")
        optimizer = torch.optim.AdamW(module.parameters())
        batches = _batches(count, repeats)

        def step(module: Any = module, optimizer: Any = optimizer, batches: Iterator[Tensor] = batches) -> None:
            optimizer.zero_grad()
            module(next(batches)).square().sum().backward()
            optimizer.step()

        taken["deferred" if deferred else "at once"] = round(1e3 * _seconds(step, repeats), 3)
        if not vocabulary.stats().admitted:
            raise RuntimeError("no id was admitted")
    return {"new_share": NEW, "step_ms": taken}


def _batches(count: int, repeats: int) -> Iterator[Tensor]:
    """Return batches of ids on the device, a part of which never came before."""
    made = []
    for number in range(repeats + _WARM):
        ids = torch.randint(2 * count, (count,))
        new = max(1, int(NEW * count))
        ids[:new] = (1 << 40) + number * new + torch.arange(new)
        made.append(ids.to("cuda"))
    return iter(made)


def _grow(count: int, repeats: int) -> dict[str, Any]:
    """Return how fast a table in page-locked memory becomes twice as long, in GB/s of what it held."""
    import speedtransfer as st

    rates, num_rows = [], GROWN * count
    for _ in range(max(1, min(repeats, 3))):
        table = st.Table(num_rows, DIM, memory="pinned", device="cuda", max_rows=2 * num_rows)
        table.torch()[:, 0] = torch.arange(num_rows)
        num_bytes, start = table.nbytes, time.perf_counter()
        table.grow(2 * num_rows)
        rates.append(num_bytes / (time.perf_counter() - start) / 1e9)
        got = table.gather(torch.tensor([num_rows - 1, num_rows], device="cuda"))[:, 0].tolist()
        if got != [num_rows - 1, 0]:
            raise RuntimeError(f"the longer table has {got} where it should have {[num_rows - 1, 0]}")
    return {"rows": num_rows, "gb_per_s": round(statistics.median(rates), 3)}


_WARM = 2


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call by the clock, until the device has done it; the first calls warm up."""
    taken = []
    for _ in range(repeats + _WARM):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return max(statistics.median(taken[_WARM:]), 1e-9)
