"""The most memory that a few steps take, of the host in a process of its own.

``python -m speedtransfer.benchmark.mixed_memory FORM BATCH SIZES`` is that process. SIZES and the line that it
prints are JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from speedtransfer.benchmark.mixed_text import read_windows
from speedtransfer.benchmark.mixed_training import FORMS, Form, Sizes, Training
from speedtransfer.benchmark.peak import from_process, peak_bytes, reset_peak
from speedtransfer.errors import SpeedtransferError

_STEPS = 3  # the second has all of the optimizer's state
_WARM_BATCH = 8


def of_host(forms: Sequence[Form], batch: int, sizes: Sizes) -> dict[str, dict[str, int] | SpeedtransferError]:
    """Return ``{"host_bytes": ...}`` of each form by its name, or why there is none. As many at once as there are cores."""

    def measured(form: Form) -> dict[str, int] | SpeedtransferError:
        arguments = [form.name, str(batch), json.dumps(sizes._asdict())]
        try:
            return from_process("speedtransfer.benchmark.mixed_memory", arguments, "the process that trains it")
        except SpeedtransferError as error:
            return error

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip((form.name for form in forms), pool.map(measured, forms), strict=True))


def of_device(training: Training) -> dict[str, int]:
    """Return ``{"device_bytes": ...}`` of a training that has not begun; it has then taken some steps."""
    device = training.device
    _warm_up(training)
    base = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_STEPS):
        training.step()
    torch.cuda.synchronize(device)
    return {"device_bytes": torch.cuda.max_memory_allocated(device) - base}


def _warm_up(training: Training) -> None:
    """Bring libraries and their workspaces, thread pools and compiled copies, which no form is to be charged with."""
    small = training.sizes._replace(dim=8, hidden=8, windows=_WARM_BATCH)
    warm = Training(training.form, small, training.windows, _WARM_BATCH, training.device)
    for _ in range(2):
        warm.step()


def _child(form_name: str, batch: int, sizes: Sizes) -> dict[str, int]:
    form = next(form for form in FORMS if form.name == form_name)
    windows = read_windows(sizes.context, sizes.classes)
    training = Training(form, sizes, windows, batch, torch.device("cpu"))
    _warm_up(training)
    base = reset_peak()
    for _ in range(_STEPS):
        training.step()
    return {"host_bytes": max(0, peak_bytes() - base)}


if __name__ == "__main__":
    try:
        print(json.dumps(_child(sys.argv[1], int(sys.argv[2]), Sizes(**json.loads(sys.argv[3])))))
    except (SpeedtransferError, MemoryError) as error:
        sys.exit(str(error))
