"""``speedtransfer.Embedding`` computes what ``nn.Embedding`` computes: output, gradient, first values, ids of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lazy_oracle import assert_alike, both, dense_grad
from torch import Tensor, nn

import speedtransfer
from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


IDS = {
    "1-D": torch.tensor([3, 3, 0, 11, 7]),
    "2-D": torch.tensor([[1, 1, 2], [2, 0, 1]]),
    "3-D": torch.arange(12).view(2, 3, 2) % 5,
    "0-D": torch.tensor(4),
    "empty": torch.empty(0, dtype=torch.int64),
    "empty 2-D": torch.empty(3, 0, dtype=torch.int64),
    "expanded": torch.tensor([[2], [9]]).expand(2, 4),
    "transposed": torch.arange(6).view(2, 3).t(),
    "int32": torch.tensor([5, 5, 1], dtype=torch.int32),
    "all rows": torch.arange(12).flip(0),
}


OPTIONS = [
    *({"dtype": dtype} for dtype in FLOATS),
    *({"padding_idx": row} for row in (0, 2, 11, -1, -12)),
    *({"max_norm": 1.2, "norm_type": norm} for norm in (2.0, 1.0, 0.5, 3.0, float("inf"))),
    *({"scale_grad_by_freq": True, "padding_idx": 1, "dtype": dtype} for dtype in FLOATS),
]


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_torch(ids: Tensor, options: dict[str, Any]) -> None:
    ours, dense = both(**options)
    assert ours.padding_idx == dense.padding_idx
    before = ours.table.torch().clone()
    assert_alike(ours, dense, ids)
    if "padding_idx" in options:
        assert not dense_grad(ours)[options["padding_idx"]].any()
    # Rows are shortened in the table, those that are looked up.
    idle = torch.ones(12, dtype=torch.bool)
    idle[ids.flatten()] = False
    changed = (ours.table.torch() != before).any(1)
    assert not changed[idle].any()
    assert changed.any() or "max_norm" not in options or ids.numel() < 2
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(ours.eval()(ids), dense.eval()(ids))
            assert torch.equal(ours.table.torch(), dense.weight)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_rows_are_shortened_without_gradients_too(context: Any) -> None:
    ours, dense = both(max_norm=0.5)
    with context():
        assert torch.equal(ours.eval()(IDS["2-D"]), dense.eval()(IDS["2-D"]))
    assert torch.equal(ours.table.torch(), dense.weight)


@pytest.mark.parametrize("padding_idx", [12, -13])
def test_padding_idx_out_of_range(padding_idx: int) -> None:
    with pytest.raises(AssertionError, match="padding_idx must be within num_embeddings"):
        both(padding_idx=padding_idx)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (16, 16), (200_003, 33)])  # the last: more than one chunk
def test_the_same_seed_draws_the_same_weights(shape: tuple[int, int], dtype: torch.dtype) -> None:
    ours, dense = both(*shape, padding_idx=0, dtype=dtype)
    assert torch.equal(ours.table.torch(), dense.weight)
    assert torch.equal(torch.rand(3), _after(dense, shape, dtype))


def _after(dense: nn.Embedding, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(2)
    nn.Embedding(*shape, padding_idx=0, dtype=dtype)
    return torch.rand(3)


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32])
def test_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    ours, dense = both()
    ids = torch.tensor([[3, 1], [3, 0]])
    assert torch.equal(ours(ids.to(dtype)), dense(ids))


@pytest.mark.parametrize("ids", [[[3, 1], [3, 0]], np.array([[3, 1], [3, 0]], dtype=np.int16), ((3, 1), (3, 0))])
def test_ids_as_list_tuple_or_array(ids: object) -> None:
    ours, dense = both()
    assert torch.equal(ours(ids), dense(torch.tensor([[3, 1], [3, 0]])))
    assert ours(5).shape == (5,)
    assert ours([]).shape == (0, 5)


BAD_IDS = [
    (torch.tensor([0, 12]), RowIndexError, r"index\[1\] is 12 but the table has 12 rows"),
    (torch.tensor([[0, 1], [2, -1]]), RowIndexError, r"index\[1, 1\] is -1"),
    (torch.tensor(2**40), RowIndexError, "1099511627776"),
    (torch.tensor([[1, -(2**62)]]), RowIndexError, r"index\[0, 1\] is -4611686018427387904"),
    (torch.tensor([-1], dtype=torch.int32), RowIndexError, r"index\[0\] is -1"),
    (torch.tensor([1.0]), InvalidTypeError, "float32"),
    (torch.tensor([True]), InvalidTypeError, "boolean mask"),
    ([0.5], InvalidTypeError, "float64"),
    (np.array([True]), InvalidTypeError, "boolean"),
    ("3", InvalidTypeError, "integers"),
    ([[1], [2, 3]], InvalidValueError, "ragged"),
]


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("ids", "error", "words"), BAD_IDS, ids=[f"{b[1].__name__}-{b[2]}" for b in BAD_IDS])
def test_bad_ids_raise_before_anything_is_written(ids: object, error: type, words: str, context: Any) -> None:
    # It writes whatever it looks up; the other reads a few ids without more ado.
    for options in ({"max_norm": 0.1}, {"_freeze": True}):
        emb = speedtransfer.Embedding(12, 5, **options)
        before, version, stats = emb.table.torch().clone(), emb.table.version, emb.table.stats()
        with context(), pytest.raises(error, match=words) as caught:
            emb(ids)
        assert isinstance(caught.value, IndexError | TypeError | ValueError)
        assert "\n" not in str(caught.value)
        assert torch.equal(emb.table.torch(), before)
        assert (emb.table.version, emb.table.stats()) == (version, stats)
        assert emb.weight.grad is None
