"""Trains one contender: ``python training.py JOB.json``. Each line that it prints is JSON; run.py reads them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package, also where it is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import speedtransfer as st
from ngram_lm.contenders import CONTENDERS, make_model, make_optimizers, table_bytes
from ngram_lm.data import Corpus, batches, read_corpus, windows_of
from ngram_lm.model import GPT
from ngram_lm.settings import Settings

WARM_STEPS = 5  # that are not timed: kernels are compiled, and pages of tables are touched for the first time
_VALIDATIONS, _VALIDATION_BATCHES = 6, 8
_LEAST_LR = 0.1


def train(
    name: str, settings: Settings, corpus: Corpus, say: Callable[[dict[str, Any]], None]
) -> tuple[GPT, dict[str, Any]]:
    """Train a contender; return the model and what there is to tell of it."""
    contender = CONTENDERS[name]
    model = make_model(contender, settings, corpus.vocabulary)
    optimizers = make_optimizers(contender, model, settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: _rate(step, settings.steps)) for one in optimizers]
    held_out = windows_of(corpus.validation, settings.context)[: _VALIDATION_BATCHES * settings.batch]
    endless = batches(windows_of(corpus.train, settings.context), settings.batch, settings.seed)
    stream: Iterable[Tensor] = itertools.islice(endless, settings.steps)
    if contender.prefetch:
        # The rows of the next batches move while one is computed. What a step changes of them is read again: the numbers
        # stay the same.
        stream = st.prefetch(stream, lambda windows: {model.ngrams: windows[:, :-1]})
    seconds: list[float] = []
    every = max(1, settings.steps // _VALIDATIONS)
    start = time.perf_counter()
    for step, batch in enumerate(stream, start=1):
        loss = model.loss(batch)
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        for one in schedules:
            one.step()
        seconds.append(time.perf_counter() - start)
        found = {"step": step, "loss": loss.item()}
        if step % every == 0 or step == settings.steps:
            found["validation"] = validate(model, held_out, settings.batch)
        say(found)
        start = time.perf_counter()
    timed = seconds[WARM_STEPS:] or seconds
    return model, {
        "step_s": statistics.median(timed),
        "step_quartiles_s": statistics.quantiles(timed, n=4)[::2] if len(timed) > 1 else timed * 2,
        "table_bytes": table_bytes(model, optimizers),
    }


def _rate(step: int, steps: int) -> float:
    """Return the factor of the learning rates: up within the first steps, and down along a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return _LEAST_LR + (1 - _LEAST_LR) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@torch.no_grad()
def validate(model: GPT, windows: Tensor, size: int) -> float:
    """Return the mean loss of windows that were not trained on."""
    losses = [float(model.loss(batch)) * len(batch) for batch in windows.split(size)]
    return sum(losses) / len(windows)


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    try:
        # Not `ru_maxrss`, which a process inherits from the one that has started it.
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(path: str) -> int:
    """Do the job in a file."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    settings = Settings(**{**job["settings"], "orders": tuple(job["settings"]["orders"])})
    torch.set_default_dtype(getattr(torch, settings.dtype))

    def say(found: dict[str, Any]) -> None:
        print(json.dumps(found), flush=True)

    corpus = read_corpus(job["data"] and Path(job["data"]), settings.vocabulary)
    model, found = train(job["contender"], settings, corpus, say)
    peak = peak_bytes()
    if model.ngrams is not None:
        # Rows that are idle catch up now.
        table = model.ngrams.embedding.state_dict()["weight"].numpy()
        found["table_sha256"] = hashlib.sha256(table.tobytes()).hexdigest()
        if job["table"]:
            table.tofile(job["table"])
    say({"result": {**found, "peak_bytes": peak}})
    return 0


if __name__ == "__main__":
    # Ctrl-C reaches the whole group of processes; run.py keeps what has been printed.
    try:
        sys.exit(main(sys.argv[1]))
    except KeyboardInterrupt:
        os._exit(130)
