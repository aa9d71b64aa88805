"""Serve a model while another process trains it: the server follows by files of the rows that have changed.

    python examples/follow.py --rows 200000 --deltas 20

One process trains a table and writes a delta to a folder now and then; the other looks rows up all the time and applies each
delta when it is there. Printed is how long after the last step a delta was served; ``--plot FILE`` draws it, and the time of
each step (matplotlib: ``pip install "speedtransfer[plot]"``).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import speedtransfer as st

DIM, BATCH = 64, 1024


def make(rows: int) -> torch.nn.Module:
    """Return the model, with the same first weights in every process."""
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"emb": st.Embedding(rows, DIM, idle="lazy"), "head": torch.nn.Linear(DIM, 1)})


def train(rows: int, deltas: int, steps: int, folder: Path) -> tuple[torch.nn.Module, list[float]]:
    """Train, and write a delta every `steps` steps; return the seconds of each step too."""
    model, seconds = make(rows), list[float]()
    optimizer = torch.optim.AdamW(model.parameters())
    mark = st.mark(model)
    for number in range(deltas):
        for _ in range(steps):
            ids, begin = (rows * torch.rand(BATCH) ** 3).long(), time.perf_counter()
            optimizer.zero_grad()
            model["head"](model["emb"](ids)).square().mean().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
        # When the last step was made.
        (folder / f"{number:06}.txt").write_text(repr(time.time()))
        mark = st.save_delta(folder / f"{number:06}.safetensors", model, mark, progress=False)
    return model, seconds


def serve(rows: int, deltas: int, folder: Path, results: Any) -> None:
    """Look rows up, and follow until all deltas have come."""
    torch.set_num_threads(1)
    model, mark, lags, lookups = make(rows).eval(), None, list[float](), 0
    for number in range(deltas):
        path = folder / f"{number:06}.safetensors"
        while not path.exists():
            with torch.inference_mode():
                model["head"](model["emb"](torch.randint(0, rows, (BATCH,))))
            lookups += 1
        mark = st.apply_delta(path, model, mark, progress=False)
        lags.append(time.time() - float((folder / f"{number:06}.txt").read_text()))
    results.put((lags, lookups, st.mark(model).fingerprints))


def draw(path: Path, lags: list[float], seconds: list[float]) -> None:
    """Draw the lag of each delta and the time of each step as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    above, below = figure.subplots(2)
    for axes, values, what, how in ((above, lags, "delta", "ms until it was served"), (below, seconds, "step", "ms")):
        axes.plot([1e3 * value for value in values])
        axes.set(xlabel=what, ylabel=how, ylim=(0, None))
    figure.savefig(path)


def main() -> None:
    """Run both and print how far the server was behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--deltas", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="between two deltas")
    parser.add_argument("--plot", type=Path, help="a PNG of the lag of each delta and the time of each step")
    given = parser.parse_args()
    if given.plot is not None and (given.plot.suffix != ".png" or not given.plot.absolute().parent.is_dir()):
        parser.error(f"--plot is {given.plot} but must be a .png in a folder that exists")
    if given.rows < 1 or given.deltas < 2 or given.steps < 1:
        parser.error(
            "--rows and --steps begin at 1, and --deltas at 2: the first is compiled for, the others are timed"
        )
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = context.Process(target=serve, args=(given.rows, given.deltas, folder, results))
        server.start()
        model, seconds = train(given.rows, given.deltas, given.steps, folder)
        lags, lookups, fingerprints = results.get()
        server.join()
        size = statistics.mean(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert fingerprints == st.mark(model).fingerprints, "the server holds other rows than the trainer"
    print(f"{given.deltas} deltas of {size / 1e6:.2f} MB of a table of {4e-6 * given.rows * DIM:.1f} MB")
    print(f"{lookups} batches looked up meanwhile")
    # The first waits until the server has started.
    print(f"served {statistics.median(lags[1:]) * 1e3:.0f} ms after the step, {max(lags[1:]) * 1e3:.0f} ms at most")
    if given.plot is not None:
        draw(given.plot, lags[1:], seconds)


if __name__ == "__main__":
    main()
