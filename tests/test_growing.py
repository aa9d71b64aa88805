"""Tables that grow in the middle of training: as one that had all rows from the start, which were zero."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import COPIES
from lazy_oracle import squared_loss
from optimizer_cases import ALL, BASE, COUPLED, OptimizerCase, case_named, some

import speedtransfer as st
from speedtransfer.errors import InvalidValueError, OptimizerError
from speedtransfer.optim import find_handle
from speedtransfer.optim.handle import Handle
from speedtransfer.optim.placeholder import EncodedPlane
from speedtransfer.rows import LAST_STEP

DIM = 6
SIZES = (5, 9, 30)
ENCODED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bfloat16": (torch.bfloat16, {"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}),
    "8 bits": (torch.int8, {"storage_dtype": torch.int8, "state_dtype": torch.uint8}),
    "float8": (torch.float8_e4m3fn, {"storage_dtype": torch.float8_e4m3fn, "state_dtype": torch.uint8}),
}
Make = Callable[[int], st.Table]


def pageable(num_rows: int, **options: Any) -> st.Table:
    return st.Table(num_rows, DIM, memory="pageable", max_rows=1000, **options)


def handle_of(emb: st.Embedding) -> Handle:
    handle = find_handle(emb.weight)
    assert handle is not None
    return handle


def embedding(table: st.Table, idle: str = "lazy", **options: Any) -> st.Embedding:
    """Return an embedding of `table` with weights in its first rows only."""
    # Of the weights, and of stochastic rounding.
    torch.manual_seed(1)
    emb = st.Embedding.from_pretrained(table, freeze=False, idle=idle, **options)
    handle_of(emb).load(torch.randn(SIZES[0], DIM))
    return emb


def train(emb: st.Embedding, opt: torch.optim.Optimizer, reach: int, steps: int = 5) -> None:
    """Train on some of the first `reach` rows, and on the last of them in the first step."""
    generator = torch.Generator().manual_seed(reach)
    for step in range(steps):
        ids = torch.randint(0, reach - 1, (4,), generator=generator)
        if step == 0:
            ids[0] = reach - 1
        opt.zero_grad()
        squared_loss(emb(ids), torch.randn(4, DIM, generator=generator)).backward()
        opt.step()


def assert_grows(make: Make, case: OptimizerCase, idle: str, **options: Any) -> None:
    grown, whole = embedding(make(SIZES[0]), idle, **options), embedding(make(SIZES[-1]), idle, **options)
    opts = [case.make(emb.parameters()) for emb in (grown, whole)]
    for size in SIZES:
        handle_of(grown).grow(size)
        assert grown.weight.shape == (size, DIM)
        for emb, opt in zip((grown, whole), opts, strict=True):
            train(emb, opt, size)
    for emb, opt in zip((grown, whole), opts, strict=True):
        opt.zero_grad()
        emb.weight.sum().backward()
        opt.step()
    assert torch.equal(grown.weight, whole.weight)
    states = [opt.state_dict()["state"].get(0, {}) for opt in opts]
    assert states[0].keys() == states[1].keys()
    for key, value in states[1].items():
        assert torch.equal(torch.as_tensor(states[0][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("case", some(BASE), ids=str)
def test_lazy_training(case: OptimizerCase) -> None:
    assert_grows(pageable, case, "lazy")


@pytest.mark.parametrize("case", some([*ALL, *COUPLED]), ids=str)
def test_exact_training(case: OptimizerCase) -> None:
    assert_grows(pageable, case, "exact")


@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("kind", ENCODED)
def test_encoded_rows(kind: str, idle: str) -> None:
    dtype, options = ENCODED[kind]
    assert_grows(lambda rows: pageable(rows, dtype=dtype), case_named("adamw"), idle, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["adamw", "adagrad-initial", "rprop", "asgd"])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "rows"},
        {"cache_rows": 4},
        {"cache_rows": 100},
        {"memory": "device"},
        {"memory": "mmap"},
        {"memory": "mmap", "layout": "rows", "cache_rows": 4},
    ],
    ids=str,
)
def test_other_tables(name: str, idle: str, options: dict[str, Any], tmp_path: Path) -> None:
    about = {"memory": "pageable", "max_rows": 1000, **options}

    def make(rows: int) -> st.Table:
        path = tmp_path / f"{rows}.safetensors" if about["memory"] == "mmap" else None
        return st.Table(rows, DIM, path=path, **about)

    assert_grows(make, case_named(name), idle)


def test_new_rows_have_missed_no_step() -> None:
    emb = embedding(pageable(5), "exact")
    opt = case_named("adamw").make(emb.parameters())
    train(emb, opt, 5)
    handle_of(emb).grow(7)
    assert emb.table.stored(LAST_STEP)[5:].flatten().tolist() == [5, 5]
    train(emb, opt, 5)
    handle_of(emb).rows.reset(torch.tensor([6]), torch.ones(1, DIM))
    assert torch.equal(emb(torch.tensor([6])), torch.ones(1, DIM))


def test_a_pending_gradient_stays() -> None:
    results = []
    for sizes in ((5, 9, 12), (12, 12, 12)):
        emb = embedding(pageable(sizes[0]))
        opt = case_named("adamw").make(emb.parameters())
        train(emb, opt, 5)
        opt.zero_grad()
        late = emb(torch.tensor([4, 2]))
        emb(torch.tensor([1, 2])).sum().backward()
        shown = emb.weight.grad
        handle_of(emb).grow(sizes[1])
        emb(torch.tensor([8])).sum().backward()
        handle_of(emb).grow(sizes[2])
        late.sum().backward()
        torch.nn.utils.clip_grad_norm_(emb.parameters(), 0.5)
        assert (emb.weight.grad.shape, shown.shape) == ((12, DIM), (sizes[0], DIM))
        results.append(emb.weight.grad.to_dense())
        opt.step()
        results.append(emb.weight.detach().clone())
    assert all(map(torch.equal, results[:2], results[2:]))


def test_gradients_asked_for_of_a_graph_from_before() -> None:
    emb = embedding(pageable(5))
    loss = emb(torch.tensor([1, 4])).sum() + (emb.weight * 2).sum()
    handle_of(emb).grow(8)
    (grad,) = torch.autograd.grad(loss + emb(torch.tensor([7])).sum(), emb.weight)
    assert grad.sum(1).tolist() == [DIM * n for n in (2, 3, 2, 2, 3, 0, 0, 1)]


def test_what_shows_the_weight_and_its_state_grows() -> None:
    emb = embedding(pageable(5))
    opt = case_named("adamw").make(emb.parameters())
    train(emb, opt, 5)
    view, plane = emb.table.torch(), opt.state[emb.weight]["exp_avg"]
    leaf = emb.weight * 1
    assert isinstance(plane, EncodedPlane)
    handle_of(emb).grow(8)
    assert (leaf.shape, (emb.weight * 1).shape, emb.weight.numel()) == ((5, DIM), (8, DIM), 8 * DIM)
    assert plane.shape == (8, DIM)
    assert opt.state_dict()["state"][0]["exp_avg"].shape == (8, DIM)
    assert emb.state_dict()["weight"].shape == (8, DIM)
    assert emb.weight[7].eq(0).all()
    # Memory from before is still that of the rows.
    view[2] = 5
    assert emb(torch.tensor(2)).eq(5).all()
    with torch.no_grad():
        emb.weight[6] = 3
    assert emb.table[6].eq(3).all()
    assert view.shape == (5, DIM)


@pytest.mark.parametrize("how", COPIES)
def test_copies_can_grow(how: str) -> None:
    emb = embedding(pageable(5))
    train(emb, case_named("adamw").make(emb.parameters()), 5)
    handle_of(emb).grow(6)
    assert len(pickle.dumps(emb)) < 20_000
    other = COPIES[how](emb)
    assert torch.equal(other.weight, emb.weight)
    assert other.table.max_rows == 1000
    handle_of(other).grow(11)
    train(other, case_named("adamw").make(other.parameters()), 11)
    assert (len(emb.table), len(other.table)) == (6, 11)


def test_the_table_of_a_module_grows_with_its_weight() -> None:
    emb = embedding(pageable(5), "exact")
    opt = case_named("adamw").make(emb.parameters())
    train(emb, opt, 5)
    emb.table.grow(8)
    assert emb.weight.shape == (8, DIM)
    assert emb.table.stored(LAST_STEP)[5:].flatten().tolist() == [5, 5, 5]
    old = emb.table
    emb.weight = torch.nn.Parameter(torch.ones(20, DIM))
    old.grow(9)
    assert (len(old), len(emb.table), emb.table.max_rows) == (9, 20, 1000)
    emb.table.grow(21)
    assert emb.weight.shape == (21, DIM)


@pytest.mark.parametrize("kind", [st.Embedding, st.EmbeddingBag])
@pytest.mark.parametrize("how", ["grown", "assigned"])
def test_one_number_of_rows_everywhere(kind: Any, how: str, tmp_path: Path) -> None:
    emb = kind.from_pretrained(pageable(10), freeze=False) if how == "grown" else kind(10, DIM)
    models = [torch.nn.Sequential(emb), torch.nn.Sequential(kind(15, DIM))]
    opts = [torch.optim.Adam(model.parameters()) for model in models]
    if how == "grown":
        emb.table.grow(15)
    else:
        emb.weight.data = torch.randn(15, DIM)
    models[0](torch.tensor([[12]])).sum().backward()
    opts[0].step()
    dense = st.to_dense(models[0])[0]
    for module in (emb, dense):
        assert module.num_embeddings == len(module.weight) == 15
        assert f"15, {DIM}" in repr(module)
    before = emb.weight.detach().clone()
    st.save_checkpoint(tmp_path / "c", models[0], opts[0])
    emb.weight.data.zero_()
    for model, opt in zip(models, opts, strict=True):
        st.load_checkpoint(tmp_path / "c", model, opt)
        assert torch.equal(model[0].weight.detach(), before)
        opt.zero_grad()
        model(torch.tensor([[12]])).sum().backward()
        opt.step()
    assert torch.equal(models[0][0].weight, models[1][0].weight)


def test_a_running_step_does_not_grow() -> None:
    emb, never = embedding(pageable(5)), embedding(pageable(5))
    opts, raised = [case_named("adamw").make(module.parameters()) for module in (emb, never)], []

    handle = handle_of(emb)

    def grow() -> None:
        with pytest.raises(OptimizerError, match="cannot grow to 8 rows while an optimizer steps") as error:
            handle.grow(8)
        raised.append(error)

    # Torch calls it before the hooks after a step.
    opts[0]._optimizer_step_code = grow  # type: ignore[method-assign]
    for module, opt in zip((emb, never), opts, strict=True):
        train(module, opt, 5)
    assert len(raised) == 5
    assert torch.equal(emb.weight, never.weight)
    handle.grow(8)
    assert emb.weight.shape == (8, DIM)


def test_a_table_without_max_rows_does_not_grow() -> None:
    emb = embedding(st.Table(5, DIM, memory="pageable"))
    before = emb.weight.detach().clone()
    with pytest.raises(InvalidValueError, match="made to keep its 5 rows; make it with max_rows"):
        handle_of(emb).grow(6)
    assert torch.equal(emb.weight, before)
