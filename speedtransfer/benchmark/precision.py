"""Suite `precision`: a recommender whose table is stored in several formats: time, bytes moved, memory and loss."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.contenders import DIM
from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.benchmark.memory import peak_of
from speedtransfer.benchmark.report import show_figure, show_held, show_time
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.errors import check_size, format_bytes
from speedtransfer.nn import Embedding

NOTE = (
    "AdamW. FP16 and BF16: how the table holds the weights, with the optimizer's state in bfloat16; int8: with a scale for "
    "each row, FP8: with one for up to 128 columns, 24 bits: a bfloat16 and 8 bits more, all with state in 8-bit blocks; the "
    "model is float32. AMP: a float32 "
    "table, and the model under torch.autocast (float16 with a GradScaler on a GPU, bfloat16 on a CPU). The loss is that of "
    "batches not seen before, the same for all, at the end of a fixed number of steps. Memory is the table with its state, "
    "and of a GPU what a step takes."
)
BY = ("batch", "examples of a batch")
COLUMNS = {
    "a step": show_time,
    "moved a step": lambda group, case: format_bytes(case.figures["moved_bytes"]),
    "memory": show_held,
    "loss reached": show_figure("loss", "{:.4f}"),
}
MAX_LOSS_RATIO = 1.05  # of the final loss to that of FP32

_FIELDS, _HIDDEN = 4, 64  # rows of an example, units of the hidden layer
_ROWS, _BATCHES, _STEPS = 500_000, (512, 2048, 8192), 100
_QUICK_ROWS, _QUICK_BATCHES, _QUICK_STEPS = 20_000, (128, 512), 40


@dataclass(frozen=True)
class Form:
    """How a table is stored and its model computed; `row_bytes` are those of weights and state, `options` of the embedding."""

    name: str
    row_bytes: int
    options: dict[str, Any]
    autocast: bool = False


FORMS = (
    Form("FP32", 12 * DIM, {}),
    Form("FP16", 6 * DIM, {"storage_dtype": torch.float16, "state_dtype": torch.bfloat16}),
    Form("BF16", 6 * DIM, {"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}),
    Form("AMP", 12 * DIM, {}, autocast=True),
    Form("int8", 3 * (DIM + 4), {"storage_dtype": torch.int8, "state_dtype": torch.uint8}),
    Form("FP8 E4M3", 3 * (DIM + 4), {"storage_dtype": torch.float8_e4m3fn, "state_dtype": torch.uint8}),
    Form("FP8 E5M2", 3 * (DIM + 4), {"storage_dtype": torch.float8_e5m2, "state_dtype": torch.uint8}),
    Form("24 bits", 3 * DIM + 2 * (DIM + 4), {"storage_dtype": "split24", "state_dtype": torch.uint8}),
)


def groups(device: torch.device, quick: bool, rows: int | None = None, seed: int = 0, **others: Any) -> list[Group]:
    """Make a group for each batch size."""
    rows = check_size(rows or (_QUICK_ROWS if quick else _ROWS), "rows", 1)
    steps = _QUICK_STEPS if quick else _STEPS
    return [
        Group(
            f"AdamW step, {batch:,} examples of {_FIELDS} rows of {rows:,} x {DIM}, loss after {steps} steps",
            functools.partial(_cases, device, rows, batch, steps, seed),
            {"batch": batch, "rows": rows, "dim": DIM, "steps": steps},
        )
        for batch in (_QUICK_BATCHES if quick else _BATCHES)
    ]


def _cases(device: torch.device, rows: int, batch: int, steps: int, seed: int) -> list[Case]:
    data, reached = _data(rows, batch, steps, seed, device), dict[str, float]()
    return [Case.of(form.name, _Training(form, rows, data, device, reached), "ours") for form in FORMS]


def _data(rows: int, batch: int, steps: int, seed: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return batches of ids (batch, fields) and labels (batch,), which depend on the sum of the scores of the rows."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, generator=generator)
    found = []
    for _ in range(steps):
        ids = zipf_ids(rows, batch * _FIELDS, generator).view(batch, _FIELDS)
        labels = torch.bernoulli(torch.sigmoid(scores[ids].sum(1)), generator=generator)
        found.append((ids.to(device), labels.to(device)))
    return found


class _Model(nn.Module):
    def __init__(self, rows: int, device: torch.device, options: dict[str, Any]) -> None:
        super().__init__()
        self.rows = Embedding(rows, DIM, device=device, idle="lazy", **options)
        self.mlp = nn.Sequential(nn.Linear(_FIELDS * DIM, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1)).to(device)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.rows(ids).flatten(1))
        return out[:, 0]


@dataclass
class _Training:
    """Training in one form. The model is made in the first step, so that running out of memory fails this case alone."""

    form: Form
    rows: int
    data: list[tuple[Tensor, Tensor]]
    device: torch.device
    reached: dict[str, float]  # the loss of each form
    memory: dict[str, int] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    model: Any = None

    def _build(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = _Model(self.rows, self.device, self.form.options)
        self._opt = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        cuda = self.device.type == "cuda"
        self._low = torch.float16 if cuda else torch.bfloat16
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.form.autocast and cuda)
        self._turn = cycle(self.data)

    def run(self) -> Tensor:
        """Take a step and return its loss."""
        if self.model is None:
            self._build()
        ids, labels = self._turn()
        with torch.autocast(self.device.type, self._low, enabled=self.form.autocast):
            out = self.model(ids)
        loss = F.binary_cross_entropy_with_logits(out.float(), labels)
        take_step(loss, self._opt, scaler=self._scaler)
        return loss.detach()

    def check(self) -> None:
        """Train on after the first step; compare bytes moved and held with the form, and the loss with that of FP32."""
        table = self.model.rows.table
        table.reset_stats()
        losses = [self.run()]
        stats, active = table.stats(), len(self.data[1 % len(self.data)][0].unique())
        moved = stats.gathered_bytes + stats.scattered_bytes
        assert moved == 2 * active * self.form.row_bytes, f"moves {moved:,} bytes for {active:,} rows"
        assert table.nbytes == self.rows * self.form.row_bytes, f"holds {table.nbytes:,} bytes"
        losses += [self.run() for _ in range(len(self.data) - 2)]
        loss = float(torch.stack(losses[-max(1, len(losses) // 10) :]).mean())
        self.figures.update(moved_bytes=moved, table_bytes=table.nbytes, loss=loss)
        cuda = self.device.type == "cuda"
        self.memory["device_bytes" if table.memory == "device" and cuda else "host_bytes"] = table.nbytes
        if cuda:
            _, peak = peak_of(self.run, self.device)
            self.memory["device_bytes"] = self.memory.get("device_bytes", 0) + peak["device_bytes"]
        self.reached[self.form.name] = loss
        plain = self.reached.get(FORMS[0].name, loss)
        assert math.isfinite(loss), f"ends with a loss of {loss}"
        assert loss <= MAX_LOSS_RATIO * plain, f"ends with a loss of {loss:.4f}, FP32 with {plain:.4f}"
