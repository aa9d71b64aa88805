"""Trains a network that predicts the next word of a text, in float32, in 16 bits, or in both, and says how often it is right.

The network is that of Bengio et al., "A Neural Probabilistic Language Model" (JMLR 2003), with ReLU for tanh: the rows of the
words before, side by side, a hidden layer or two, and a softmax over the commonest words.
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
HELD_OUT = 0.1  # of the text, its end: nothing of it is trained on


class Windows(NamedTuple):
    """Windows of a text, ``(n, context + 1)`` int64 each; the last word of each is the one to be predicted.

    Of the `num_words` words those that occur more often have smaller numbers. Two of them are none: the end of a line, and a
    word that the part for training does not have.
    """

    num_words: int
    train: Tensor
    held_out: Tensor


@functools.lru_cache(maxsize=2)
def read_windows(context: int, classes: int) -> Windows:
    """Return the windows of the text, `context` words and one of the `classes` commonest after them."""
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


LR_BATCH = 128  # that a learning rate is for; at others it grows with the root of the batch
_EVALUATED_AT_ONCE = 2048


class Sizes(NamedTuple):
    """Sizes of the network and of its training."""

    context: int  # words before the one to be predicted
    classes: int  # words to choose from
    dim: int  # values of a row
    hidden: int  # units of a hidden layer
    layers: int  # hidden layers
    windows: int  # to train on
    epochs: int  # times that they are gone through
    held_out: int  # windows to be judged by
    lr: float  # of AdamW at batches of `LR_BATCH`


@dataclass(frozen=True)
class Form:
    """Which numbers have 16 bits."""

    name: str
    computed: torch.dtype  # what the layers compute in
    value_bytes: int = 4  # of a value in the table, and of AdamW's two for it
    autocast: bool = False  # parameters are float32, and torch.autocast computes; float16 with a GradScaler
    whole: bool = False  # the model is converted, parameters and optimizer state too
    options: dict[str, torch.dtype] = field(default_factory=dict)  # arguments of the embedding


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
    """Logits of the next word, ``(n, classes)``, from the numbers of those before it, ``(n, context)``."""

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
    """A network, its optimizer and its batches, made at the first step.

    `batch` is windows of a step; `seed` that of the first weights, which windows are trained on, and their order, the same for
    all forms; `table` makes the table, with the arguments of `torch.nn.Embedding`.
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
        """The network, and beside it optimizer, GradScaler and batches from the first on."""
        if self._model is None:
            self.restart()
        assert self._model is not None
        return self._model

    def restart(self) -> None:
        """Begin anew, as all forms do."""
        form = self.form
        self._model = None  # before there are two
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
        """Take a step and return its loss.

        Raises
        ------
        DeviceError
            torch does not compute in this form here.
        """
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
        """Begin anew and go through all epochs."""
        self.restart()
        for _ in range(self.steps):
            self.step()

    @torch.no_grad()
    def judge(self) -> tuple[float, float]:
        """Return the share of windows held out whose word is the most probable one, and the mean loss."""
        held_out = self.windows.held_out[: self.sizes.held_out]
        right = loss = 0.0
        for part in held_out.split(_EVALUATED_AT_ONCE):
            words = part.to(self.device)
            logits = self._logits(self.model, words[:, :-1])
            right += float((logits.argmax(1) == words[:, -1]).sum())
            loss += float(F.cross_entropy(logits, words[:, -1], reduction="sum"))
        return right / len(held_out), loss / len(held_out)
