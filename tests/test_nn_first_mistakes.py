"""What people get wrong in their first hour raises by name, where it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import Refusal, check_refused, refusals
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError

META = torch.zeros(1, 2, dtype=torch.int64, device="meta")
SPARSE = torch.eye(2, dtype=torch.int64).to_sparse()


def with_vocabulary(ids: Any) -> Any:
    """Look up in a table with a vocabulary."""
    return st.Embedding(10, 4, vocabulary=st.Vocabulary())(ids)


WRONG = r"""
st.Embedding(-1, 3) -> ValueError: num_embeddings is -1 but must be at least 0
st.Embedding(3, -1) -> ValueError: embedding_dim is -1
st.Embedding(2.5, 3) -> TypeError: num_embeddings is 2.5
st.Embedding(True, 3) -> TypeError: num_embeddings is True
st.Embedding(4, 2, memory="pageble") -> ValueError: did you mean 'pageable'
st.Embedding(4, 2, memory="pinned") -> RuntimeError: pinned
st.Embedding(4, 2, memory="mmap") -> ValueError: path
st.Embedding(4, 2, path="rows.npy") -> ValueError: mmap
st.Embedding(4, 2, idle="lasy") -> ValueError: did you mean 'lazy'
st.Embedding(4, 2, dtype=torch.complex64) -> TypeError: complex64
st.Embedding(4, 2, _weight=torch.zeros(3, 2)) -> ValueError: shape \(3, 2\)
st.Embedding(10, 4, device="gpu") -> InvalidValueError: device is 'gpu' but .* a CPU or CUDA device
st.Embedding(10, 4, device=99) -> DeviceError: 'cuda:99'
st.Embedding(10, 4, device=2**70) -> InvalidValueError: must be a CPU or CUDA device
st.Embedding(10, 4, padding_idx=0.0) -> InvalidTypeError: padding_idx is 0\.0 \(float\) but must be an i
st.EmbeddingBag(10, 4, padding_idx="0") -> InvalidTypeError: padding_idx is '0' \(str\)
st.MultiEmbedding([3, 4], 4, padding_idx=["0", 1]) -> InvalidTypeError: padding_idx of feature '0' is '0'
st.MultiEmbedding([3, 4], 4, padding_idx=0.5) -> InvalidTypeError: padding_idx of feature '0' is 0\.5
st.MultiEmbedding(10, 4) -> InvalidTypeError: num_embeddings is 10 but must be several; pass one for each
st.Embedding(3, 2, memory=None) -> InvalidValueError: memory is None, .*; choose from 'auto', 'pinned'
st.Embedding(3, 2, memory="mmap", path=3) -> InvalidTypeError: path is a int but must be the path of a file
st.Table(3, 2).save(None) -> InvalidTypeError: path is a NoneType but must be the path of a file
st.Table(3, 2).init_("normal") -> InvalidTypeError: function is 'normal' but must take a chunk of rows
st.Table(3, 2).add_plane(3) -> InvalidTypeError: name is 3 but planes are named by strings
st.Table(3, 2).plane(["weight"]) -> InvalidValueError: no plane .*; did you mean 'weight'
st.NgramHash(rows=10, orders="23") -> InvalidTypeError: orders is '23' \(str\) but must be a number or
st.NgramHash(rows=10, eos="</s>") -> InvalidTypeError: eos is '</s>' \(str\) but must be an integer
st.NgramHash(rows=10).statistics(META) -> InvalidTypeError: tokens is on the meta device
st.Embedding(10, 4)(META) -> InvalidTypeError: index is on the meta device, which has no values
with_vocabulary(META) -> InvalidTypeError: ids is on the meta device, which has no values
with_vocabulary(SPARSE) -> InvalidTypeError: ids is a sparse tensor .*; pass ids\.to_dense\(\)
st.EmbeddingBag(10, 4)(SPARSE) -> InvalidTypeError: index is a sparse tensor .*; pass index\.to_dense
st.Changes.load(3) -> InvalidTypeError: path is a int but must be the path of a file
st.equal_steps(3) -> InvalidTypeError: loader is 3 \(int\) but must be an iterable of batches
st.plan((9, 4), storage_dtype=["x"]) -> InvalidValueError: storage_dtype is \['x'\]; choose from
st.plan((9, 4), scale_block=[1]) -> InvalidTypeError: scale_block is \[1\] \(list\)
st.plan((9, 4), idle=["exact"]) -> InvalidValueError: idle is \['exact'\]
st.to_dense(st.Embedding(3, 2), device="gpu") -> InvalidValueError: device is 'gpu' but .* a CPU or CUDA
st.to_dense(st.Embedding(3, 2), device=0.5) -> InvalidTypeError: device is 0.5 but must be a torch.device
st.clip_grad_norm_(nn.Linear(2, 2), 1.0) -> InvalidTypeError: a Linear; pass its parameters\(\)
"""


@pytest.mark.parametrize("refusal", refusals(WRONG), ids=str)
def test_wrong_arguments(refusal: Refusal) -> None:
    if "pinned" in refusal.call and torch.cuda.is_available():
        pytest.skip("pinned memory works here")
    check_refused(refusal, st=st, nn=nn, torch=torch, META=META, SPARSE=SPARSE, with_vocabulary=with_vocabulary)


@pytest.mark.parametrize(
    "function", [st.summary, st.to_dense, st.table_parameters, st.full_state_dict, st.replace_embeddings]
)
def test_no_model(function: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidTypeError, match=r"model is a list but must be an nn\.Module; pass the model itself"):
        function([nn.Embedding(3, 2)])


@pytest.mark.parametrize("arguments", [("1", 2.0), (None, 2.0), (1.0, "2"), (1.0, None)])
def test_clipping_refuses_what_torch_refuses(arguments: tuple) -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    errors = []
    for clip in (st.clip_grad_norm_, nn.utils.clip_grad_norm_):
        try:
            clip(parameters, *arguments)
        except (TypeError, ValueError) as error:
            errors.append((type(error), str(error)))
        else:
            errors.append(None)
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    "fill",
    [
        lambda weight: nn.init.uniform_(weight, "0"),
        lambda weight: nn.init.normal_(weight, 0.0, -1.0),
        lambda weight: nn.init.constant_(weight, [1]),
        lambda weight: nn.init.trunc_normal_(weight, a=3.0, b=1.0),
        lambda weight: nn.init.xavier_uniform_(weight, "2"),
        lambda weight: nn.init.kaiming_normal_(weight, mode="fan"),
        lambda weight: weight.data.fill_("0"),
        lambda weight: weight.data.copy_("3"),
    ],
)
def test_arguments_of_torch_are_refused_by_torch(fill: Callable[[Any], Any]) -> None:
    errors = []
    for module in (nn.Embedding(5, 2), st.Embedding(5, 2)):
        before = module.weight.detach().clone()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            fill(module.weight)
        errors.append((type(caught.value), str(caught.value)))
        assert torch.equal(module.weight.detach(), before)
    assert errors[0] == errors[1]
