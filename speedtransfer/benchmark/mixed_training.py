"""Trains a next-word predictor in float32, 16 bits or mixed precision, and evaluates its accuracy.

The network is that of Bengio et al., "A Neural Probabilistic Language Model" (JMLR 2003), with ReLU for tanh: concatenated
rows of the previous words, one or two hidden layers, and a softmax over the most frequent words.
"""

from __future__ import annotations

import collections
import functools
import gzip
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.errors import DeviceError
from speedtransfer.nn import Embedding

TEXT = "world_factbook.words.txt.gz"
HELD_OUT = 0.1  # share of the text, at its end, that is not trained on
LR_BATCH = 128  # batch size of a given learning rate, which grows with the root of the batch
_EVALUATED_AT_ONCE = 2048


class Windows(NamedTuple):
    """Windows of a text, ``(n, context + 1)`` int64 each, whose last word is the target.

    Words are numbered by decreasing frequency; the last two numbers are the end of a line and an unknown word.
    """

    num_words: int
    train: Tensor
    held_out: Tensor


@functools.lru_cache(maxsize=2)
def read_windows(context: int, classes: int) -> Windows:
    """Return the windows of the text: `context` words and a target among the `classes` most frequent words."""
    with resources.files("speedtransfer.word2vec").joinpath("corpora", TEXT).open("rb") as packed:
        lines = gzip.decompress(packed.read()).decode().splitlines()
    words = [word for line in lines for word in (*line.split(), "")]
    split = len(words) - int(HELD_OUT * len(words))
    counts = collections.Counter(words[:split])
    counts.pop("")
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common())}
    numbers[""] = len(numbers)
    unknown = len(numbers)
    tokens = torch.tensor([numbers.get(word, unknown) for word in words], dtype=torch.int64)
    train, held_out = (_cut(part, context, classes) for part in (tokens[:split], tokens[split:]))
    return Windows(unknown + 1, train, held_out)


def _cut(tokens: Tensor, context: int, classes: int) -> Tensor:
    windows = tokens.unfold(0, context + 1, 1)
    return windows[windows[:, -1] < classes]


class Sizes(NamedTuple):
    """Sizes of the network and of its training."""

    context: int  # words before the target
    classes: int  # possible targets
    dim: int
    hidden: int
    layers: int
    windows: int  # to train on
    epochs: int
    held_out: int  # windows for evaluation
    lr: float  # at batches of `LR_BATCH`


@dataclass(frozen=True)
class Form:
    """Which numbers have 16 bits.

    Layers compute in `computed`, under torch.autocast with `autocast` (float16 with a GradScaler), or because the `whole`
    model is converted. Values and state in the table have `value_bytes`; `options` are those of the embedding.
    """

    name: str
    computed: torch.dtype
    value_bytes: int = 4
    autocast: bool = False
    whole: bool = False
    options: dict[str, torch.dtype] = field(default_factory=dict)


FP32, BF16, AMP_BF16, AMP_FP16, BF16_ROWS = FORMS = (
    Form("FP32", torch.float32),
    Form("BF16, all of it", torch.bfloat16, value_bytes=2, whole=True),
    Form("AMP, bfloat16", torch.bfloat16, autocast=True),
    Form("AMP, float16 + GradScaler", torch.float16, autocast=True),
    Form(
        "FP32, rows in BF16",
        torch.float32,
        value_bytes=2,
        options={"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    ),
)


class NextWord(nn.Module):
    """Logits of the next word, ``(n, classes)``, from the previous words, ``(n, context)``."""

    def __init__(self, sizes: Sizes, num_words: int, device: torch.device, table: type = Embedding, **options: Any):
        super().__init__()
        self.words = table(num_words, sizes.dim, device=device, **options)
        widths = [sizes.context * sizes.dim, *[sizes.hidden] * sizes.layers]
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs, device=device), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(widths[-1], sizes.classes, device=device))

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits."""
        out: Tensor = self.mlp(self.words(words).flatten(1))
        return out


class Training:
    """A network, its optimizer and its batches of `batch` windows, made in the first step.

    `seed` determines the initial weights and the windows and their order; `table` is called like `torch.nn.Embedding`.
    """

    def __init__(
        self,
        form: Form,
        sizes: Sizes,
        windows: Windows,
        batch: int,
        device: torch.device,
        seed: int = 0,
        table: type = Embedding,
    ) -> None:
        self.form, self.sizes, self.windows, self.batch, self.device = form, sizes, windows, batch, device
        self._seed, self._table = seed, table
        chosen = torch.randperm(len(windows.train), generator=torch.Generator().manual_seed(seed))[: sizes.windows]
        self._mine = windows.train[chosen].to(device)
        self._model: NextWord | None = None

    @property
    def steps(self) -> int:
        """Steps of all epochs."""
        return self.sizes.epochs * (len(self._mine) // self.batch)

    @property
    def model(self) -> NextWord:
        """The network, made with optimizer, GradScaler and batches when it is first used."""
        if self._model is None:
            self.restart()
        assert self._model is not None
        return self._model

    def restart(self) -> None:
        """Make a new network with the initial weights."""
        form = self.form
        self._model = None  # frees memory for the new one
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            model = NextWord(self.sizes, self.windows.num_words, self.device, self._table, **form.options)
        if form.whole:
            model = model.to(form.computed)
        lr = self.sizes.lr * math.sqrt(self.batch / LR_BATCH)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=form.computed == torch.float16)
        self._batches = self._all_batches()
        self._model = model

    def _all_batches(self) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(self._seed + 1)
        while True:
            for places in torch.randperm(len(self._mine), generator=draw).to(self.device).split(self.batch):
                if len(places) == self.batch:
                    yield self._mine[places]

    def step(self) -> Tensor:
        """Take a step and return its loss; raises DeviceError if torch cannot compute in this form here."""
        model = self.model
        windows = next(self._batches)
        loss = F.cross_entropy(self._logits(model, windows[:, :-1]), windows[:, -1])
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def _logits(self, model: NextWord, words: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.form.computed, enabled=self.form.autocast):
            logits = model(words)
        if logits.dtype != self.form.computed:
            wanted, got = (str(dtype).removeprefix("torch.") for dtype in (self.form.computed, logits.dtype))
            raise DeviceError(f"this torch computes in {got} on {self.device.type} where {wanted} is asked for")
        return logits.float()

    def train(self) -> None:
        """Train a new network for all epochs."""
        self.restart()
        for _ in range(self.steps):
            self.step()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return accuracy and mean loss on held out windows."""
        held_out = self.windows.held_out[: self.sizes.held_out]
        right = loss = 0.0
        for part in held_out.split(_EVALUATED_AT_ONCE):
            words = part.to(self.device)
            logits = self._logits(self.model, words[:, :-1])
            right += float((logits.argmax(1) == words[:, -1]).sum())
            loss += float(F.cross_entropy(logits, words[:, -1], reduction="sum"))
        return right / len(held_out), loss / len(held_out)
