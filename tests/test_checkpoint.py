"""What goes into a checkpoint and comes out of it, and what is refused before anything is written."""

import itertools
import json
import math
import os
from collections import Counter, OrderedDict, deque, namedtuple

import numpy as np
import pytest
import torch
from checkpoint_cases import Run, digest, seed_all
from lazy_oracle import Twins
from optimizer_cases import BASE, FUSED, case_named, some
from refusals import check_refused, refusals
from safetensors.torch import load_file
from test_checkpoint_fuzz import resign
from torch import nn
from torch.optim import lr_scheduler as lr

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError

PLAIN = [
    *(None, -(2**127), -0.0, -math.inf, math.nan, 1e-320, 'a\n"\\\0é😀\ud800', b"\x00\xff", complex(-0.0, math.inf)),
    [1, [2, (3, [4])]],
    {"a": {"b": [1]}},
    {1: "int", "1": "str", None: 0, (2, "x"): 1, 1.5: 2, b"k": 3},
    {"$": "tensor", "v": "extra"},
    {("a", 1)},
    frozenset({1, "a"}),
    OrderedDict([(2, "b"), (1, "a")]),
    Counter({3: 2, 5: 1}),
    *(torch.float16, torch.device("cuda:1"), torch.Size([2, 3])),
    *(np.float32(1.1), np.int64(-5), np.bool_(True), np.complex128(1 + 2j)),
]
TENSORS = [
    torch.tensor(3.5, dtype=torch.float64),
    torch.tensor([True, False]),
    torch.zeros(0, 7, dtype=torch.int16),
    torch.arange(6, dtype=torch.int8).view(2, 3).T,
    torch.randn(4, 3).to(torch.bfloat16)[::2],
    torch.randn(3).to(torch.float8_e4m3fn),
    torch.randn(2, 2, dtype=torch.complex128).conj(),
    torch.randn(5, dtype=torch.complex64).imag,
    torch.arange(4).to(torch.uint64),
    torch.tensor([math.nan, math.inf, -0.0]),
    torch.zeros(1).expand(5),
    nn.Parameter(torch.ones(2)),
]
ARRAYS = [np.arange(6, dtype=">i4").reshape(2, 3)[:, ::-1], np.array(2.5), np.zeros((0, 2), np.uint16)]
ARRAYS += [np.array([1 + 2j]), np.array([True]), np.float16([1, 2])]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(st.Embedding(12, 4), nn.Linear(4, 2))


def test_values_come_back_as_they_were(model, tmp_path):
    value = {
        "plain": PLAIN,
        "tensors": TENSORS,
        "arrays": ARRAYS,
        "__metadata__": torch.ones(1),
        "a']['b": torch.ones(1),
    }
    st.save_checkpoint(tmp_path, model, extra=value)
    back = st.load_checkpoint(tmp_path, model)
    assert [a for a, b in zip(PLAIN, back["plain"], strict=True) if (type(a), repr(a)) != (type(b), repr(b))] == []
    json.loads((tmp_path / "manifest.json").read_bytes(), parse_constant=pytest.fail)
    for tensor, other in zip(TENSORS, back["tensors"], strict=True):
        assert digest(tensor.detach().resolve_conj().resolve_neg()) == digest(other)
    for array, other in zip(ARRAYS, back["arrays"], strict=True):
        assert array.dtype.newbyteorder("=") == other.dtype
        np.testing.assert_array_equal(array, other)
    assert back["tensors"][0].is_contiguous()


Point = namedtuple("Point", "x y")
ITSELF = []
ITSELF.append(ITSELF)
NOT_PLAIN = [
    (lambda: 0, r"extra\['deep'\]\[0\] is a builtins.function"),
    (object(), r"builtins.object, which a checkpoint cannot hold; convert it to plain data"),
    (Point(1, 2), "Point"),
    (deque([1]), "deque"),
    (np.array(["a"]), "array of <U1"),
    (torch.eye(2).to_sparse(), r"torch.sparse_coo tensor"),
    (torch.empty(2, device="meta"), "on meta"),
    (nn.LazyLinear(3).weight, r"extra\['deep'\]\[0\] is uninitialized, .* run the model once"),
    (np.ma.masked_array([1, 2], [True, False]), "masked array, which a checkpoint cannot hold"),
    (2**20000, "integer of 20001 bits"),
    ({torch.ones(1): 1}, "tensor as a key"),
    (ITSELF, "deeper than 100 levels"),
]


def test_what_is_no_plain_data_is_refused_before_anything_is_written(model, tmp_path):
    for value, words in NOT_PLAIN:
        with pytest.raises((InvalidTypeError, InvalidValueError), match=words) as caught:
            st.save_checkpoint(tmp_path / "a", model, extra={"deep": [value]})
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "a").exists()


def test_the_files_are_plain_safetensors(model, tmp_path):
    st.save_checkpoint(tmp_path, model, torch.optim.Adam(model.parameters()))
    assert len(os.listdir(tmp_path)) == 4
    tensors = load_file(next(tmp_path.glob("model-*.safetensors")))
    state = model.state_dict()
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[key], state[key]) for key in state)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["optimizers"]["optimizer"]["class"] == "Adam"
    for facts in manifest["files"].values():
        assert (tmp_path / facts["name"]).stat().st_size == facts["bytes"]


def test_every_kind_of_module_state(tmp_path):
    class Odd(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.shared = st.Embedding(5, 2)
            self.again = self.shared
            self.tied = nn.Linear(2, 2)
            self.other = nn.Linear(2, 2)
            self.other.weight = self.tied.weight
            self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))
            self.register_buffer("temporary", torch.randn(3), persistent=False)
            self.register_buffer("brief", torch.randn(3).bfloat16())
            self.count = count

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    first, second = Odd(3), Odd(4)
    st.save_checkpoint(tmp_path, first)
    st.load_checkpoint(tmp_path, second)
    assert second.count == 3
    assert digest({**first.state_dict()}) == digest({**second.state_dict()})
    assert second.other.weight is second.tied.weight
    assert len(load_file(next(tmp_path.glob("model-*")))) == 7  # the shared table once


@pytest.mark.parametrize("library", [nn, st], ids=["torch", "st"])
def test_two_weights_go_into_one_as_by_a_state_dict(library, tmp_path):
    saved, *pairs = (nn.ModuleList([library.Embedding(5, 2), library.Embedding(5, 2)]) for _ in range(3))
    for pair in pairs:
        pair[1].weight = pair[0].weight
    st.save_checkpoint(tmp_path, saved)
    st.load_checkpoint(tmp_path, pairs[0])
    pairs[1].load_state_dict(saved.state_dict())
    assert torch.equal(pairs[0][0].weight, saved[1].weight)
    assert torch.equal(pairs[0][0].weight, pairs[1][0].weight)


def test_a_state_dict_that_does_something_to_rows_is_refused(tmp_path):
    emb = st.Embedding(5, 2)
    emb.register_state_dict_post_hook(lambda module, state, *_: state.update(weight=state["weight"].cpu()))
    with pytest.raises(InvalidTypeError, match=r"state_dict.. of Embedding, or a hook of it, does something to"):
        st.save_checkpoint(tmp_path / "a", emb)
    assert not (tmp_path / "a").exists()


def test_a_pending_gradient_is_stepped_on_what_was_loaded(tmp_path):
    emb = st.Embedding(6, 2)
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    st.save_checkpoint(tmp_path, emb, opt)
    start = emb.table.torch().clone()
    emb.table.zero_()
    emb(torch.tensor([1])).sum().backward()
    st.load_checkpoint(tmp_path, emb, opt)
    opt.step()
    start[1] -= 1
    assert torch.equal(emb.table.torch(), start)


# --- wrong arguments --------------------------------------------------------------------------------------------------


WRONG = r"""
call(path, 3) -> InvalidTypeError: model is a int but must be a torch.nn.Module
call(path, model, "adam") -> InvalidTypeError: optimizer is a str but must be
call(7, model) -> InvalidTypeError: path is 7 but must be the path of a folder
call(nn.Sequential(nn.Linear(2, 2)), model) -> InvalidTypeError: ^path is Sequential\( \(0\): .* but must be the path of a
call("a" * 300, model) -> InvalidValueError: is too long for the file system
call("a\0b", model) -> InvalidValueError: has a NUL
call(path, model, scheduler=5) -> InvalidTypeError: scheduler is a int without state_dict\(\)
call(path, model, scheduler=nn.Linear) -> InvalidTypeError: scheduler is a type without
"""


def test_wrong_arguments(model, tmp_path):
    for refusal, call in itertools.product(refusals(WRONG), (st.save_checkpoint, st.load_checkpoint)):
        check_refused(refusal, call=call, path=tmp_path, model=model, nn=nn)
    assert os.listdir(tmp_path) == []


def _scheduler(optimizer):
    return lr.StepLR(optimizer, 2)


def built(
    rows=12,
    dtype=torch.float32,
    bias=True,
    more=(),
    order=list,
    kind=torch.optim.Adam,
    objects=lambda optimizer: {"scheduler": _scheduler(optimizer)},
):
    torch.manual_seed(3)
    model = nn.Sequential(st.Embedding(rows, 4, dtype=dtype), nn.Linear(4, 2, bias, dtype=dtype), *more)
    optimizer = kind(order(model.parameters()), lr=0.1)
    return model, optimizer, objects(optimizer)


UNFIT = [
    ({"rows": 13}, r"'0.weight' is \(12, 4\) torch.float32 in the checkpoint but \(13, 4\)"),
    ({"dtype": torch.float64}, r"'0.weight' is .*float32 in the checkpoint but .*float64 in the model"),
    ({"more": [nn.Linear(2, 2)]}, r"has no '2.bias' and 1 more that the model has"),
    ({"bias": False}, r"has '1.bias', which the model does not have"),
    ({"order": lambda params: list(params)[::-1]}, r"group 0 of optimizer has parameters of shapes \[\[2\]"),
    ({"order": lambda params: [{"params": [p]} for p in params]}, r"has 3 parameter groups but the checkpoint has 1"),
    ({"kind": torch.optim.SGD}, r"optimizer is SGD but the checkpoint holds that of Adam"),
    (
        {"objects": lambda opt: dict.fromkeys(("scheduler", "schedule"), _scheduler(opt))},
        r"no 'schedule'; did you mean",
    ),
    ({"objects": lambda opt: {}}, r"holds 'scheduler', which was not given; pass scheduler=..., or =None to leave it"),
    ({"objects": lambda opt: {"scheduler": torch.amp.GradScaler("cpu")}}, r"scheduler does not take its state"),
]


@pytest.mark.parametrize(("options", "words"), UNFIT)
def test_what_does_not_fit_changes_nothing(options, words, tmp_path):
    model, opt, objects = built()
    model(torch.arange(6)).sum().backward()
    opt.step()
    st.save_checkpoint(tmp_path, model, opt, **objects)
    model, opt, objects = built(**options)
    seed_all(2)

    def now():
        states = [value.state_dict() for value in (model, opt, *objects.values())]
        return digest([states, torch.get_rng_state()])

    before = now()
    with pytest.raises(InvalidValueError, match=words) as caught:
        st.load_checkpoint(tmp_path, model, opt, **objects)
    assert "\n" not in str(caught.value)
    assert now() == before


def test_what_was_not_saved(model, tmp_path):
    for name in ("empty", "killed"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "killed" / f"model-{'0' * 32}.safetensors").write_bytes(b"half")
    for name in ("nothing", "empty", "file", "killed"):
        with pytest.raises(StorageError, match="check the path"):
            st.load_checkpoint(tmp_path / name, model)
    st.save_checkpoint(tmp_path / "empty", model)
    with pytest.raises(InvalidValueError, match="holds no 'optimizer', but the model alone; pass nothing else"):
        st.load_checkpoint(tmp_path / "empty", model, torch.optim.Adam(model.parameters()))


# --- interrupted and resumed is as never interrupted, bit for bit; torch and we load each other ----------------------------


@pytest.mark.parametrize("case", [*some(BASE), *some(FUSED, ["adamw-fused"])], ids=str)
def test_resuming_is_going_on(case, tmp_path):
    whole, first, second = (Run(case, seed) for seed in (0, 0, 1))
    seed_all(7)
    whole.epochs(4)
    seed_all(7)
    first.epochs(2)
    first.save(tmp_path, extra={"epoch": 2})
    halfway = first.digest()
    # Something to be overwritten.
    second.epochs(1)
    assert second.load(tmp_path) == {"epoch": 2}
    assert second.digest() == halfway
    second.epochs(2)
    assert second.losses[-8:] == whole.losses[-8:]
    assert second.digest() == whole.digest()


FORMS = {
    "exact int8": {"idle": "exact", "storage_dtype": torch.int8, "state_dtype": torch.uint8},
    "half": {"storage_dtype": torch.float16, "state_dtype": torch.bfloat16},
    "float8_e4m3fn": {"storage_dtype": torch.float8_e4m3fn, "scale_block": 3},
    "split24": {"storage_dtype": "split24", "state_dtype": torch.uint8},
    # With scales, planes of one column.
    "records": {"layout": "rows", "state_dtype": torch.uint8},
}


@pytest.mark.parametrize(("name", "steps"), [("adagrad-initial", 0), ("adamw", 0), ("adamw-amsgrad", 10)])
def test_checkpoints_cross_over_and_training_continues_equal(name, steps, tmp_path):
    """Ours into torch, torch into ours; Adagrad has state before it steps."""
    case = case_named(name)
    twins = Twins(case.make)
    batches = twins.batches(20)
    twins.train(batches[:steps])
    st.save_checkpoint(tmp_path / "ours", twins.ours, twins.opt)
    st.save_checkpoint(tmp_path / "dense", twins.dense, twins.dense_opt)
    twins.assert_same()  # Adagrad has made its first state when it was saved before a step
    twins.make = lambda params: case.make(params, lr=0.5)
    twins.use(st.Embedding(twins.num_rows, twins.dim, idle="lazy"), nn.Embedding(twins.num_rows, twins.dim))
    st.load_checkpoint(tmp_path / "dense", twins.ours, twins.opt)
    st.load_checkpoint(tmp_path / "ours", twins.dense, twins.dense_opt)
    if steps:
        twins.assert_same()
    twins.train(batches[steps:])
    twins.assert_same()


@pytest.mark.parametrize("form", FORMS)
def test_read_by_a_dense_model_and_back(form, tmp_path):
    case = case_named("adamw")
    run, dense, back = Run(case, **FORMS[form]), Run(case, seed=1, library=nn), Run(case, seed=2, **FORMS[form])
    run.epochs(2)
    run.save(tmp_path / "one")
    dense.load(tmp_path / "one")
    for key, value in run.model.state_dict().items():
        assert torch.equal(value.to(dense.model.state_dict()[key].dtype), dense.model.state_dict()[key]), key
    states = [r.optimizer.state_dict()["state"] for r in (run, dense)]
    torch.testing.assert_close(*states, rtol=0, atol=0, check_dtype=False)
    dense.save(tmp_path / "two")
    back.load(tmp_path / "two")
    again = back.model.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in run.model.state_dict().items())


def test_one_form_into_another_and_an_encoding_of_another_version(tmp_path):
    wide, small = st.Embedding(300, 20), st.Embedding(300, 20, storage_dtype=torch.int8)
    st.save_checkpoint(tmp_path / "wide", wide)
    st.load_checkpoint(tmp_path / "wide", small)
    step = wide.table.torch().abs().amax(1, keepdim=True) / 127
    assert ((small.state_dict()["weight"] - wide.table.torch()).abs() <= step).all()
    half = st.Embedding(300, 20, storage_dtype=torch.bfloat16)
    st.save_checkpoint(tmp_path / "small", small)
    assert {value.dtype for value in load_file(*(tmp_path / "small").glob("model-*")).values()} >= {torch.int8}
    st.load_checkpoint(tmp_path / "small", half)
    assert torch.equal(half.table.torch(), small.state_dict()["weight"].bfloat16())
    resign(tmp_path / "small", lambda content: content["model"]["entries"]["weight"].update(encoding="int7-row"))
    before = small.table.torch().clone()
    with pytest.raises(StorageError, match="encoded as 'int7-row'"):
        st.load_checkpoint(tmp_path / "small", small)
    assert torch.equal(small.table.torch(), before)


def test_two_optimizers(tmp_path):
    def make():
        run = Run(case_named("sgd"))
        rows = torch.optim.Adam([run.model.words.weight, run.model.bag.weight], lr=0.1)
        dense = torch.optim.SGD([*run.model.dense.parameters(), *run.model.norm.parameters()], lr=0.1, momentum=0.9)
        return run.model, rows, dense

    def train(model, *optimizers):
        for step in range(3):
            model(torch.arange(step, 12 + step).view(4, 3)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    first, second = make(), make()
    train(*first)
    st.save_checkpoint(tmp_path, first[0], first[1], dense=first[2])
    train(*first)
    st.load_checkpoint(tmp_path, second[0], second[1], dense=second[2])
    train(*second)
    torch.testing.assert_close(first[0].state_dict(), second[0].state_dict(), rtol=0, atol=0)
