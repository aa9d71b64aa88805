"""``speedtransfer.EmbeddingBag`` equals ``nn.EmbeddingBag``: modes, offsets, weights, padding, empty bags."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lazy_oracle import LazyOracle, assert_alike, assert_same, both, dense_grad
from optimizer_cases import case_named
from torch import Tensor, nn

import speedtransfer
from speedtransfer.errors import InvalidValueError

MODES = ["sum", "mean", "max"]


both = functools.partial(both, kind="EmbeddingBag")
FLAT = torch.tensor([3, 1, 3, 0, 11, 7, 3, 1])
INPUTS: dict[str, tuple[Tensor, ...]] = {
    "2-D": (torch.tensor([[3, 1, 3], [0, 11, 7]]),),
    "offsets": (FLAT, torch.tensor([0, 3, 5])),
    "empty bags": (FLAT, torch.tensor([0, 0, 3, 3, 8])),
    "no ids": (torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])),
    "padding": (torch.tensor([[3, 3], [3, 1]]),),
    "no bags": (torch.empty(0, 3, dtype=torch.int64),),
    "int32": (FLAT.int(), torch.tensor([0, 2], dtype=torch.int32)),
    "int32 ids": (FLAT.int(), torch.tensor([0, 2])),
    "int32 offsets": (FLAT, torch.tensor([0, 2], dtype=torch.int32)),
}
LAST = {
    "empty bag": (FLAT, torch.tensor([0, 3, 3, 8])),
    **{f"to {at}": (FLAT, torch.tensor(at)) for at in ([0, 3, 3], [0, 3, 8], [0, 0, 8, 8])},
}


# Options, and inputs of each of them.
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, [*INPUTS]),
    *(({"dtype": dtype}, ["empty bags"]) for dtype in (torch.float64, torch.float16, torch.bfloat16)),
    *(({"padding_idx": row}, ["2-D", "empty bags", "no ids", "padding"]) for row in (3, 0, -1, 5)),
    ({"include_last_offset": True}, ["empty bag"]),
    # Without padding_idx torch reads a last offset short of the end another way, and its gradient is uninitialised memory.
    *(({"include_last_offset": True, "padding_idx": row}, [*LAST]) for row in (3, 5)),
    ({"scale_grad_by_freq": True}, ["offsets"]),
    *(({"max_norm": 1.0, "norm_type": norm}, ["offsets"]) for norm in (2.0, 1.0)),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("options", "names"), CASES, ids=[str(options) for options, _ in CASES])
def test_as_torch(mode: str, options: dict[str, Any], names: list[str]) -> None:
    if mode == "max" and "scale_grad_by_freq" in options:
        pytest.skip("torch refuses it")
    for name in names:
        ours, dense = both(mode=mode, **options)
        arguments = {**INPUTS, **LAST}[name]
        assert ours.padding_idx == dense.padding_idx
        before = ours.table.torch().clone()
        assert_alike(ours, dense, *arguments)
        assert torch.equal(ours.table.torch(), before) == ("max_norm" not in options)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(ours(*arguments), dense(*arguments))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("arguments", ["2-D", "offsets"])
def test_per_sample_weights(trained: bool, arguments: str) -> None:
    ours, dense = both(mode="sum", padding_idx=1)
    ids, *offsets = INPUTS[arguments]
    weights = [torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    grads = []
    for module, weight in zip((ours, dense), weights, strict=True):
        weight.requires_grad_(trained)
        out = module(ids, offsets[0] if offsets else None, weight)
        out.square().sum().backward()
        grads.append((out, weight.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    if (
        trained
    ):  # dot products of rows: how a BLAS sums one depends on the processor and on where the row lies in memory
        torch.testing.assert_close(grads[0][1], grads[1][1], rtol=1e-6, atol=1e-6)
    assert torch.equal(dense_grad(ours), dense.weight.grad)


def test_per_sample_weights_with_frozen_rows() -> None:
    ours, dense = both(mode="sum")
    for module in (dense, ours):
        module.requires_grad_(False)
        weight = torch.ones(2, 3, requires_grad=True)
        try:
            module(INPUTS["2-D"][0], per_sample_weights=weight).sum().backward()
        except RuntimeError as error:
            if module is dense and "INTERNAL ASSERT" in str(error):
                pytest.skip("this torch cannot do it with its own nn.EmbeddingBag")
            raise
        module.seen = weight.grad
    assert torch.equal(ours.seen, dense.seen)
    assert ours.weight.grad is None


BAD = {
    "1-D without offsets": ((FLAT,), "sum"),
    "2-D with offsets": ((INPUTS["2-D"][0], torch.tensor([0])), "sum"),
    "2-D bags of no ids": ((torch.empty(3, 0, dtype=torch.int64),), "sum"),
    "3-D": ((FLAT.view(2, 2, 2),), "sum"),
    "first offset not 0": ((FLAT, torch.tensor([1, 2])), "sum"),
    "offset beyond the ids": ((FLAT, torch.tensor([0, 100])), "sum"),
    "weights of another shape": ((FLAT, torch.tensor([0]), torch.ones(5)), "sum"),
    "weights of another dtype": ((FLAT, torch.tensor([0]), torch.ones(8).double()), "sum"),
    "weights with mean": ((FLAT, torch.tensor([0]), torch.ones(8)), "mean"),
}


@pytest.mark.parametrize(("arguments", "mode"), BAD.values(), ids=BAD)
def test_bad_input_raises_what_torch_raises(arguments: tuple[Tensor, ...], mode: str) -> None:
    ours, dense = both(mode=mode)
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever torch raises
        dense(*arguments)
    with pytest.raises(expected.type) as caught:
        ours(*arguments)
    assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize(("ids", "error"), [([[0, 12]], IndexError), ([[-1, 0]], IndexError), ([[0.5]], TypeError)])
def test_bad_ids_raise_before_anything_is_written(ids: list, error: type[Exception]) -> None:
    ours, _ = both(max_norm=0.1)
    before = ours.table.torch().clone()
    with pytest.raises(error):
        ours(torch.tensor(ids))
    assert torch.equal(ours.table.torch(), before)


def test_an_unknown_mode() -> None:
    ours, dense = both(mode="median")  # torch too finds out in forward
    for module in (ours, dense):
        with pytest.raises(ValueError, match="mode has to be one of sum, mean or max"):
            module(INPUTS["2-D"][0])


def test_repr_and_pretrained() -> None:
    weight = torch.randn(6, 3)
    options = {"mode": "max", "include_last_offset": True, "padding_idx": -2, "max_norm": 3.0, "norm_type": 1.0}
    ours = speedtransfer.EmbeddingBag.from_pretrained(weight, **options)
    dense = nn.EmbeddingBag.from_pretrained(weight, **options)
    assert ours.table.torch().data_ptr() == weight.data_ptr()
    assert ours.weight.requires_grad is dense.weight.requires_grad is False
    assert ours.extra_repr() == dense.extra_repr() + ", memory='pageable'"
    assert isinstance(ours, nn.EmbeddingBag)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adagrad"])
def test_trains_as_the_oracle(mode: str, name: str) -> None:
    ours, dense = both(41, 16, mode=mode, padding_idx=0)
    opt = case_named(name).make(ours.parameters())
    oracle = LazyOracle(case_named(name).make(dense.parameters()), dense)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        ids = (torch.rand(6, 4, generator=generator) ** 3 * 40).long()
        opt.zero_grad()
        oracle.zero_grad()
        for module in (ours, dense):
            module(ids).square().sum().backward()
        opt.step()
        oracle.step()
    assert_same(opt, ours, oracle, dense)
    assert torch.equal(copy.deepcopy(ours)(ids), ours(ids))


@pytest.mark.parametrize("by_weight", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [[0, -5, 7], [0, 10, 5], [0, 20, -20], [0, 2**40, 3], []])
def test_offsets_that_are_none(offsets: list[int], mode: str, by_weight: bool) -> None:
    """Torch's kernels address memory by them, and end the process where they name none."""
    bag = speedtransfer.EmbeddingBag(30, 4, mode=mode, memory="pageable", device="cpu")
    call = functools.partial(F.embedding_bag, weight=bag.weight, mode=mode) if by_weight else bag
    with pytest.raises(InvalidValueError, match=r"offsets(\[\d\])? of "):
        call(torch.arange(20), offsets=torch.tensor(offsets, dtype=torch.int64))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [[0], [0, 0, 3], [0, 3, 20, 20]])
def test_offsets_of_empty_bags(offsets: list[int], dtype: torch.dtype, last: bool) -> None:
    weight = torch.randn(30, 4)
    ours = speedtransfer.EmbeddingBag(30, 4, mode="sum", include_last_offset=last, _weight=weight)
    dense = torch.nn.EmbeddingBag(30, 4, mode="sum", include_last_offset=last, _weight=weight)
    given = torch.arange(20, dtype=dtype), torch.tensor(offsets, dtype=dtype)
    torch.testing.assert_close(ours(*given), dense(*given))
    no_bags = torch.arange(0), torch.zeros(0, dtype=torch.int64)
    if not last:
        assert ours(*no_bags).shape == dense(*no_bags).shape == (0, 4)


@pytest.mark.parametrize("padding", [None, 29])
def test_a_last_offset_beyond_the_ids(padding: int | None) -> None:
    bag = speedtransfer.EmbeddingBag(30, 4, padding_idx=padding, include_last_offset=True, memory="pageable")
    with pytest.raises(RuntimeError, match="offsets"):
        bag(torch.arange(20), torch.tensor([0, 21]))
