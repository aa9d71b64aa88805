"""Suite `mixed`: the classic experiment on mixed precision: time, memory and accuracy by batch size, on words of a text.

The same network with the same first weights and batches, in float32, in bfloat16, under torch.autocast, and with a table
that stores its rows in bfloat16 and computes in float32.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import torch

from speedtransfer.benchmark import mixed_memory
from speedtransfer.benchmark.measure import Case, Group, synchronize
from speedtransfer.benchmark.mixed_text import read_windows
from speedtransfer.benchmark.mixed_training import BF16, FORMS, FP32, Form, Sizes, Training
from speedtransfer.benchmark.units import format_seconds
from speedtransfer.errors import SpeedtransferError
from speedtransfer.system import cpu_features

NOTE = (
    "AdamW; the learning rate grows with the root of the batch size. All forms begin with the same weights and see the same "
    "batches. FP32: float32 without TF32, as torch has it by default; BF16, all of it: model.to(torch.bfloat16), parameters "
    "and optimizer state too; AMP: float32 parameters under torch.autocast; rows in BF16: the table stores rows and their "
    "state in bfloat16, and the model computes in float32. The accuracy is the share of words held out that are the most "
    "probable one, after all epochs. Memory is the peak beyond what there was before the model, on the CPU of a process of "
    "its own."
)
ACCURACY, LOSS, WOULD_TAKE = "accuracy", "loss", "would_take_s"
FAR = 1.05  # times the loss of FP32 is the most that another form may end with, but for one without float32 weights

_CPU = Sizes(context=4, classes=2000, dim=64, hidden=256, layers=1, windows=61_440, epochs=2, held_out=20_000, lr=1e-3)
# Wide layers want small steps.
_CUDA = Sizes(
    context=8, classes=2000, dim=256, hidden=4096, layers=2, windows=102_400, epochs=2, held_out=20_000, lr=2.5e-4
)
_QUICK = Sizes(context=2, classes=500, dim=16, hidden=32, layers=1, windows=8_192, epochs=1, held_out=2_000, lr=1e-3)
_BATCHES, _QUICK_BATCHES = (128, 256, 512, 1024, 2048), (128, 512)
# A form that takes far longer than FP32 says so by few steps: the others are to have their turn.
_MOST_STEP_S, _MOST_TRAINING_S, _MOST_TIMES = 1.0, 10.0, 3.0
# What a processor is said to have for arithmetic in 16 bits; f16c, which only converts, is none of it.
_FEATURES = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16", "svebf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "asimdhp"),
}


class TooSlowError(SpeedtransferError):
    """A step takes so long that it is not worth the wait."""


def groups(device: torch.device, quick: bool, **options: Any) -> list[Group]:
    """Return what the suite compares.

    Parameters
    ----------
    device : torch.device
        On CUDA the network is a larger one.
    quick : bool
        A small network, few windows and two batch sizes.
    seed : int, optional
    """
    sizes = _QUICK if quick else _CUDA if device.type == "cuda" else _CPU
    seed, hidden = options.get("seed") or 0, " and ".join([str(sizes.hidden)] * sizes.layers)
    return [
        Group(
            f"next word of {sizes.context}, MLP of {hidden}, {batch:,} windows a step, accuracy after {sizes.epochs} "
            f"epoch{'s' * (sizes.epochs > 1)} of {sizes.windows:,}",
            functools.partial(_cases, device, sizes, batch, seed),
            {"batch": batch, **sizes._asdict(), "hardware": hardware(device)},
            effort={} if quick else {"turns": 4, "samples": 7, "budget_s": 4.0},
        )
        for batch in (_QUICK_BATCHES if quick else _BATCHES)
    ]


def hardware(device: torch.device) -> dict[str, list[str]]:
    """Return what the device lists for arithmetic in 16 bits, by the name of the dtype; nothing where it has no list."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        # Tensor cores: since 7.0 for float16, since 8.0 for bfloat16.
        least = {torch.bfloat16: 8, torch.float16: 7}
        found = {dtype: [f"sm_{major}{minor}"] if major >= at else [] for dtype, at in least.items()}
    else:
        features = cpu_features()
        if not features:
            return {}
        found = {dtype: [name for name in names if name in features] for dtype, names in _FEATURES.items()}
    return {str(dtype).removeprefix("torch."): names for dtype, names in found.items()}


def _cases(device: torch.device, sizes: Sizes, batch: int, seed: int) -> list[Case]:
    together = _Together(device, sizes, batch)
    ways = [_Way(form, together, seed) for form in FORMS]
    return [Case(w.form.name, w.run, w.check, role="ours", memory=w.memory, figures=w.figures) for w in ways]


class _Together:
    """What the forms of a group share: the windows, the memory of each, and what FP32 has reached."""

    def __init__(self, device: torch.device, sizes: Sizes, batch: int) -> None:
        self.device, self.sizes, self.batch = device, sizes, batch
        self.windows = read_windows(sizes.context, sizes.classes)
        self.plain_s, self.plain_loss = 0.0, math.inf

    @functools.cached_property
    def host_memory(self) -> dict[str, dict[str, int] | SpeedtransferError]:
        """Peaks by the name of the form; measured at once, before anything is timed."""
        return mixed_memory.of_host(FORMS, self.batch, self.sizes)


class _Way:
    """Steps in a form."""

    def __init__(self, form: Form, together: _Together, seed: int) -> None:
        self.form, self._together = form, together
        self.training = Training(form, together.sizes, together.windows, together.batch, together.device, seed)
        self.memory: dict[str, int] = {}
        self.figures: dict[str, float] = {}
        self._step_s = 0.0

    def run(self) -> None:
        """Take a step; the first time two more, to see how long one takes.

        Raises
        ------
        TooSlowError
            One takes very long.
        """
        if not self._step_s:
            self._begin()
        self.training.step()

    def _begin(self) -> None:
        training = self.training
        if training.device.type == "cuda":
            self.memory.update(mixed_memory.of_device(training))
        training.step()  # brings what no other step needs
        synchronize(training.device)
        start = time.perf_counter()
        training.step()
        synchronize(training.device)
        self._step_s = time.perf_counter() - start
        if self.form is not FP32 and self._step_s > _MOST_STEP_S:
            raise TooSlowError(f"a step takes {format_seconds(self._step_s)}, too long to take more")

    def check(self) -> None:
        """Hold the table to the form, then train through all epochs, where that takes no age, and hold the loss to FP32's."""
        training, table = self.training, self.training.model.words.table
        values = 3 * self.form.value_bytes * training.sizes.dim  # with AdamW's two
        expected = (values + 4) * training.windows.num_words  # and the step that a row was last touched by
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
        accuracy, loss = self.training.judge()
        self.figures.update({ACCURACY: accuracy, LOSS: loss})
        if self.form is FP32:
            self._together.plain_s, self._together.plain_loss = seconds, loss
        chance = math.log(self.training.sizes.classes)
        assert loss < chance, f"ends with a loss of {loss:.4f}, and guessing has {chance:.4f}"
        if self.form is not BF16:
            plain = self._together.plain_loss
            assert loss <= FAR * plain, f"ends with a loss of {loss:.4f}, FP32 with {plain:.4f}"
