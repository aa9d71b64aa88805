"""A small GPT with n-gram tables trains as one with ``nn.Embedding`` does: in float64, to the bit wherever no row is idle.

Idle rows that AdamW moves catch up by a sum of the steps that they missed, where dense training rounds after each step: losses
differ by two units in the last place, and a weight by 5e-13 of the largest (both are asserted).
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lazy_oracle import (
    one_thread,  # noqa: F401 - a fixture
    tensors_in,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import speedtransfer as st

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from ngram_lm import GPT

VOCAB, WIDTH, TIME = 60, 16, 12
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
# Rows of a head. 16 heads have the next 16 primes: 438 rows in all, which a large batch touches every one of, and 7,150.
FEW, MANY = 3, 400
ALL_TOUCHED, SOME_IDLE = 96, 4  # windows of a batch


class CheckpointedGPT(GPT):
    """Computes the tables and the blocks once more in backward."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        def rest(hidden: torch.Tensor) -> torch.Tensor:
            hidden = self.blocks[0](hidden)
            return self.blocks[1](hidden + self.ngrams(tokens))

        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(checkpoint(rest, hidden, use_reentrant=self.reentrant)))


class Reentrant(CheckpointedGPT):
    reentrant = True


def make_model(rows: int = MANY, kind: type[GPT] = GPT, **options) -> GPT:
    """A model whose numbers depend on `rows` alone; ours with `options`, without any that of ``nn.Embedding``."""
    torch.manual_seed(0)
    model = kind(VOCAB, WIDTH, 2, 2, TIME)
    hashes = st.NgramHash((2, 3), 8, rows, vocab_size=VOCAB, eos=1)
    model.ngrams = st.NgramEmbedding(hashes, 4, WIDTH, std=0.1, device="cpu", **(options or {"idle": "lazy"}))
    model.double()
    if not options:
        weight = model.ngrams.embedding.weight.detach().clone()
        model.ngrams.embedding = nn.Embedding.from_pretrained(weight, freeze=False)
    assert hashes.num_columns == 16
    return model


def batches_of(windows: int, steps: int = 12, seed: int = 1) -> list[torch.Tensor]:
    """Tokens, the first ones more often than others."""
    draw = torch.Generator().manual_seed(seed)
    power = 1 if windows == ALL_TOUCHED else 2
    return list((torch.rand(steps, windows, TIME + 1, generator=draw) ** power * VOCAB).long())


def train(model, optimizer, batches, forward=None, parts=1, before_step=None) -> list[float]:
    """Train on batches, each in `parts` with one step for all of them, and return the losses."""
    opt = model.opt = optimizer(model.parameters())
    losses = []
    for batch in batches:
        opt.zero_grad()
        for part in batch.chunk(parts) if parts > 1 else [batch]:
            loss = (forward or model.loss)(part) / parts
            loss.backward()
            losses.append(loss.item())
        if before_step is not None:
            before_step(model)
        opt.step()
    return losses


def weights(model) -> dict[str, torch.Tensor]:
    """All values, and of the table the state; what `state_dict` shows has caught up."""
    found = {name: value.clone() for name, value in model.state_dict().items() if "extra_state" not in name}
    state = model.opt.state_dict()
    number = next(n for n, p in enumerate(model.parameters()) if p is model.ngrams.embedding.weight)
    return {**found, **{f"state {name}": value for name, value in tensors_in(state["state"].get(number, {})).items()}}


def idle_rows(model, batches) -> int:
    """The most rows that a step leaves idle."""
    hashes = model.ngrams.ngrams
    return max(hashes.num_rows - len(hashes(batch[:, :-1]).unique()) for batch in batches)


def assert_equal(ours, dense, our_losses, losses) -> None:
    assert our_losses == losses
    found, expected = weights(ours), weights(dense)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    start = make_model(FEW if dense.ngrams.ngrams.num_rows < 1000 else MANY).ngrams.embedding.weight
    assert (dense.ngrams.embedding.weight - start).abs().max() > 1e-3


def assert_close(ours, dense, our_losses, losses, loss=1e-14, table=2e-12) -> None:
    assert our_losses == pytest.approx(losses, rel=0, abs=loss)
    found, expected = weights(ours), weights(dense)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=table * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- against nn.Embedding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [ALL_TOUCHED, SOME_IDLE])
def test_rows_are_those_of_dense_training(windows):
    rows, batches = FEW if windows == ALL_TOUCHED else MANY, batches_of(windows)
    ours, dense = make_model(rows, idle="exact"), make_model(rows)
    assert idle_rows(ours, batches) == 0 if windows == ALL_TOUCHED else idle_rows(ours, batches) > 6000
    check = assert_equal if windows == ALL_TOUCHED else assert_close
    losses = train(dense, ADAMW, batches)
    check(ours, dense, train(ours, ADAMW, batches), losses)
    if windows == SOME_IDLE:
        # Which says something: rows that stay put are far away.
        lazy = train(make_model(idle="lazy"), ADAMW, batches)
        assert lazy[-1] != pytest.approx(losses[-1], rel=0, abs=1e-6)


# --- what language models are trained with ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CheckpointedGPT, Reentrant])
def test_activation_checkpointing_changes_nothing(kind):
    batches = batches_of(SOME_IDLE, 6)
    plain, ours = make_model(idle="exact"), make_model(idle="exact", kind=kind)
    assert_equal(ours, plain, train(ours, ADAMW, batches), train(plain, ADAMW, batches))


def test_accumulation_over_micro_batches_that_are_read_ahead():
    batches = batches_of(ALL_TOUCHED, 4)
    ours, dense = make_model(FEW, idle="exact"), make_model(FEW)
    # A part leaves rows out, of which others bring gradients.
    assert idle_rows(ours, [batch[:24] for batch in batches]) > 0

    def read_ahead(part):
        ours.ngrams.prefetch(part[:, :-1])
        return ours.loss(part)

    assert_equal(ours, dense, train(ours, ADAMW, batches, read_ahead, 4), train(dense, ADAMW, batches, parts=4))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo looks at it
def test_a_compiled_model_trains_the_same():
    batches = batches_of(SOME_IDLE, 6)
    plain, ours = make_model(idle="exact"), make_model(idle="exact")
    try:
        compiled = torch.compile(ours, backend="aot_eager")

        def loss(batch):
            return F.cross_entropy(compiled(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

        assert_equal(ours, plain, train(ours, ADAMW, batches, forward=loss), train(plain, ADAMW, batches))
    finally:
        torch.compiler.reset()


# --- rows read ahead ----------------------------------------------------------------------------------------------------

FORMS = {
    "lazy": {"idle": "lazy"},
    "exact": {"idle": "exact"},
    "small": {"idle": "exact", "storage_dtype": torch.bfloat16, "state_dtype": torch.uint8},
    "float8": {"idle": "lazy", "storage_dtype": torch.float8_e4m3fn, "state_dtype": torch.uint8},
}


def make_form(**options) -> GPT:
    """Rows in fewer bits are computed in float32."""
    model = make_model(**options)
    return model.float() if "storage_dtype" in options else model


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("when", ["at the begin of the step", "a batch ahead", "by the loader"])
def test_reading_ahead_changes_nothing(form, when, monkeypatch):
    batches, waits = batches_of(SOME_IDLE), []
    wait = st.nn.Ticket.wait
    monkeypatch.setattr(st.nn.Ticket, "wait", lambda *args: waits.append(wait(*args)) or waits[-1])
    plain, ours = make_form(**FORMS[form]), make_form(**FORMS[form])
    expected = train(plain, ADAMW, batches)
    assert not waits
    if when == "by the loader":
        stream = st.prefetch(batches, lambda batch: {ours.ngrams: batch[:, :-1]}, depth=3)
        losses = train(ours, ADAMW, stream)
    else:
        following = itertools.chain(batches[1:], [batches[-1]])

        def loss(batch):
            tokens = batch if when == "at the begin of the step" else next(following)
            if when == "at the begin of the step" or batch is batches[0]:
                ours.ngrams.prefetch(batch[:, :-1])
            found = ours.loss(batch)
            if when == "a batch ahead":
                # Before the step, which changes some of these rows.
                ours.ngrams.prefetch(tokens[:, :-1])
            return found

        losses = train(ours, ADAMW, batches, forward=loss)
    # What was read ahead is what lookups have taken.
    assert sum(ahead is not None for ahead in waits) == len(batches)
    assert_equal(ours, plain, losses, expected)


def test_a_ticket_that_nobody_keeps_is_kept_by_the_module():
    model = make_model(idle="exact")
    tokens = [batch[:, :-1] for batch in batches_of(SOME_IDLE, 12)]
    tickets = weakref.WeakSet()
    for part in tokens:
        tickets.add(model.ngrams.prefetch(part))
    gc.collect()
    assert len(tickets) == 8
    expected = copy.deepcopy(model)(tokens[-1])
    assert torch.equal(model(tokens[-1]), expected)
    assert sum(ticket.is_waiting for ticket in tickets) == 7
    del model
    gc.collect()
    assert not tickets
