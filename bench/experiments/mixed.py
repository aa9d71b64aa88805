"""Mixed precision: time, memory and accuracy of a language model by batch size, with 16 bits in several places.

The network is that of Bengio et al., "A Neural Probabilistic Language Model" (JMLR 2003), with ReLU for tanh: rows of the
previous words side by side, hidden layers, and a softmax over the most frequent words. The same first weights and batches in
float32, in bfloat16, under torch.autocast, and with a table that stores its rows in bfloat16.
``python bench/record.py here --only mixed``.
"""

from __future__ import annotations

import collections
import functools
import gzip
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.memory import in_process, peak_of
from speedtransfer.benchmark.precision import MAX_LOSS_RATIO  # for forms with float32 weights
from speedtransfer.benchmark.report import show_figure, show_held, show_time
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.cuda import synchronize
from speedtransfer.errors import DeviceError, SpeedtransferError
from speedtransfer.nn import Embedding
from speedtransfer.system import cpu_features
from speedtransfer.units import format_seconds

NOTE = (
    "AdamW; the learning rate grows with the root of the batch size. All forms begin with the same weights and see the same "
    "batches. FP32: float32 without TF32, as torch has it by default; BF16, all of it: model.to(torch.bfloat16), parameters "
    "and optimizer state too; AMP: float32 parameters under torch.autocast; rows in BF16: the table stores rows and their "
    "state in bfloat16, and the model computes in float32. The accuracy is the share of words held out that are the most "
    "probable one, after all epochs. Memory is the peak beyond what there was before the model, on the CPU of a process of "
    "its own."
)
BY = ("batch", "windows of a batch")
ACCURACY, LOSS, WOULD_TAKE = "accuracy", "loss", "would_take_s"
COLUMNS = {
    "a step": show_time,
    "memory": show_held,
    "accuracy": show_figure(ACCURACY, "{:.1f}%", 100),
    "not trained through, for the seconds that it would take": show_figure(WOULD_TAKE, "{:.1f}"),
}
# Limits beyond which a form is not trained through.
_MOST_STEP_S, _MOST_TRAINING_S, _MOST_TIMES = 1.0, 10.0, 3.0
_EVALUATED_AT_ONCE, _LR_BATCH = 2048, 128  # a learning rate is that of this batch size
_BATCHES, _QUICK_BATCHES = (128, 256, 512, 1024, 2048), (128, 512)
# CPU features for 16-bit arithmetic; f16c only converts. Tensor cores have float16 since 7.0 and bfloat16 since 8.0.
_FEATURES = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "bf16", "svebf16"),
    "float16": ("amx_fp16", "avx512_fp16", "asimdhp"),
}
_LEAST_CAPABILITY = {"bfloat16": 8, "float16": 7}


class Sizes(NamedTuple):
    """Sizes of the network and of its training: words before the target, possible targets, windows to train on and judge."""

    context: int
    classes: int
    dim: int
    hidden: int
    layers: int
    windows: int
    epochs: int
    held_out: int
    lr: float


_CPU = Sizes(context=4, classes=2000, dim=64, hidden=256, layers=1, windows=61_440, epochs=2, held_out=20_000, lr=1e-3)
# Wide layers need a small learning rate.
_CUDA = Sizes(8, 2000, 256, 4096, 2, 102_400, 2, 20_000, 2.5e-4)
_QUICK = Sizes(2, 500, 16, 32, 1, 8_192, 1, 2_000, 1e-3)


@dataclass(frozen=True)
class Form:
    """Which numbers have 16 bits.

    Layers compute in `computed`, under torch.autocast with `autocast` (float16 with a GradScaler), or because the `whole`
    model is converted. `options` are those of the embedding.
    """

    name: str
    computed: torch.dtype
    autocast: bool = False
    whole: bool = False
    options: dict[str, torch.dtype] = field(default_factory=dict)


_ROWS = {"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
FP32, BF16, *_ = FORMS = (
    Form("FP32", torch.float32),
    Form("BF16, all of it", torch.bfloat16, whole=True),
    Form("AMP, bfloat16", torch.bfloat16, autocast=True),
    Form("AMP, float16 + GradScaler", torch.float16, autocast=True),
    Form("FP32, rows in BF16", torch.float32, options=_ROWS),
)


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    sizes = _QUICK if quick else _CUDA if device.type == "cuda" else _CPU
    hidden = " and ".join([str(sizes.hidden)] * sizes.layers)
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


def about(groups: list[GroupResult]) -> list[str]:
    known = groups[0].params["hardware"].items() if groups else ()
    return [f"the device lists {', '.join(names) or 'no instructions'} for {dtype}" for dtype, names in known]


def hardware(device: torch.device) -> dict[str, list[str]]:
    """Return the features of the device for 16-bit arithmetic, by dtype; empty if they are unknown."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return {dtype: [f"sm_{major}{minor}"] * (major >= least) for dtype, least in _LEAST_CAPABILITY.items()}
    features = cpu_features()
    found = {dtype: [name for name in names if name in features] for dtype, names in _FEATURES.items()}
    return found if features else {}


class Windows(NamedTuple):
    """Windows of a text, ``(n, context + 1)`` int64 each, whose last word is the target; words are numbered by frequency."""

    num_words: int
    train: Tensor
    held_out: Tensor


@functools.lru_cache(maxsize=2)
def read_windows(context: int, classes: int) -> Windows:
    """Return windows: `context` words and a target among the `classes` most frequent. A tenth, the last, is held out."""
    corpora = resources.files("speedtransfer.word2vec").joinpath("corpora")
    with corpora.joinpath("world_factbook.words.txt.gz").open("rb") as packed:
        lines = gzip.decompress(packed.read()).decode().splitlines()
    words = [word for line in lines for word in (*line.split(), "")]
    split = len(words) - len(words) // 10
    counts = collections.Counter(word for word in words[:split] if word)
    numbers = {word: number for number, (word, _) in enumerate([*counts.most_common(), ("", 0)])}
    tokens = torch.tensor([numbers.get(word, len(numbers)) for word in words], dtype=torch.int64)
    cut = [part.unfold(0, context + 1, 1) for part in (tokens[:split], tokens[split:])]
    return Windows(len(numbers) + 1, *(windows[windows[:, -1] < classes] for windows in cut))


class _NextWord(nn.Module):
    """Logits of the next word, ``(n, classes)``, from the previous words, ``(n, context)``."""

    def __init__(self, sizes: Sizes, num_words: int, device: torch.device, **options: Any) -> None:
        super().__init__()
        self.words: Any = Embedding(num_words, sizes.dim, device=device, **options)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise([sizes.context * sizes.dim, *[sizes.hidden] * sizes.layers]):
            layers += [nn.Linear(inputs, outputs, device=device), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(sizes.hidden, sizes.classes, device=device))

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.words(words).flatten(1))
        return out


class Training:
    """A network, its optimizer and its batches of `batch` windows, and what training it finds.

    `seed` determines weights and batches; `plain` gets the loss and the seconds of FP32, which comes first.
    """

    def __init__(
        self, form: Form, sizes: Sizes, batch: int, device: torch.device, seed: int, plain: dict[str, float]
    ) -> None:
        self.form, self.sizes, self.batch, self.device, self.seed, self.plain = form, sizes, batch, device, seed, plain
        self.memory, self.figures = dict[str, int](), dict[str, float]()
        self.windows = read_windows(sizes.context, sizes.classes)
        chosen = torch.randperm(len(self.windows.train), generator=torch.Generator().manual_seed(seed))[: sizes.windows]
        self._mine = self.windows.train[chosen].to(device)
        self.steps = sizes.epochs * (len(self._mine) // batch)
        self.model: Any = None

    def restart(self) -> None:
        form, self.model = self.form, None  # frees memory for the new one
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = _NextWord(self.sizes, self.windows.num_words, self.device, **form.options)
        self.model = model.to(form.computed) if form.whole else model
        lr = self.sizes.lr * math.sqrt(self.batch / _LR_BATCH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=form.computed == torch.float16)
        self._batches = self._all_batches()

    def _all_batches(self) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(self.seed + 1)
        while True:
            for places in torch.randperm(len(self._mine), generator=draw).to(self.device).split(self.batch):
                if len(places) == self.batch:
                    yield self._mine[places]

    def run(self) -> None:
        """Take a step; raises DeviceError if torch cannot compute in this form here."""
        if self.model is None:
            self._begin()
        windows = next(self._batches)
        loss = F.cross_entropy(self._logits(windows[:, :-1]), windows[:, -1])
        take_step(loss, self.optimizer, scaler=self.scaler)

    def _begin(self) -> None:
        self.memory.update(memory_of(self.form, self.sizes, self.batch, self.device))
        self.restart()
        self.take(1)  # warm-up
        self._step_s = self.take(1)
        if self.form is not FP32 and self._step_s > _MOST_STEP_S:
            raise SpeedtransferError(f"a step takes {format_seconds(self._step_s)}, too long to take more")

    def take(self, count: int) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(count):
            self.run()
        synchronize(self.device)
        return time.perf_counter() - start

    def _logits(self, words: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.form.computed, enabled=self.form.autocast):
            logits: Tensor = self.model(words)
        if logits.dtype != self.form.computed:
            raise DeviceError(
                f"this torch computes in {logits.dtype} on {self.device.type} where {self.form.computed} is asked for"
            )
        return logits.float()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        held_out = self.windows.held_out[: self.sizes.held_out]
        right = loss = 0.0
        for part in held_out.split(_EVALUATED_AT_ONCE):
            words = part.to(self.device)
            logits = self._logits(words[:, :-1])
            right += float((logits.argmax(1) == words[:, -1]).sum())
            loss += float(F.cross_entropy(logits, words[:, -1], reduction="sum"))
        return right / len(held_out), loss / len(held_out)

    def check(self) -> None:
        """Train through all epochs, unless that takes too long, and check the loss."""
        form, expected_s = self.form, self._step_s * self.steps
        if form is not FP32 and expected_s > max(_MOST_TRAINING_S, _MOST_TIMES * self.plain.get("seconds", 0.0)):
            self.figures[WOULD_TAKE] = expected_s
            return
        self.restart()
        seconds = self.take(self.steps)
        right, loss = self.evaluate()
        self.figures.update({ACCURACY: right, LOSS: loss})
        if form is FP32:
            self.plain.update(seconds=seconds, loss=loss)
        chance, plain = math.log(self.sizes.classes), self.plain.get("loss", math.inf)
        assert loss < chance, f"ends with a loss of {loss:.4f}, and guessing has {chance:.4f}"
        most = math.inf if form is BF16 else MAX_LOSS_RATIO * plain
        assert loss <= most, f"ends with a loss of {loss:.4f}, FP32 with {plain:.4f}"


def _cases(device: torch.device, sizes: Sizes, batch: int, seed: int) -> list[Case]:
    plain: dict[str, float] = {}
    return [Case.of(form.name, Training(form, sizes, batch, device, seed, plain), "ours") for form in FORMS]


def memory_of(*given: Any) -> dict[str, int]:
    """Measure the peak of the first steps: of the device, or of a process of its own, of the host."""
    return _peak(*given) if given[-1].type == "cuda" else in_process(_peak, *given)


def _peak(form: Form, sizes: Sizes, batch: int, device: torch.device) -> dict[str, int]:
    """Return the peak of three steps, as the second has all of the optimizer's state, after those of a small network."""

    def steps(sizes: Sizes, batch: int) -> Training:
        training = Training(form, sizes, batch, device, 0, {})
        training.restart()
        training.take(3)
        return training

    steps(sizes._replace(dim=8, hidden=8), 8)
    training, found = peak_of(lambda: steps(sizes, batch), device)
    if device.type != "cuda":
        return {"host_bytes": found["host_bytes"]}
    return {**found, "host_bytes": training.model.words.table.nbytes}
