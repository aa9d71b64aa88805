"""SpeedTorch's example, word2vec's skip-gram with negatives, in four ways on the same batches."""

from __future__ import annotations

import gzip
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedtransfer as st
import speedtransfer.speedtorch as SpeedTorch
from speedtransfer.word2vec.demo import CORPUS
from speedtransfer.word2vec.vocabulary import Vocabulary

SPEEDTORCH, OURS, DENSE, SPARSE = WAYS = ("SpeedTorch's names", "drop-in", "dense", "SparseAdam")
_WINDOW, _BEST = 5, 0.75  # of the noise, as in word2vec


@dataclass(frozen=True)
class Settings:
    """What is trained and how.

    Attributes
    ----------
    sizes : tuple of int
        Rows of the made-up vocabularies, beside the corpus's own.
    dim, batch, negatives, seed : int
    rounds, steps : int
        The ways take turns: so many rounds of so many steps each.
    lr : float
    """

    sizes: tuple[int, ...] = (1_000_000,)
    dim: int = 64
    batch: int = 1024
    negatives: int = 5
    rounds: int = 7
    steps: int = 10
    lr: float = 0.05
    seed: int = 0


QUICK = Settings(sizes=(20_000,), dim=16, batch=128, rounds=3, steps=3)


class Words(NamedTuple):
    """Where pairs are drawn from: a text as numbers of words, or made up by Zipf's law where there is none."""

    name: str
    rows: int
    text: np.ndarray | None
    noise: np.ndarray


def corpus() -> Words:
    """Return the shipped corpus."""
    with resources.files("speedtransfer.word2vec").joinpath("corpora", CORPUS).open("rb") as packed:
        text = gzip.decompress(packed.read()).decode().split()
    vocabulary = Vocabulary.from_counts(Counter(text))
    numbers = vocabulary.encode(text)
    return Words("corpus", len(vocabulary), numbers[numbers >= 0], np.cumsum(vocabulary.noise(_BEST)))


def zipf(rows: int) -> Words:
    """Return a vocabulary of `rows` words whose frequencies follow Zipf's law."""
    weight = (1.0 / np.arange(1, rows + 1)) ** _BEST
    return Words("Zipf", rows, None, np.cumsum(weight / weight.sum()))


def batches(words: Words, settings: Settings) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield centres ``(batch, 1)``, contexts ``(batch, 1)`` and negatives ``(batch, negatives)``."""
    draw = np.random.default_rng(settings.seed)
    common = np.cumsum(1.0 / np.arange(1, words.rows + 1))

    def noise(*shape: int) -> np.ndarray:
        return np.minimum(np.searchsorted(words.noise, draw.random(shape)), words.rows - 1)

    while True:
        if words.text is None:
            centre, context = np.searchsorted(common, draw.random((2, settings.batch)) * common[-1])
        else:
            place = draw.integers(_WINDOW, len(words.text) - _WINDOW, settings.batch)
            away = draw.integers(1, _WINDOW + 1, settings.batch) * draw.choice([-1, 1], settings.batch)
            centre, context = words.text[place], words.text[place + away]
        yield centre[:, None], context[:, None], noise(settings.batch, settings.negatives)


class Loop:
    """One way: two tables, an optimizer, and a step."""

    def __init__(self, way: str, words: Words, settings: Settings, start: Tensor, device: torch.device) -> None:
        self.way, self.device, self.settings = way, device, settings
        self.losses: list[float] = []
        self.peak_bytes = 0
        rows = settings.batch if way == SPEEDTORCH else words.rows
        self.model = nn.ModuleDict({"u": self._table(rows), "v": self._table(rows)})
        if way != OURS:
            self.model = self.model.to(device)
        if way == SPARSE:
            self.optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(list(self.model.parameters()), settings.lr)
        else:
            self.optimizer = torch.optim.Adamax(self.model.parameters(), settings.lr)
        self.switchers: list[tuple[Any, Any]] = []
        if way == SPEEDTORCH:
            self._make_switchers(words.rows)
        self._start(start)

    def _table(self, rows: int) -> nn.Module:
        dim = self.settings.dim
        if self.way == OURS:
            return st.Embedding(rows, dim, device=self.device, idle="lazy")
        return nn.Embedding(rows, dim, sparse=self.way == SPARSE)

    def _make_switchers(self, rows: int) -> None:
        dim, pinned = self.settings.dim, self.device.type == "cuda"
        for name, variable in self.model.items():
            weights = SpeedTorch.ModelFactory(variable, rows, dim, CPUPinn=pinned)
            weights.zerosInit()
            state = SpeedTorch.OptimizerFactory(self.optimizer, rows, dim, self.model, name, CPUPinn=pinned)
            state.optInit()
            self.switchers.append((weights, state))
        batch, negatives = self.settings.batch, self.settings.negatives
        centre = weights.variableTransformer(batch, 1)
        self.dummies = [torch.from_numpy(x) for x in (centre, *weights.variableTransformer(batch, 1, negatives))]

    @torch.no_grad()
    def _start(self, start: Tensor) -> None:
        """Begin with the weights `start` for the centres and zeros for the others, as word2vec does."""
        if self.way == SPEEDTORCH:
            self.switchers[0][0].getTorchVar().copy_(start)
        elif self.way == OURS:
            self.model["u"].table.torch().copy_(start)
            self.model["v"].table.zero_()
        else:
            self.model["u"].weight.copy_(start)
            self.model["v"].weight.zero_()

    def step(self, batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> float:
        """Train on a batch; return the seconds that it took."""
        self._wait()
        begin = time.perf_counter()
        centre, context, negative = batch
        named = (((centre,), self.switchers[0]), ((context, negative), self.switchers[1])) if self.switchers else ()
        for indexes, switchers in named:
            for switcher in switchers:
                switcher.beforeForwardPass(*indexes)
        inputs = self.dummies if named else [torch.from_numpy(x) for x in batch]
        pos_u, pos_v, neg_v = (x.to(self.device) for x in inputs)
        u, v, others = self.model["u"](pos_u), self.model["v"](pos_v), self.model["v"](neg_v)
        loss = -(F.logsigmoid((u * v).sum(-1)).sum() + F.logsigmoid(-(others @ u.mT)).sum()) / len(pos_u)
        loss.backward()
        self._measured_apart(begin)
        begin = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for indexes, switchers in named:
            for switcher in switchers:
                switcher.afterOptimizerStep(*indexes)
        self._wait()
        self.losses.append(float(loss.detach()))
        return self._before + time.perf_counter() - begin

    def _measured_apart(self, begin: float) -> None:
        """Stop the clock and count the bytes held between backward and step, their peak."""
        self._wait()
        self._before = time.perf_counter() - begin
        self.peak_bytes = max(self.peak_bytes, self._bytes())

    def _bytes(self) -> int:
        """Return the bytes of tables, variables, gradients and state."""
        tensors = [t for p in self.model.parameters() for t in (p.detach(), p.grad) if t is not None]
        tables = [module.table for module in self.model.values() if self.way == OURS]
        if self.way != OURS:  # what its optimizer holds are views of the table
            tensors += [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        shown = [t for weights, state in self.switchers for t in (weights.getTorchVar(), *_planes(state))]
        return sum(map(_size, [*tensors, *shown])) + sum(table.nbytes for table in tables)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _planes(state: Any) -> list[Tensor]:
    rows = state._rows  # not getTorchVar, which marks the state as changed
    return [rows.whole(name) for name in rows.columns]


def _size(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return _size(tensor._values()) + _size(tensor._indices())
    return tensor.numel() * tensor.element_size()


def train(
    settings: Settings, device: torch.device, report: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Train in every way, in turn, for every vocabulary; return times, bytes and losses as plain data."""
    found = []
    for words in [corpus(), *map(zipf, settings.sizes)]:
        torch.manual_seed(settings.seed)
        start = torch.empty(words.rows, settings.dim).uniform_(-0.5, 0.5)
        loops = {way: Loop(way, words, settings, start, device) for way in WAYS}
        stream, times = batches(words, settings), {way: [] for way in WAYS}
        warm = next(stream)
        for loop in loops.values():
            loop.step(warm)  # makes the state and fills caches
        for _ in range(settings.rounds):
            turn = [next(stream) for _ in range(settings.steps)]
            for way, loop in loops.items():
                times[way].append([loop.step(batch) for batch in turn])
        found.append({"words": words.name, "rows": words.rows, "ways": _summary(loops, times)})
        if report is not None:
            report(found[-1])
    return found


def _summary(loops: dict[str, Loop], times: dict[str, list[list[float]]]) -> dict[str, dict[str, Any]]:
    some = max(1, len(loops[DENSE].losses) // 10)
    return {
        way: {
            "step_s": statistics.median(second for turn in times[way] for second in turn),
            "rounds_s": [round(statistics.median(turn), 7) for turn in times[way]],
            "bytes": loop.peak_bytes,
            "losses": [round(statistics.mean(part), 5) for part in (loop.losses[:some], loop.losses[-some:])],
        }
        for way, loop in loops.items()
    }


def as_data(settings: Settings) -> dict[str, Any]:
    """Return the settings as plain data."""
    return {**asdict(settings), "sizes": list(settings.sizes)}
