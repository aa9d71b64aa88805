"""Tensors over all rows of a weight, and what was made of them, kept over steps: they show and write rows as in torch."""

import copy
import gc

import numpy as np
import pytest
import torch
from cases import take_step
from lazy_oracle import exact
from optimizer_cases import case_named
from torch import nn

import speedtransfer as st
from speedtransfer.optim import stepping


def trained(name="adamw"):
    twins = exact(case_named(name), torch.float64)
    twins.train(twins.batches(4))
    return twins


def test_views_of_memory_that_the_weight_has_left():
    """As those of torch; what is done with views of its own memory, tests/test_cells.py and tests/test_weight.py see."""
    twins = trained()
    kept = [module.weight.data[3:9] for module in twins.modules]
    twins.train(twins.batches(6, seed=1))
    for module in twins.modules:
        module.weight.data = torch.ones_like(module.weight)
    for seed in (2, 3):
        assert torch.allclose(*kept, rtol=1e-9)
        assert torch.allclose(*(module.weight.data[3:9] for module in twins.modules), rtol=1e-9)
        twins.train(twins.batches(6, seed=seed))
    twins.assert_same(1e-9)


@pytest.mark.parametrize("how", ["data", "from_pretrained"])
@pytest.mark.parametrize("name", ["adamax", "sgd-momentum", "adam-weight-decay"])
def test_memory_that_is_the_callers_too(name, how):
    twins = trained(name)
    given = [torch.linspace(-1, 1, 480, dtype=torch.float64).view(60, 8).clone() for _ in "12"]
    if how == "data":
        for module, values in zip(twins.modules, given, strict=True):
            module.weight.data = values
    else:
        kinds = (st.Embedding, nn.Embedding)
        twins.use(*(kind.from_pretrained(each, freeze=False) for kind, each in zip(kinds, given, strict=True)))
    twins.train(twins.batches(6, seed=1))
    assert torch.allclose(*given, rtol=1e-9)
    for values in given:
        values.mul_(0.5)
    twins.train(twins.batches(6, seed=2))
    assert torch.allclose(*given, rtol=1e-9)
    twins.assert_same(1e-9)


def test_copies_of_rows_in_fewer_bits():
    """Views of a copy show the rows of now, and write to them, whatever came between."""
    emb = st.Embedding(9, 4, storage_dtype=torch.bfloat16)
    opt = torch.optim.AdamW(emb.parameters(), lr=0.1)
    views = [emb.weight.data[2:5], torch.no_grad()(lambda: emb.weight[3])(), emb.weight.data[1]]
    take_step(opt, emb(torch.tensor([3, 8])).square().sum())
    assert views[0][1].tolist() == views[1].tolist() == emb.weight.detach()[3].tolist()
    views[0].fill_(0.5)
    views[2].fill_(2.0)
    assert views[1].tolist() == [0.5] * 4
    assert emb.weight.detach()[1:4].mean(1).tolist() == [2.0, 0.5, 0.5]
    before = views[0].clone()
    emb.weight.data = torch.zeros(12, 4)
    assert torch.equal(views[0].clone(), before)
    views[0].fill_(7.0)
    assert not emb.weight.any()


def test_nothing_of_ours_is_one(tmp_path):
    """What we do ourselves, and what people drop, keeps no view: each would make steps slow."""
    emb = st.Embedding(60, 8)
    model = nn.Sequential(emb)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        opt.zero_grad()
        (emb(torch.arange(5)).sum() + emb.weight.square().sum()).backward()
        opt.step()

    uses = {
        "step": step,
        "state dicts": lambda: (model.state_dict(), opt.state_dict()),
        "load": lambda: (model.load_state_dict(model.state_dict()), opt.load_state_dict(opt.state_dict())),
        "save": lambda: st.save_checkpoint(tmp_path / "a", model, opt),
        "background": lambda: st.save_checkpoint(tmp_path / "b", model, opt, background=True),
        "restore": lambda: st.load_checkpoint(tmp_path / "a", model, opt),
        "whole": lambda: float(emb.weight.detach().norm()) + float(opt.state[emb.weight]["exp_avg"].norm()),
        "normalize": lambda: setattr(emb.weight, "data", nn.functional.normalize(emb.weight.data)),
        "write": lambda: emb.weight.data.mul_(0.5),
        "prefetch": lambda: emb(emb.prefetch(torch.arange(3))),
        "mark": lambda: st.mark(model, opt),
        "dense": lambda: st.to_dense(model),
        "table": lambda: (emb.table.torch().sum(), emb.table.save(tmp_path / "t.safetensors")),
        "init": lambda: nn.init.normal_(emb.weight),
        "array": lambda: np.asarray(emb.weight.detach()).sum(),
    }
    for name, use in uses.items():
        kept = use()
        step()
        if name == "background":
            kept.wait()
        kept = None
        gc.collect()
        assert not emb.table.has_views, name
    kept = [emb.weight.data, emb.table.plane(emb.table.planes[1])]
    kept.pop()
    assert emb.table.has_views
    kept.clear()
    assert not emb.table.has_views


def test_a_large_table_warns(monkeypatch):
    monkeypatch.setattr(stepping, "_LARGE", 1000)
    twins = trained()
    kept = twins.ours.weight.data
    with pytest.warns(UserWarning, match=r"a tensor over all rows of weight is kept .* keep a copy \(.clone\(\)\)"):
        twins.train(twins.batches(1))
    assert len(kept) == 60


@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_two_tables_over_one_file(idle, tmp_path):
    """Both train it: as two parameters over one memory, which torch trains so."""

    def trained_by_two(kind):
        torch.manual_seed(0)
        weight = torch.rand(10, 3, dtype=torch.float64)
        if kind == "ours":
            np.save(tmp_path / "table.npy", weight.numpy())
            tables = [st.Table.load(tmp_path / "table.npy", memory="mmap", writable=True) for _ in range(2)]
            embs = [st.Embedding.from_pretrained(table, freeze=False, idle=idle) for table in tables]
        else:
            embs = [nn.Embedding(10, 3, _weight=weight) for _ in range(2)]
        # Without momentum rows that are not touched stay as they are.
        ones = [torch.optim.AdamW, torch.optim.Adam] if idle == "exact" else [torch.optim.SGD, torch.optim.Adagrad]
        one, other = (kind(emb.parameters(), lr=0.1) for kind, emb in zip(ones, embs, strict=True))
        batches = torch.randint(0, 10, (12, 2, 4), generator=torch.Generator().manual_seed(0))
        for number, (ids, more) in enumerate(batches):
            embs[0](ids).square().sum().backward()
            if number % 2:
                embs[1](more).square().sum().backward()
                other.step()
            one.step()
            embs[1](ids).sum().backward()
            other.step()
            one.zero_grad()
            other.zero_grad()
        assert torch.equal(*(emb.weight.detach() for emb in embs))
        return embs[0].weight.detach().clone()

    torch.testing.assert_close(trained_by_two("ours"), trained_by_two("torch"), rtol=1e-9, atol=1e-12)


def test_files_that_are_written_by_another_table_no_more(tmp_path):
    """What was written unseen is read again, by arrays too."""
    np.save(tmp_path / "table.npy", np.zeros((10, 3)))
    first = st.Table.load(tmp_path / "table.npy", memory="mmap", writable=True)
    log = first.watch()
    second = st.Table.load(tmp_path / "table.npy", memory="mmap", writable=True)
    assert first.has_views
    del second
    gc.collect()
    assert not first.has_views
    assert first.written_since(log) is None
    log = first.watch()
    first.torch().numpy()[2] = 1
    assert first.written_since(log) is None


def test_tables_over_parts_of_one_array():
    array = np.arange(14.0).reshape(7, 2)
    parts = [array[:5], array[2:]]
    tables = [st.Table.from_array(torch.from_numpy(part), copy=False, memory="pageable") for part in parts]
    assert tables[0].has_views
    for table, part in zip(tables, parts, strict=True):
        assert np.array_equal(table.torch(), part)
        # Views have one memory.
        one, other = copy.deepcopy([table.torch(), table.torch()])
        one.fill_(7)
        assert other.eq(7).all()
