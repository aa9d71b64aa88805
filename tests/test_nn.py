"""``Embedding`` and ``EmbeddingBag`` compute what those of torch.nn compute, and take ids and arguments of any kind."""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import FLOAT_DTYPES, take_step
from lazy_oracle import assert_alike, both, dense_grad
from torch import Tensor, nn

import speedtransfer
from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError

FLAT = torch.tensor([3, 1, 3, 0, 11, 7, 3, 1])
PAIRS = torch.tensor([[3, 1, 3], [0, 11, 7]])
IDS = {
    "1-D": (torch.tensor([3, 3, 0, 11, 7]),),
    "2-D": (torch.tensor([[1, 1, 2], [2, 0, 1]]),),
    "3-D": (torch.arange(12).view(2, 3, 2) % 5,),
    "0-D": (torch.tensor(4),),
    "empty": (torch.empty(0, dtype=torch.int64),),
    "empty 2-D": (torch.empty(3, 0, dtype=torch.int64),),
    "expanded": (torch.tensor([[2], [9]]).expand(2, 4),),
    "transposed": (torch.arange(6).view(2, 3).t(),),
    "int32": (torch.tensor([5, 5, 1], dtype=torch.int32),),
    "all rows": (torch.arange(12).flip(0),),
}
BAGS = {
    "2-D": (PAIRS,),
    "offsets": (FLAT, torch.tensor([0, 3, 5])),
    "empty bags": (FLAT, torch.tensor([0, 0, 3, 3, 8])),
    "no ids": (torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])),
    "padding": (torch.tensor([[3, 3], [3, 1]]),),
    "no bags": (torch.empty(0, 3, dtype=torch.int64),),
    "int32": (FLAT.int(), torch.tensor([0, 2], dtype=torch.int32)),
    "int32 ids": (FLAT.int(), torch.tensor([0, 2])),
    "int32 offsets": (FLAT, torch.tensor([0, 2], dtype=torch.int32)),
    "many": (torch.randint(10, (40, 30), generator=torch.Generator().manual_seed(0)),),
}
LAST = {f"to {at}": (FLAT, torch.tensor(at)) for at in ([0, 3, 3, 8], [0, 3, 3], [0, 3, 8], [0, 0, 8, 8])}
ROWS = ["2-D", "empty bags", "no ids", "padding"]
# A kind, options, and inputs of it.
CASES = [
    *(("Embedding", {"dtype": dtype}, IDS) for dtype in FLOAT_DTYPES),
    *(("Embedding", {"padding_idx": row}, IDS) for row in (0, 2, 11, -1, -12)),
    *(("Embedding", {"max_norm": 1.2, "norm_type": norm}, IDS) for norm in (2.0, 1.0, 0.5, 3.0, float("inf"))),
    ("Embedding", {"scale_grad_by_freq": True, "padding_idx": 1, "dtype": torch.bfloat16}, IDS),
    ("EmbeddingBag", {}, BAGS),
    *(("EmbeddingBag", {"dtype": dtype}, ["empty bags"]) for dtype in FLOAT_DTYPES[1:]),
    *(("EmbeddingBag", {"padding_idx": row}, ROWS) for row in (3, 0, -1, 5)),
    ("EmbeddingBag", {"include_last_offset": True}, ["to [0, 3, 3, 8]"]),
    # Without padding_idx torch reads a last offset short of the end another way, and its gradient is uninitialised memory.
    *(("EmbeddingBag", {"include_last_offset": True, "padding_idx": row}, LAST) for row in (3, 5)),
    ("EmbeddingBag", {"scale_grad_by_freq": True}, ["offsets"]),
    # Where each addition of a gradient rounds, their order shows.
    *(("EmbeddingBag", {"sparse": True, "dtype": dtype}, ["many"]) for dtype in (torch.float16, torch.bfloat16)),
    *(("EmbeddingBag", {"max_norm": 1.0, "norm_type": norm}, ["offsets"]) for norm in (2.0, 1.0)),
]


@pytest.mark.parametrize(("kind", "options", "names"), CASES, ids=[f"{kind} {options}" for kind, options, _ in CASES])
def test_as_torch(kind, options, names):
    modes = ["sum", "mean", "max"][: 2 if {"scale_grad_by_freq", "sparse"} & options.keys() else 3]
    for mode in modes if kind == "EmbeddingBag" else [None]:
        for name in names:
            more = {"mode": mode} if mode else {}
            ours, dense = both(kind=kind, **options, **more)
            given = (IDS if kind == "Embedding" else BAGS | LAST)[name]
            assert ours.padding_idx == dense.padding_idx
            before = ours.table.torch().clone()
            assert_alike(ours, dense, *given)
            if ours.padding_idx is not None:
                assert not dense_grad(ours)[ours.padding_idx].any()
            # Rows are shortened in the table, those that are looked up.
            idle = torch.ones(12, dtype=torch.bool)
            idle[given[0].flatten().long()] = False
            changed = (ours.table.torch() != before).any(1)
            assert not changed[idle].any()
            assert changed.any() or "max_norm" not in options or given[0].numel() < 2
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    assert torch.equal(ours.eval()(*given), dense.eval()(*given))
                    assert torch.equal(ours.table.torch(), dense.weight)


# --- ids ----------------------------------------------------------------------------------------------------------------


def test_ids_of_any_integer_dtype_or_none():
    ours, dense = both()
    ids = torch.tensor([[3, 1], [3, 0]])
    others = [[[3, 1], [3, 0]], np.array([[3, 1], [3, 0]], dtype=np.int16), ((3, 1), (3, 0))]
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32):
        others.append(ids.to(dtype))
    for given in others:
        assert torch.equal(ours(given), dense(ids))
    assert ours(5).shape == (5,)
    assert ours([]).shape == (0, 5)


BAD_IDS = [
    (torch.tensor([0, 12]), RowIndexError, r"index\[1\] is 12 but the table has 12 rows"),
    (torch.tensor([[0, 1], [2, -1]]), RowIndexError, r"index\[1, 1\] is -1"),
    (torch.tensor([[1, -(2**62)]]), RowIndexError, r"index\[0, 1\] is -4611686018427387904"),
    (torch.tensor([-1], dtype=torch.int32), RowIndexError, r"index\[0\] is -1"),
    (torch.tensor([1.0]), InvalidTypeError, "float32"),
    (torch.tensor([True]), InvalidTypeError, "boolean mask"),
    ("3", InvalidTypeError, "integers"),
    ([[1], [2, 3]], InvalidValueError, "ragged"),
]


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(("ids", "error", "words"), BAD_IDS, ids=[f"{b[1].__name__}-{b[2]}" for b in BAD_IDS])
def test_bad_ids_raise_before_anything_is_written(ids, error, words, context):
    # One writes whatever it looks up; another reads a few ids without more ado.
    modules = [speedtransfer.Embedding(12, 5, max_norm=0.1), speedtransfer.Embedding(12, 5, _freeze=True)]
    if isinstance(ids, Tensor) and ids.dim() == 2:
        modules.append(speedtransfer.EmbeddingBag(12, 5, max_norm=0.1))
    for emb in modules:
        before, version, stats = emb.table.torch().clone(), emb.table.version, emb.table.stats()
        with context(), pytest.raises(error, match=words) as caught:
            emb(ids)
        assert "\n" not in str(caught.value)
        assert torch.equal(emb.table.torch(), before)
        assert (emb.table.version, emb.table.stats()) == (version, stats)
        assert emb.weight.grad is None


def test_frozen_rows_are_counted_and_the_callers_to_write_to():
    emb = speedtransfer.Embedding(50, 8, _freeze=True)
    table, grid = emb.table.torch().clone(), torch.randint(0, 50, (6, 8))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for ids in (torch.tensor(7), torch.empty(0, 3).int(), grid.t(), grid[:, ::3], torch.randint(0, 50, (300,))):
                found = emb(ids)
                assert torch.equal(found, F.embedding(ids.long(), table))
                assert found.is_contiguous()
                assert not found._is_view()
            emb(grid).zero_()
            emb.table.reset_stats()
            emb(torch.tensor([1, 1, 2]))
    assert (emb.table.stats().gathered_rows, emb.table.stats().gathered_bytes) == (3, 3 * 8 * 4)
    assert torch.equal(emb.table.torch(), table)


# --- bags ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["nothing", "weights", "rows"])
@pytest.mark.parametrize("name", ["2-D", "offsets"])
def test_per_sample_weights(frozen, name):
    ours, dense = both(kind="EmbeddingBag", mode="sum", padding_idx=1)
    ids, found = BAGS[name][0], []
    for module in (dense, ours):
        module.requires_grad_(frozen != "rows")
        weight = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)).requires_grad_(frozen != "weights")
        out = module(*BAGS[name], per_sample_weights=weight)
        try:
            out.square().sum().backward()
        except RuntimeError as error:
            if module is dense and "INTERNAL ASSERT" in str(error):
                pytest.skip("this torch cannot do it with its own nn.EmbeddingBag")
            raise
        found.append((out.detach(), weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    # Dot products of rows: how a BLAS sums one depends on the processor and on where the row lies in memory.
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=1e-6)
    if frozen == "rows":
        assert ours.weight.grad is None
    else:
        assert torch.equal(dense_grad(ours), dense.weight.grad)


BAD_BAGS = {
    "1-D without offsets": (FLAT,),
    "2-D with offsets": (PAIRS, torch.tensor([0])),
    "3-D": (FLAT.view(2, 2, 2),),
    "first offset not 0": (FLAT, torch.tensor([1, 2])),
    "weights of another shape": (FLAT, torch.tensor([0]), torch.ones(5)),
    "weights of another dtype": (FLAT, torch.tensor([0]), torch.ones(8).half()),
    "weights with mean": (FLAT, torch.tensor([0]), torch.ones(8)),
    "an unknown mode": (PAIRS,),
}


@pytest.mark.parametrize("name", BAD_BAGS)
def test_bad_bags_raise_what_torch_raises(name):
    mode = {"weights with mean": "mean", "an unknown mode": "median"}.get(name, "sum")
    ours, dense = both(kind="EmbeddingBag", mode=mode)
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever torch raises
        dense(*BAD_BAGS[name])
    with pytest.raises(expected.type) as caught:
        ours(*BAD_BAGS[name])
    assert str(caught.value) == str(expected.value)
    # Before rows are shortened, or ids get rows.
    for options in ({"max_norm": 0.1}, {"vocabulary": speedtransfer.Vocabulary()}):
        bag = speedtransfer.EmbeddingBag(12, 5, mode=mode, **options)
        before = bag.table.torch().clone()
        with pytest.raises(expected.type):
            bag(*BAD_BAGS[name])
        assert torch.equal(bag.table.torch(), before)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3, "include_last_offset": True}, {"max_norm": 1.0}], ids=str)
def test_nested_bags(options):
    ours, dense = both(kind="EmbeddingBag", mode="sum", **options)
    ids = torch.nested.nested_tensor([FLAT[:3], FLAT[:0], FLAT[3:]], layout=torch.jagged)
    weights = torch.nested.nested_tensor_from_jagged(torch.rand(8), ids.offsets())
    assert_alike(ours, dense, ids)
    assert_alike(ours, dense, ids, None, weights)
    with pytest.raises(InvalidValueError, match=r"nested tensor \(torch.jagged, 3-D\)"):
        ours(ids.unsqueeze(-1))
    with pytest.raises(InvalidValueError, match="weights of input are in other bags than its ids"):
        ours(ids, None, torch.nested.nested_tensor([FLAT[:4] + 0.5, FLAT[4:] + 0.5], layout=torch.jagged))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [[0, -5, 7], [0, 10, 5], [0, 20, -20], [0, 2**40, 3], []])
def test_offsets_that_are_none(offsets, mode):
    """Torch's kernels address memory by them, and end the process where they name none."""
    bag = speedtransfer.EmbeddingBag(30, 4, mode=mode, memory="pageable", device="cpu")
    for call in (bag, functools.partial(F.embedding_bag, weight=bag.weight, mode=mode)):
        with pytest.raises(InvalidValueError, match=r"offsets(\[\d\])? of "):
            call(torch.arange(20), offsets=torch.tensor(offsets, dtype=torch.int64))
    for padding in (None, 29):
        bag = speedtransfer.EmbeddingBag(30, 4, padding_idx=padding, include_last_offset=True, memory="pageable")
        with pytest.raises(RuntimeError, match="offsets"):
            bag(torch.arange(20), torch.tensor([0, 21]))
    for options, end in (
        ({}, [0, 3]),
        ({}, [0]),
        ({"max_norm": 1.0}, [0, 3]),
        ({"padding_idx": 29, "max_norm": 1.0}, [0]),
    ):
        bag = speedtransfer.EmbeddingBag(30, 4, mode=mode, include_last_offset=True, device="cpu", **options)
        with pytest.raises(InvalidValueError, match=r"end at [03] but there are 20 ids"):
            bag(torch.arange(20), torch.tensor(end))


# --- arguments ----------------------------------------------------------------------------------------------------------

KINDS = ["Embedding", "EmbeddingBag"]
MAKERS = [
    functools.partial(speedtransfer.Embedding, 4, 2),
    functools.partial(speedtransfer.EmbeddingBag, 4, 2),
    functools.partial(speedtransfer.Embedding.from_pretrained, torch.zeros(4, 2)),
    functools.partial(speedtransfer.EmbeddingBag.from_pretrained, torch.zeros(4, 2)),
    lambda **options: speedtransfer.replace_embeddings(nn.Sequential(nn.Embedding(4, 2)), 0, **options),
]


@pytest.mark.parametrize("make", MAKERS)
def test_options_reach_the_table_and_others_are_refused(make):
    assert make(memory="pageable", idle="lazy", storage_dtype=torch.bfloat16, state_dtype=torch.uint8) is not None
    for name, near in (("memroy", "memory"), ("storage_type", "storage_dtype")):
        with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{name}'; did you mean '{near}"):
            make(**{name: "pageable"})
    with pytest.raises(ValueError, match="did you mean 'lazy'"):
        make(idle="lasy")


@pytest.mark.parametrize(("rows", "dim"), [(0, 3), (5, 0)])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e5m2, "split24"])
def test_empty_tables(rows, dim, stored):
    ours = speedtransfer.Embedding(rows, dim, storage_dtype=stored, state_dtype=torch.uint8 if stored else None)
    assert ours(torch.empty(0, dtype=torch.int64)).shape == (0, dim)
    if rows:
        opt = torch.optim.AdamW(ours.parameters())
        take_step(opt, ours(torch.tensor([1, 1])).sum())
        assert opt.state_dict()["state"][0]["exp_avg"].shape == (rows, dim)
    assert ours.state_dict()["weight"].shape == (rows, dim)


POSITIONAL = {
    "Embedding": (6, 3, 1, 1.5, 1.0, True, True, torch.ones(6, 3), True, "cpu", torch.float32),
    "EmbeddingBag": (6, 3, 1.5, 1.0, True, "sum", False, torch.ones(6, 3), True, 2, "cpu", torch.float32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_positional_arguments_are_those_of_torch(kind):
    for row in (4, -5):
        with pytest.raises(AssertionError, match="padding_idx must be within"):
            getattr(speedtransfer, kind)(4, 2, padding_idx=row)
    ours, dense = (getattr(library, kind)(*POSITIONAL[kind]) for library in (speedtransfer, nn))
    for name in ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse", "mode", "include_last_offset"):
        assert getattr(ours, name, None) == getattr(dense, name, None)
    assert torch.equal(ours.table.torch(), dense.weight)
    assert ours.weight.requires_grad is dense.weight.requires_grad is (kind == "EmbeddingBag")
    assert ours.extra_repr() == dense.extra_repr() + ", memory='pageable'"
    assert isinstance(ours, getattr(nn, kind))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_that_is_set_after_the_module_was_made(kind, sparse):
    """It may be counted from the end, and sparse gradients leave it out from then on."""
    modules = both(kind=kind, sparse=sparse)
    for module in modules:
        opt = (torch.optim.SparseAdam if sparse else torch.optim.Adam)([*module.parameters()], lr=0.1)
        for padding in (None, 2, -10, 1, None):
            module.padding_idx = padding
            take_step(opt, module(torch.tensor([[1, 2, 2], [3, 1, 4]])).square().sum())
    torch.testing.assert_close(modules[0].weight.detach(), modules[1].weight.detach())
    with pytest.raises(AssertionError, match="padding_idx must be within num_embeddings: it is 12"):
        modules[0].padding_idx = 12


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_place_of_the_class_of_torch(kind, monkeypatch):
    """As in projects that make ``nn.Embedding`` themselves: those made later are ours, subclasses too."""

    def outcome():
        torch.manual_seed(0)
        own = type("Own", (getattr(nn, kind),), {"forward": lambda self, ids: 2 * super(own, self).forward(ids)})
        model = nn.ModuleList([getattr(nn, kind)(9, 2), own(9, 2, padding_idx=1), nn.TransformerEncoderLayer(4, 2)])
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        for seed in range(3):
            ids = torch.tensor([[1, seed], [3, 4]])
            take_step(opt, model[2](torch.cat([each(ids).view(2, -1, 2) for each in model[:2]], -1)).square().sum())
        return [copy.deepcopy(model).state_dict(), *map(type, model)]

    wanted, first, *_ = outcome()
    monkeypatch.setattr(nn, kind, getattr(speedtransfer, kind))
    found, ours, *_ = outcome()
    assert first is not ours is getattr(speedtransfer, kind)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_uses_the_memory_it_is_given(kind):
    given, options = torch.randn(6, 3), {"padding_idx": -2, "max_norm": 3.0, "norm_type": 1.0}
    ours, dense = (getattr(library, kind).from_pretrained(given, **options) for library in (speedtransfer, nn))
    assert ours.table.torch().data_ptr() == dense.weight.data_ptr() == given.data_ptr()
    assert ours.weight.requires_grad is dense.weight.requires_grad is False
    assert ours.extra_repr() == dense.extra_repr() + ", memory='pageable'"
    ours = getattr(speedtransfer, kind).from_pretrained(given, freeze=False)
    opt, before = torch.optim.SGD(ours.parameters(), lr=1.0), given.clone()
    take_step(opt, ours(torch.tensor([[2]])).sum())
    assert torch.equal(given[2], before[2] - 1)
    assert torch.equal(getattr(speedtransfer, kind).from_pretrained(given, memory="device").table.torch(), given)
    for shape in ((6,), (2, 3, 4), ()):
        with pytest.raises(ValueError, match="must be 2-D"):
            getattr(speedtransfer, kind).from_pretrained(torch.zeros(shape))

    class Scaled(getattr(speedtransfer, kind)):
        def __init__(self, num_embeddings, embedding_dim, scale=1.0, **given):
            super().__init__(num_embeddings, embedding_dim, **given)
            self.scale = scale

    ours = Scaled.from_pretrained(given, **options)
    assert (ours.scale, ours.padding_idx, ours.max_norm, ours.norm_type) == (1.0, 4, 3.0, 1.0)


def test_from_pretrained_of_integers():
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        given = torch.arange(6, dtype=dtype).view(3, 2)
        for freeze in (True, False):
            out = speedtransfer.Embedding.from_pretrained(given, freeze=freeze)(torch.tensor([2, 0]))
            assert torch.equal(out, given[[2, 0]])
            assert not out.requires_grad


# --- active rows --------------------------------------------------------------------------------------------------------


def test_functional_over_active_rows():
    """`activate` is what forward is made of: the same output with plain torch."""
    ours, dense = both()
    ids = torch.tensor([[7, 1], [7, 7]])
    active = ours.activate(ids)
    assert (active.ids.tolist(), active.inverse.tolist()) == ([1, 7], [[1, 0], [1, 1]])
    assert torch.equal(F.embedding(active.inverse, active.rows), dense(ids))
    F.embedding(active.inverse, active.rows).square().sum().backward()
    dense(ids).square().sum().backward()
    assert torch.equal(dense_grad(ours), dense.weight.grad)
    ours.zero_grad()
    wrong = {r"shape \(3, 5\) but there are \(2, 5\) active rows": torch.zeros(3, 5)}
    wrong |= {r"shape \(2, 4\)": torch.zeros(2, 4), "float64": torch.zeros(2, 5).double()}
    for words, grad in wrong.items():
        with pytest.raises((ValueError, TypeError), match=words):
            active.add_grad(grad)
    assert ours.weight.grad is None
    active.add_grad(torch.ones(2, 5))
    active.add_grad(torch.ones(2, 5))
    assert torch.equal(ours.weight.grad.rows, torch.full((2, 5), 2.0))
