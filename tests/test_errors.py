"""Every error is ours and the standard one; helpers that make messages; what people get wrong in their first hour."""

import numpy as np
import pytest
import torch
from refusals import check_refused, refusals
from torch import nn

import speedtransfer as st
from speedtransfer import errors, word2vec
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.word2vec import UnknownWordError

STANDARD = {
    "RowIndexError": IndexError,
    "InvalidValueError": ValueError,
    "InvalidTypeError": TypeError,
    "DeviceError": RuntimeError,
    "HostMemoryError": MemoryError,
    "StorageError": OSError,
    "OptimizerError": RuntimeError,
    "ProcessGroupError": RuntimeError,
}


@pytest.mark.parametrize("name", STANDARD)
def test_is_ours_and_the_standard_one(name):
    error, standard = getattr(errors, name), STANDARD[name]
    assert issubclass(error, errors.SpeedtransferError)
    assert [kind for kind in set(STANDARD.values()) if issubclass(error, kind)] == [standard]
    for text, shown in (
        ("plain \u00e9 \u6f22 \u200c", "plain \u00e9 \u6f22 \u200c"),
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("a\nb\x9b", r"a\nb\x9b"),
        ("\u202eturned \ud800", r"\u202eturned \ud800"),
    ):
        # What a terminal would carry out is shown. Messages of several lines are put on one by whoever shows them.
        assert errors.printable(text) == shown
        assert str(error(text)) == str(UnknownWordError(text)) == shown.replace(r"\n", "\n")


SIZES = [
    (-1, 0, "rows is -1 but must be at least 0; pass 0 or more"),
    (0, 1, "rows is 0 but must be at least 1; pass 1 or more"),
    (2**63, 0, "rows is 9223372036854775808 but must be below 2**63; pass a smaller rows"),
    *((value, 0, f"rows is {value!r} ({type(value).__name__}) but must be an integer; pass int(rows)")
      for value in (True, False, 1.0, 1.5, "10", None, [1], 1j, torch.tensor(1.0))),
]  # fmt: skip


def test_check_size():
    for value in (5, np.int8(5), np.uint64(5), torch.tensor(5), np.array(5)):
        assert check_size(value, "rows") == 5
        assert type(check_size(value, "rows")) is int
    for value, minimum, message in SIZES:
        with pytest.raises((InvalidValueError, InvalidTypeError)) as error:
            check_size(value, "rows", minimum)
        assert str(error.value) == message


def test_a_url_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    emb, url = st.Embedding(10, 4), "s3://bucket/run"
    for call in (
        lambda: emb.table.save(url),
        lambda: st.Table.load(url),
        lambda: st.Embedding(10, 4, memory="mmap", path=url),
        lambda: word2vec.Settings(memory="mmap", path=url),
    ):
        with pytest.raises(InvalidValueError, match="but must be a path of this machine"):
            call()
    assert list(tmp_path.iterdir()) == []


# --- what people get wrong in their first hour raises by name, where it is done --------------------------------------------

META = torch.zeros(1, 2, dtype=torch.int64, device="meta")
SPARSE = torch.eye(2, dtype=torch.int64).to_sparse()


def with_vocabulary(ids):
    return st.Embedding(10, 4, vocabulary=st.Vocabulary())(ids)


WRONG = r"""
st.Embedding(-1, 3) -> ValueError: num_embeddings is -1 but must be at least 0
st.one_bit_hook -> ImportError: speedtransfer.one_bit_hook is no part of .*; copy it from examples/compressed_exchange.py
st.Embedding(2.5, 3) -> TypeError: num_embeddings is 2.5
st.Embedding(4, 2, memory="pageble") -> ValueError: did you mean 'pageable'
st.Embedding(4, 2, memory="pinned") -> RuntimeError: pinned
st.Embedding(4, 2, memory="mmap") -> ValueError: path
st.Embedding(4, 2, idle="lasy") -> ValueError: did you mean 'lazy'
st.Embedding(4, 2, dtype=torch.complex64) -> TypeError: complex64
st.Embedding(4, 2, dtype="float16") -> InvalidTypeError: dtype is 'float16' but a table holds one of torch's
st.EmbeddingBag(4, 2, dtype="half", vocabulary=st.Vocabulary()) -> InvalidTypeError: dtype is 'half' but a table holds
st.Embedding.from_pretrained(st.Table(4, 2), dtype="split24", memory="device") -> InvalidTypeError: dtype is 'split24' but
st.Embedding(1, 2, _weight=[[1.0, 2.0]]) -> InvalidTypeError: the weight given is a list but must be a tensor or a Table
st.MultiEmbedding.from_modules([3, 4]) -> InvalidTypeError: '0' is a int, whose own way
st.MultiEmbedding.from_modules(3) -> InvalidTypeError: modules is a int but must be several; pass a list, or a dict
st.replace_embeddings(nn.Embedding(9, 2), 0, vocabulary=True) -> InvalidTypeError: vocabulary is a bool but must be
st.Embedding(4, 2, _weight=torch.zeros(3, 2)) -> ValueError: shape \(3, 2\)
st.Embedding(10, 4, device="gpu") -> InvalidValueError: device is 'gpu' but .* a CPU or CUDA device
st.Embedding(10, 4, device=99) -> DeviceError: 'cuda:99'
st.Embedding(10, 4, padding_idx=0.0) -> InvalidTypeError: padding_idx is 0\.0 \(float\) but must be an i
st.EmbeddingBag(10, 4, padding_idx="0") -> InvalidTypeError: padding_idx is '0' \(str\)
st.MultiEmbedding([3, 4], 4, padding_idx=["0", 1]) -> InvalidTypeError: padding_idx of feature '0' is '0'
st.MultiEmbedding(10, 4) -> InvalidTypeError: num_embeddings is 10 but must be several; pass one for each
st.Embedding(3, 2, memory="mmap", path=3) -> InvalidTypeError: path is 3 \(int\) but must be the path of a file
st.Table(3, 2).init_("normal") -> InvalidTypeError: function is 'normal' but must take a chunk of rows
st.Table(3, 2).init_(torch.nn.init.xavier_uniform_) -> InvalidValueError: xavier_uniform_, which looks at all rows
st.NgramHash(rows=10, orders="23") -> InvalidTypeError: orders is '23' \(str\) but must be a number or
st.NgramHash(rows=10, eos="</s>") -> InvalidTypeError: eos is '</s>' \(str\) but must be an integer
st.NgramHash(rows=10).statistics(META) -> InvalidTypeError: tokens is on the meta device
st.Embedding(10, 4)(META) -> InvalidTypeError: index is on the meta device, which has no values
with_vocabulary(SPARSE) -> InvalidTypeError: ids is a sparse tensor .*; pass ids\.to_dense\(\)
st.Changes.load(3) -> InvalidTypeError: path is 3 \(int\) but must be the path of a file
st.Changes.load(nn.Sequential(nn.Linear(2, 2))) -> InvalidTypeError: ^path is Sequential\( .* but must be the path of a file
st.equal_steps(3) -> InvalidTypeError: loader is 3 \(int\) but must be an iterable of batches
st.plan((9, 4), scale_block=[1]) -> InvalidTypeError: scale_block is \[1\] \(list\)
st.to_dense(st.Embedding(3, 2), device=0.5) -> InvalidTypeError: device is 0.5 but must be a torch.device
st.clip_grad_norm_(nn.Linear(2, 2), 1.0) -> InvalidTypeError: a Linear; pass its parameters\(\)
st.summary([META]) -> InvalidTypeError: model is a list but must be an nn\.Module; pass the model itself
st.to_dense([META]) -> InvalidTypeError: model is a list but must be an nn\.Module; pass the model itself
st.table_parameters([META]) -> InvalidTypeError: model is a list but must be an nn\.Module; pass the model itself
st.full_state_dict([META]) -> InvalidTypeError: model is a list but must be an nn\.Module; pass the model itself
st.replace_embeddings([META]) -> InvalidTypeError: model is a list but must be an nn\.Module; pass the model itself
"""


@pytest.mark.parametrize("refusal", refusals(WRONG), ids=str)
def test_wrong_arguments(refusal):
    if "pinned" in refusal.call and torch.cuda.is_available():
        pytest.skip("pinned memory works here")
    check_refused(refusal, st=st, nn=nn, torch=torch, META=META, SPARSE=SPARSE, with_vocabulary=with_vocabulary)


def test_arguments_of_torch_are_refused_by_torch():
    for fill in (
        lambda weight: nn.init.uniform_(weight, "0"),
        lambda weight: nn.init.normal_(weight, 0.0, -1.0),
        lambda weight: nn.init.constant_(weight, [1]),
        lambda weight: nn.init.trunc_normal_(weight, a=3.0, b=1.0),
        lambda weight: nn.init.kaiming_normal_(weight, mode="fan"),
        lambda weight: weight.data.fill_("0"),
        lambda weight: weight.data.copy_("3"),
    ):
        errors = []
        for module in (nn.Embedding(5, 2), st.Embedding(5, 2)):
            before = module.weight.detach().clone()
            with pytest.raises(Exception) as caught:  # noqa: PT011
                fill(module.weight)
            errors.append((type(caught.value), str(caught.value)))
            assert torch.equal(module.weight.detach(), before)
        assert errors[0] == errors[1]
