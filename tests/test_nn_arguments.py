"""``speedtransfer.Embedding`` is made as ``nn.Embedding`` is: arguments, pretrained rows, memories, the parameter."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lazy_oracle import assert_alike, both, dense_grad
from torch import Tensor, nn

import speedtransfer

MAKERS = [
    lambda **options: speedtransfer.Embedding(4, 2, **options),
    lambda **options: speedtransfer.EmbeddingBag(4, 2, **options),
    lambda **options: speedtransfer.Embedding.from_pretrained(torch.zeros(4, 2), **options),
    lambda **options: speedtransfer.EmbeddingBag.from_pretrained(torch.zeros(4, 2), **options),
    lambda **options: speedtransfer.replace_embeddings(nn.Sequential(nn.Embedding(4, 2)), 0, **options),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("name", "near"), [("memroy", "memory"), ("storage_type", "storage_dtype")])
def test_an_unknown_option_is_refused(make: Callable[..., Any], name: str, near: str) -> None:
    with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{name}'; did you mean '{near}'"):
        make(**{name: "pageable"})


@pytest.mark.parametrize("make", MAKERS)
def test_options_reach_the_table(make: Callable[..., Any]) -> None:
    assert make(memory="pageable", idle="lazy", storage_dtype=torch.bfloat16, state_dtype=torch.uint8) is not None
    with pytest.raises(ValueError, match="did you mean 'lazy'"):
        make(idle="lasy")
    with pytest.raises(TypeError, match="storage_dtype"):
        make(storage_dtype=torch.int64)


@pytest.mark.parametrize(
    "function",
    [
        speedtransfer.Embedding,
        speedtransfer.Embedding.from_pretrained,
        speedtransfer.EmbeddingBag,
        speedtransfer.EmbeddingBag.from_pretrained,
        speedtransfer.replace_embeddings,
    ],
)
def test_help_names_the_options_with_their_defaults(function: Callable[..., Any]) -> None:
    text = pydoc.render_doc(function, renderer=pydoc.plaintext)
    for option in (
        """idle: "Literal['auto', 'exact', 'lazy']" = 'auto'""",
        "storage_dtype: 'torch.dtype | None' = None",
    ):
        assert option in text
    assert "scale_block: 'int | None' = None" in text
    assert "**options" not in str(inspect.signature(function))


@pytest.mark.parametrize(("rows", "dim"), [(0, 3), (5, 0), (0, 0)])
def test_empty_tables(rows: int, dim: int) -> None:
    ours, dense = both(rows, dim) if rows and dim else (speedtransfer.Embedding(rows, dim), None)
    assert ours(torch.empty(0, dtype=torch.int64)).shape == (0, dim)
    if rows:
        assert ours(torch.tensor([1, 1])).shape == (2, 0)
        opt = torch.optim.AdamW(ours.parameters())
        ours(torch.tensor([1, 1])).sum().backward()
        opt.step()
    assert dense is None or isinstance(dense, nn.Embedding)


POSITIONAL = {
    "Embedding": (6, 3, 1, 1.5, 1.0, True, True, torch.ones(6, 3), True, "cpu", torch.float32),
    "EmbeddingBag": (6, 3, 1.5, 1.0, True, "sum", False, torch.ones(6, 3), True, 2, "cpu", torch.float32),
}


@pytest.mark.parametrize("kind", POSITIONAL)
def test_positional_arguments_are_those_of_torch(kind: str) -> None:
    ours, dense = (getattr(library, kind)(*POSITIONAL[kind]) for library in (speedtransfer, nn))
    for name in ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse", "mode", "include_last_offset"):
        assert getattr(ours, name, None) == getattr(dense, name, None)
    assert torch.equal(ours.table.torch(), dense.weight)
    assert ours.weight.requires_grad is dense.weight.requires_grad is (kind == "EmbeddingBag")


def test_from_pretrained_uses_the_memory_it_is_given() -> None:
    given = torch.randn(6, 3)
    ours, dense = speedtransfer.Embedding.from_pretrained(given), nn.Embedding.from_pretrained(given)
    assert ours.table.torch().data_ptr() == dense.weight.data_ptr() == given.data_ptr()
    assert ours.weight.requires_grad is dense.weight.requires_grad is False
    ours = speedtransfer.Embedding.from_pretrained(given, freeze=False)
    opt = torch.optim.SGD(ours.parameters(), lr=1.0)
    before = given.clone()
    ours(torch.tensor([2])).sum().backward()
    opt.step()
    assert torch.equal(given[2], before[2] - 1)
    other = speedtransfer.Embedding.from_pretrained(given, memory="device")
    assert torch.equal(other.table.torch(), given)


def test_from_pretrained_with_options() -> None:
    options = {"padding_idx": 2, "max_norm": 1.0, "norm_type": 1.0, "scale_grad_by_freq": True, "freeze": False}
    weight = torch.randn(6, 3)
    ours = speedtransfer.Embedding.from_pretrained(weight.clone(), **options)
    dense = nn.Embedding.from_pretrained(weight.clone(), **options)
    assert ours.table.torch()[2].any()  # the padding row keeps its values
    assert_alike(ours, dense, torch.tensor([1, 2, 2, 1, 5]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_from_pretrained_of_integers(dtype: torch.dtype) -> None:
    given = torch.arange(6, dtype=dtype).view(3, 2)
    for freeze in (True, False):
        emb = speedtransfer.Embedding.from_pretrained(given, freeze=freeze)
        out = emb(torch.tensor([2, 0]))
        assert torch.equal(out, given[[2, 0]])
        assert not out.requires_grad


@pytest.mark.parametrize("shape", [(6,), (2, 3, 4), ()])
def test_from_pretrained_of_other_dimensions(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be 2-D"):
        speedtransfer.Embedding.from_pretrained(torch.zeros(shape))
    with pytest.raises(ValueError, match="must be 2-D"):
        speedtransfer.EmbeddingBag.from_pretrained(torch.zeros(shape))


def test_an_mmap_table_trains_and_the_file_holds_the_result(tmp_path) -> None:
    path = tmp_path / "rows.npy"
    torch.manual_seed(2)
    emb = speedtransfer.Embedding(12, 5, memory="mmap", path=path)
    dense = both()[1]
    for module in (emb, dense):
        opt = torch.optim.Adagrad(module.parameters(), lr=0.5)
        for ids in ([1, 2, 2], [2, 11]):
            opt.zero_grad()
            module(torch.tensor(ids)).square().sum().backward()
            opt.step()
    emb.table.flush()
    assert np.array_equal(np.load(path), dense.weight.detach().numpy())
    assert [p.name for p in tmp_path.iterdir()] == ["rows.npy"]


# --- the parameter ----------------------------------------------------------------------------------------------------


def test_it_is_an_embedding_with_one_parameter() -> None:
    ours, dense = both()
    assert isinstance(ours, nn.Embedding)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in dense.named_parameters()] == ["weight"]
    assert isinstance(ours.weight, nn.Parameter)
    assert list(ours.buffers()) == []


def test_extra_repr() -> None:
    ours, dense = both(padding_idx=1, max_norm=2.0, norm_type=1.0, scale_grad_by_freq=True, sparse=True)
    assert ours.extra_repr() == dense.extra_repr() + ", memory='pageable'"
    assert repr(ours) == f"Embedding({ours.extra_repr()})"


def test_a_parameter_that_is_the_weight_no_more_and_has_no_rows_raises(tmp_path) -> None:
    emb = speedtransfer.Embedding(6, 3, memory="mmap", path=tmp_path / "rows.npy")
    old, emb.weight = emb.weight, nn.Parameter(torch.rand(6, 3))
    with pytest.raises(ValueError, match="until another was assigned in its place"):
        old.sum()


def test_a_weight_that_something_computes_has_no_active_rows() -> None:
    emb = speedtransfer.Embedding(6, 3)
    with pytest.raises(TypeError, match="functional_call"):
        nn.utils.parametrize.register_parametrization(emb, "weight", nn.Identity()).activate([1])


def test_functional_over_active_rows() -> None:
    """`activate` is what forward is made of: the same output with plain torch."""
    ours, dense = both()
    ids = torch.tensor([[7, 1], [7, 7]])
    active = ours.activate(ids)
    assert active.ids.tolist() == [1, 7]
    assert active.inverse.tolist() == [[1, 0], [1, 1]]
    assert torch.equal(F.embedding(active.inverse, active.rows), dense(ids))
    F.embedding(active.inverse, active.rows).square().sum().backward()
    dense(ids).square().sum().backward()
    assert torch.equal(dense_grad(ours), dense.weight.grad)


@pytest.mark.parametrize(
    ("grad", "error", "words"),
    [
        (torch.zeros(3, 5), ValueError, r"shape \(3, 5\) but there are \(2, 5\) active rows"),
        (torch.zeros(2, 4), ValueError, r"shape \(2, 4\)"),
        (torch.zeros(2, 5, dtype=torch.float64), TypeError, "float64"),
    ],
)
def test_wrong_gradients_by_hand(grad: Tensor, error: type[Exception], words: str) -> None:
    emb = speedtransfer.Embedding(12, 5)
    active = emb.activate([7, 1, 7])
    with pytest.raises(error, match=words) as caught:
        active.add_grad(grad)
    assert "\n" not in str(caught.value)
    assert emb.weight.grad is None
    active.add_grad(torch.ones(2, 5))
    active.add_grad(torch.ones(2, 5))
    assert torch.equal(emb.weight.grad.rows, torch.full((2, 5), 2.0))
