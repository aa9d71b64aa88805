"""What new facts cost of the old ones: all weights trained, low-rank changes, or rows of a memory layer alone.

    python examples/memory_layer.py --plot forgetting.png
    python examples/memory_layer.py --values 10000000

A small network with an `st.MemoryLayer` learns facts: a name of three syllables and a relation, and what they lead to. Then it
is taught new ones in several ways, the old ones never shown again, until it knows them; printed is how many of the old ones it
still knows. Sparse memory fine-tuning (arXiv:2510.15103) trains those rows of the memory alone that the new facts read and the
old ones seldom did. From a million values on they are in a file, and only the old facts are learned.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import speedtransfer as st

SYLLABLES, RELATIONS, ANSWERS, WIDTH = 50, 8, 200, 64
OLD, NEW, BATCH = 3_000, 200, 256
RANK, IN_FILE, MOST_STEPS, KNOWN = 8, 1_000_000, 1_000, 0.99
TRAINED = 1_000  # rows of the memory, by sparse fine-tuning
# What is trained, and the learning rate: of some that were tried the one that keeps most, or at which it is learned soon.
ROWS = "memory rows"
WAYS = {"all weights": 1e-4, "low-rank changes": 1e-3, "all memory rows": 1e-2, ROWS: 3e-2}


class Model(nn.Module):
    """Say what a name and a relation lead to: a network with a memory in it."""

    def __init__(self, num_values: int, **options: Any) -> None:
        super().__init__()
        self.tokens, self.first = nn.Embedding(SYLLABLES + RELATIONS, WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.memory = st.MemoryLayer(WIDTH, num_values, k=8, key_dim=32, query_norm="batch", **options)
        self.head = nn.Linear(WIDTH, ANSWERS)

    def forward(self, asked: Tensor) -> Tensor:
        """Return logits ``(batch, ANSWERS)`` for ``(batch, 4)`` tokens."""
        hidden = self.first(self.tokens(asked).flatten(1))
        hidden = hidden + self.network(self.norm1(hidden))
        hidden = hidden + self.memory(self.norm2(hidden))
        logits: Tensor = self.head(self.norm3(hidden))
        return logits


class LowRank(nn.Module):
    """Add the product of two narrow matrices to a weight, as LoRA does; it starts as zeros."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(rows, RANK)), nn.Parameter(torch.randn(RANK, columns) / RANK)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the sum."""
        return weight + self.up @ self.down


def facts() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return old and new facts: what is asked, ``(n, 4)``, and the answers, ``(n,)``. No name is twice among them."""
    draw = torch.Generator().manual_seed(0)
    names = torch.randperm(SYLLABLES**3, generator=draw)[: OLD + NEW]
    relations = torch.randint(RELATIONS, names.shape, generator=draw) + SYLLABLES
    asked = torch.stack([names // SYLLABLES**2, names // SYLLABLES % SYLLABLES, names % SYLLABLES, relations], 1)
    answers = torch.randint(ANSWERS, names.shape, generator=draw)
    return (asked[:OLD], answers[:OLD]), (asked[OLD:], answers[OLD:])


@torch.no_grad()
def known(model: nn.Module, asked: Tensor, answers: Tensor) -> float:
    """Return the share of facts that the model knows; a batch may be of any size in evaluation."""
    training = model.training
    right = [model.eval()(part).argmax(-1) for part in asked.split(BATCH)]
    model.train(training)
    return float((torch.cat(right) == answers).double().mean())


def learn(model: nn.Module, lr: float, asked: Tensor, answers: Tensor) -> Iterator[int]:
    """Train the parameters that require it with Adam; yield the number of every tenth step, to go on or to end there."""
    opt = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=lr)
    draw = torch.Generator().manual_seed(1)
    for step in range(1, MOST_STEPS + 1):
        batch = torch.randint(len(asked), (BATCH,), generator=draw)
        opt.zero_grad()
        F.cross_entropy(model(asked[batch]), answers[batch]).backward()
        opt.step()
        if step % 10 == 0:
            yield step


@torch.no_grad()
def use_of(model: Model, asked: Tensor) -> Any:
    """Count the rows of the memory that facts read."""
    with model.eval().memory.counting() as use:
        for part in asked.split(BATCH):
            model(part)
    return use


def freeze(model: Model, way: str, rows: Tensor) -> None:
    """Let only that be trained which a way trains."""
    model.requires_grad_(way == "all weights")
    if way == "low-rank changes":
        for part in [part for part in model.modules() if isinstance(part, nn.Linear)]:
            parametrize.register_parametrization(part, "weight", LowRank(*part.weight.shape))
    model.memory.values.requires_grad_(way != "low-rank changes")
    model.memory.train_rows(rows if way == ROWS else None)


def compare(model: Model, ways: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Teach the model the old facts, and then new ones in each of `ways`; return the shares known, new and old, on the way."""
    old, new = facts()
    for _ in learn(model, 2e-3, *old):
        if known(model, *old) >= 0.995:
            break
    before, background, use = known(model, *old), use_of(model, old[0]), use_of(model, new[0])
    rows = use.top_rows(background, TRAINED)
    print(f"the old facts: {before:.1%} known, {background}")
    print(f"the new facts, before they are learned: {use}; {len(rows):,} rows are the {ROWS}")
    found = {}
    for way in ways:
        tuned, curve = copy.deepcopy(model), [(known(model, *new), before)]
        freeze(tuned, way, rows)
        # In evaluation mode: statistics of batches are no weights.
        for step in learn(tuned.eval(), WAYS[way], *new):
            curve.append((known(tuned, *new), known(tuned, *old)))
            if curve[-1][0] >= KNOWN or step == MOST_STEPS:
                print(
                    f"{way:<16} {step:>4} steps: {curve[-1][0]:.1%} of the new facts, {curve[-1][1]:.1%} of the old ones"
                )
                break
        found[way] = curve
    return found


def draw_curves(path: Path, found: dict[str, list[tuple[float, float]]]) -> None:
    """Draw what is known of the old facts over what is known of the new ones as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.subplots()
    for way, curve in found.items():
        axes.plot([new for new, _ in curve], [old for _, old in curve], marker="o", ms=3, label=way)
    axes.set(xlabel="share of the new facts known", ylabel="share of the old facts known", ylim=(0, 1.03))
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=16_384, help="rows of the memory, rounded up to a square number")
    parser.add_argument(
        "--plot", type=Path, help="a PNG of what is known of the old facts over what is known of the new ones"
    )
    given = parser.parse_args(arguments)
    if given.plot is not None and (given.plot.suffix != ".png" or not given.plot.absolute().parent.is_dir()):
        parser.error(f"--plot is {given.plot} but must be a .png in a folder that exists")
    num_keys = math.isqrt(max(given.values, 1) - 1) + 1
    if num_keys < 8:
        parser.error(f"--values is {given.values} but each head reads 8 of sqrt(values) half-keys; pass 64 or more")
    torch.manual_seed(0)
    begin, in_file = time.perf_counter(), num_keys**2 >= IN_FILE
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.npy"
        # Zeros take no room on the disk until they are trained.
        options: dict[str, Any] = {"memory": "mmap", "path": path, "std": 0.0} if in_file else {}
        model = Model(num_keys**2, **options)
        found = compare(model, [] if in_file else [*WAYS])
        if in_file:
            table = model.memory.values.table
            size, used = path.stat().st_size, 512 * path.stat().st_blocks
            print(
                f"{table.num_rows:,} values in a file of {size / 1e9:.2f} GB, of which {used / 1e9:.2f} GB are on the disk"
            )
    print(f"{time.perf_counter() - begin:.0f} s")
    if given.plot is not None and found:
        draw_curves(given.plot, found)


if __name__ == "__main__":
    main()
