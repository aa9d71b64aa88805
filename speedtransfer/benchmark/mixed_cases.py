"""Cases of suite `mixed`: training in one form, compared with the loss of FP32, and the peak memory of a few steps."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from speedtransfer.benchmark.measure import Case, synchronize
from speedtransfer.benchmark.mixed_training import BF16, FORMS, FP32, Form, Sizes, Training, read_windows
from speedtransfer.benchmark.peak import in_process, peak_bytes, reset_peak
from speedtransfer.errors import SpeedtransferError
from speedtransfer.units import format_seconds

ACCURACY, LOSS, WOULD_TAKE = "accuracy", "loss", "would_take_s"
MAX_LOSS_RATIO = 1.05  # of the final loss to that of FP32, for forms with float32 weights

# Limits beyond which a form is not trained through.
_MOST_STEP_S, _MOST_TRAINING_S, _MOST_TIMES = 1.0, 10.0, 3.0


class TooSlowError(SpeedtransferError):
    """A step takes too long to measure more of them."""


def cases_of(device: torch.device, sizes: Sizes, batch: int, seed: int) -> list[Case]:
    """Make a case for each form."""
    together = _Together(device, sizes, batch)
    return [Case.of(form.name, _Steps(form, together, seed), "ours") for form in FORMS]


class _Together:
    """Data shared by the forms of a group: windows, memory of each form, and the result of FP32."""

    def __init__(self, device: torch.device, sizes: Sizes, batch: int) -> None:
        self.device, self.sizes, self.batch = device, sizes, batch
        self.windows = read_windows(sizes.context, sizes.classes)
        self.plain_s, self.plain_loss = 0.0, math.inf

    @functools.cached_property
    def host_memory(self) -> dict[str, dict[str, int] | SpeedtransferError]:
        """Peaks by form, all measured before anything is timed."""
        return of_host(FORMS, self.batch, self.sizes)


class _Steps:
    """Training steps in a form."""

    def __init__(self, form: Form, together: _Together, seed: int) -> None:
        self.form, self._together = form, together
        self.training = Training(form, together.sizes, together.windows, together.batch, together.device, seed)
        self.memory: dict[str, int] = {}
        self.figures: dict[str, float] = {}
        self._step_s = 0.0

    def run(self) -> None:
        if not self._step_s:
            self._begin()
        self.training.step()

    def _begin(self) -> None:
        training = self.training
        if training.device.type == "cuda":
            self.memory.update(of_device(training))
        training.step()  # warm-up
        synchronize(training.device)
        start = time.perf_counter()
        training.step()
        synchronize(training.device)
        self._step_s = time.perf_counter() - start
        if self.form is not FP32 and self._step_s > _MOST_STEP_S:
            raise TooSlowError(f"a step takes {format_seconds(self._step_s)}, too long to take more")

    def check(self) -> None:
        """Check the size of the table; then train through all epochs, unless that takes too long, and check the loss."""
        training, table = self.training, self.training.model.words.table
        # Weights, AdamW's two planes of state, and the last step of each row.
        values = 3 * self.form.value_bytes * training.sizes.dim
        expected = (values + 4) * training.windows.num_words
        assert table.nbytes == expected, f"the table holds {table.nbytes:,} bytes, not {expected:,}"
        if training.device.type == "cuda":
            self.memory["host_bytes"] = table.nbytes
        elif isinstance(found := self._together.host_memory[self.form.name], dict):
            self.memory.update(found)
        expected_s = self._step_s * training.steps
        limit_s = max(_MOST_TRAINING_S, _MOST_TIMES * self._together.plain_s)
        if self.form is FP32 or expected_s <= limit_s:
            self._train()
        else:
            self.figures[WOULD_TAKE] = expected_s

    def _train(self) -> None:
        start = time.perf_counter()
        self.training.train()
        synchronize(self.training.device)
        seconds = time.perf_counter() - start
        accuracy, loss = self.training.evaluate()
        self.figures.update({ACCURACY: accuracy, LOSS: loss})
        if self.form is FP32:
            self._together.plain_s, self._together.plain_loss = seconds, loss
        chance = math.log(self.training.sizes.classes)
        assert loss < chance, f"ends with a loss of {loss:.4f}, and guessing has {chance:.4f}"
        if self.form is not BF16:
            plain = self._together.plain_loss
            assert loss <= MAX_LOSS_RATIO * plain, f"ends with a loss of {loss:.4f}, FP32 with {plain:.4f}"


# --- memory -----------------------------------------------------------------------------------------------------------


_STEPS = 3  # the second has all of the optimizer's state
_WARM_BATCH = 8


def of_host(forms: Sequence[Form], batch: int, sizes: Sizes) -> dict[str, dict[str, int] | SpeedtransferError]:
    """Measure ``{"host_bytes": ...}`` of each form in its own process, or return the error; one process for each core."""

    def measured(form: Form) -> dict[str, int] | SpeedtransferError:
        try:
            return in_process(_child, form, batch, sizes)
        except SpeedtransferError as error:
            return error

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip((form.name for form in forms), pool.map(measured, forms), strict=True))


def of_device(training: Training) -> dict[str, int]:
    """Measure ``{"device_bytes": ...}`` of the first steps of a training."""
    device = training.device
    _warm_up(training)
    base = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_STEPS):
        training.step()
    torch.cuda.synchronize(device)
    return {"device_bytes": torch.cuda.max_memory_allocated(device) - base}


def _warm_up(training: Training) -> None:
    """Load libraries, workspaces, thread pools and compiled code, which must not count."""
    small = training.sizes._replace(dim=8, hidden=8, windows=_WARM_BATCH)
    warm = Training(training.form, small, training.windows, _WARM_BATCH, training.device)
    for _ in range(2):
        warm.step()


def _child(form: Form, batch: int, sizes: Sizes) -> dict[str, int]:
    windows = read_windows(sizes.context, sizes.classes)
    training = Training(form, sizes, windows, batch, torch.device("cpu"))
    _warm_up(training)
    base = reset_peak()
    for _ in range(_STEPS):
        training.step()
    return {"host_bytes": max(0, peak_bytes() - base)}
