"""SpeedTorch's names: the calls of its README, its users' training loops in every memory, and what is wrong with a call."""

import copy
import inspect
import warnings

import numpy as np
import pytest
import torch
from optimizer_cases import BASE, some
from refusals import check_refused, refusals
from speedtorch_cases import KINDS, batch, train
from third_party import Lamb
from torch import nn

import speedtransfer as st
import speedtransfer.speedtorch as SpeedTorch
from speedtransfer.errors import InvalidValueError, OptimizerError
from speedtransfer.speedtorch import memories

pytestmark = pytest.mark.filterwarnings("ignore:SpeedTorch's classes ask for CUDA")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


class OneVariable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1, 4)


def made(kind="device", rows=10, dim=4, **options):
    variable = nn.Embedding(1, dim)
    switcher = KINDS[kind].model(variable, rows, dim, **{**KINDS[kind].options, **options})
    switcher.zerosInit()
    return switcher, variable


# --- names ------------------------------------------------------------------------------------------------------------

_MODEL = "model_variable total_classes embed_dimension"
_OPTIMIZER = "given_optimizer total_classes embed_dimension model variable_name"
ARGUMENTS = {
    "ModelFactory": f"{_MODEL} datatype=float32 CPUPinn=False",
    "OptimizerFactory": f"{_OPTIMIZER} dtype=float32 CPUPinn=False",
    "DataGadget": "fileName CPUPinn=False",
    "COM": "total_classes datatype=uint32 CPUPinn=False",
    "ModelFactoryMM": f"{_MODEL} diskname=variable datatype=float32 CPUPinn=False",
    "OptimizerFactoryMM": f"{_OPTIMIZER} dtype=float32 CPUPinn=False",
    "DataGadgetMM": "fileName CPUPinn=False",
    "COMMM": "total_classes diskname=COM datatype=uint32 CPUPinn=False",
}
for _kind, _where in (("GPUPytorch", ""), ("CPUPytorch", ""), ("Pytorch", " deviceType=cuda pinType=False")):
    ARGUMENTS[f"{_kind}ModelFactory"] = f"{_MODEL} datatype=torch.float32{_where}"
    ARGUMENTS[f"{_kind}OptimizerFactory"] = f"{_OPTIMIZER} dtype=torch.float32{_where}"
    ARGUMENTS[f"{_kind}COM"] = f"total_classes datatype=torch.int32{_where}"


def test_names_and_arguments_are_speedtorchs():
    assert sorted(ARGUMENTS) == SpeedTorch.__all__
    for name, expected in ARGUMENTS.items():
        found = inspect.signature(getattr(SpeedTorch, name)).parameters.values()
        assert " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found) == expected, name


# --- client loops -----------------------------------------------------------------------------------------------------


def test_the_loop_of_the_readme(tmp_path):
    runs = [train(KINDS[kind], torch.device("cpu")) for kind in ("device", "mmap", "torch-cpu")]
    for losses, u, _ in runs:
        assert losses == runs[0][0]
        assert np.array_equal(u.getNumpyVersion(), runs[0][1].getNumpyVersion())
        assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", some(BASE), ids=str)
def test_steps_are_those_of_the_drop_in(case):
    """Bit for bit, weights and state, with another number of rows in every batch."""
    draw = np.random.default_rng(1)
    ours = OneVariable()
    theirs = OneVariable()
    theirs.table = st.Embedding(30, 4, memory="pageable", idle="lazy")
    optimizers = [case.make(model.parameters()) for model in (ours, theirs)]
    weights = SpeedTorch.PytorchModelFactory(ours.table, 30, 4, deviceType="cpu")
    state = SpeedTorch.PytorchOptimizerFactory(optimizers[0], 30, 4, ours, "table", deviceType="cpu")
    weights.normalDistributionInit(0, 1)
    theirs.table.table.torch().copy_(weights.pytorchGPUVar)
    state.optInit()
    for count in (5, 9, 1, 30, 7, 12, 30):
        ids = torch.from_numpy(np.sort(draw.choice(30, count, replace=False)))
        pull = torch.from_numpy(draw.normal(size=(count, 4)).astype(np.float32))
        with batch([weights, state], optimizers[0], ids):
            for rows in (ours.table(torch.arange(count)), theirs.table(ids)):
                (rows * pull + rows.square()).sum().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert torch.equal(weights.pytorchGPUVar, theirs.table.table.torch())
    kept = optimizers[1].state[theirs.table.weight]
    assert set(state.optVarList) == set(case.planes)
    for name, plane in zip(state.optVarList, state.getTorchVar() if state.optVarList else (), strict=True):
        assert torch.equal(plane, kept[name]), name


def test_training_goes_on_from_files():
    """Weights, state and the optimizer's own state dict: as if nothing had happened."""

    def begun():
        model = OneVariable()
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
        weights = SpeedTorch.ModelFactoryMM(model.table, 12, 4, datatype="float64")
        return model, optimizer, weights, SpeedTorch.OptimizerFactoryMM(optimizer, 12, 4, model, "table")

    def trained(steps, model, optimizer, *switchers):
        for step in steps:
            ids = [(step + i) % 12 for i in range(step + 2)]
            with batch(switchers, optimizer, ids):
                model.table(torch.arange(len(ids))).square().sum().backward()
        return switchers[0].getNumpyVersion()

    first = _, optimizer, weights, state = begun()
    weights.uniformDistributionInit(-1, 1)
    state.optInit()
    trained(range(3), *first)
    weights.saveCupy("weights.npy")
    state.saveCupy("Cupy.npy")
    state.saveTorch("Torch.npy")
    saved = copy.deepcopy(optimizer.state_dict())
    expected = trained(range(3, 6), *first)
    for how in ("Cupy", "Torch"):
        again = _, optimizer, weights, state = begun()
        weights.loadCupy("weights.npy")
        getattr(state, f"load{how}")(f"{how}.npy")
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert np.array_equal(trained(range(3, 6), *again), expected)


def test_the_state_of_an_optimizer_is_set():
    model = OneVariable()
    optimizer = torch.optim.Adam(model.parameters())
    state = SpeedTorch.OptimizerFactory(optimizer, 6, 4, model, "table")
    state.CUPYcorpi = [np.full((6, 4), 1.0), np.full((6, 4), 3.0)]
    state.CUPYcorpi[0][2] = 5
    state.getTorchVar()[0].mul_(2)
    assert [plane[:, 0].tolist() for plane in state.getNumpyVersion()] == [[2, 2, 10, 2, 2, 2], [3] * 6]
    with pytest.raises(InvalidValueError, match=r"array of 'exp_avg_sq' has shape \(5, 4\) but must be \(6, 4\)"):
        state.CUPYcorpi = [np.ones((6, 4)), np.zeros((5, 4))]
    with pytest.raises(
        InvalidValueError, match=r"there are 1 arrays but those of \['exp_avg', 'exp_avg_sq'\] are kept"
    ):
        state.CUPYcorpi = [np.ones((6, 4))]
    with pytest.raises(TypeError, match="item assignment"):
        state.CUPYcorpi[0] = np.ones((6, 4))
    state.beforeForwardPass([2])
    assert optimizer.state[model.table.weight]["exp_avg"].eq(10).all()


@pytest.mark.parametrize(
    ("look", "seen"),
    [
        (lambda state: state.getNumpyVersion(), False),
        (lambda state: state.getTorchVar(), True),
        (lambda state: state._set([torch.ones(6, 4)]), True),
    ],
    ids=["copy", "view", "loaded"],
)
def test_state_that_may_have_been_set_is_that_of_the_first_step(look, seen):
    model = OneVariable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = SpeedTorch.OptimizerFactory(optimizer, 6, 4, model, "table")
    state.optInit()
    look(state)
    state.beforeForwardPass([2])
    assert bool(optimizer.state.get(model.table.weight)) == seen


def test_state_is_what_the_optimizer_keeps_now():
    model = OneVariable()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.5)
    state = SpeedTorch.OptimizerFactory(optimizer, 6, 4, model, "table")
    optimizer.param_groups[0]["lr"] = 0.25
    state.optInit()
    assert (state.CUPYcorpi[1] == 0.25).all()
    sparse = torch.optim.SparseAdam(list(model.parameters()))
    assert SpeedTorch.OptimizerFactory(sparse, 6, 4, model, "table").optVarList == ["exp_avg", "exp_avg_sq"]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    state = SpeedTorch.OptimizerFactory(sgd, 6, 4, model, "table")
    state.optInit()
    sgd.param_groups[0]["momentum"] = 0.9
    model.table.weight.grad = torch.ones(1, 4)
    sgd.step()
    with pytest.raises(OptimizerError, match="made state 'momentum_buffer' that it did not make in a trial"):
        state.afterOptimizerStep([1])


def test_copies_of_weights_are_made_before_they_are_seen():
    for use in ("saveCupy", "getNumpyVersion", "getTorchVar", "getCupyVar"):
        model = OneVariable()
        weights, state = KINDS["device"].switchers(torch.optim.ASGD(model.parameters()), model, "table", 5, 4)
        state.optInit()
        call = getattr(state, use)
        arguments = ["state.file"] if use.startswith("save") else []
        with pytest.raises(OptimizerError, match="starts as a copy of the weights, which are not there"):
            call(*arguments)
        weights.normalDistributionInit(0, 1)
        call(*arguments)
        assert np.array_equal(state.getNumpyVersion()[0], weights.getNumpyVersion())


def test_a_variable_takes_batches_of_any_size():
    """While losses, gradients of other batches, and rows that were fetched in inference mode are there."""
    for counts in ((5, 9), (1, 9), (9, 1)):
        weights, variable = made()
        for count in counts:
            weights.beforeForwardPass(range(count))
            loss = variable(torch.arange(count)).sum()
            loss.backward()
            assert variable.weight.grad.shape == (count, 4)
        weights.beforeForwardPass([1, 2])
        assert variable.weight.grad is None
        assert isinstance(variable.weight, nn.Parameter)
        del loss
    with torch.inference_mode():
        weights.beforeForwardPass([1, 2])
    assert not variable.weight.is_inference()
    variable(torch.arange(2)).sum().backward()
    assert variable.weight.grad.eq(1).all()


# --- variables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_first_values_and_names_of_the_rows(kind):
    switcher, _ = made(kind, 500, 4)
    shown = getattr(switcher, KINDS[kind].rows)
    assert not shown.any()
    assert tuple(shown.shape) == (500, 4)
    switcher.uniformDistributionInit(low=1, high=3)
    array = switcher.getNumpyVersion()
    assert 1 <= array.min() < 1.2 < 2.8 < array.max() < 3
    switcher.normalDistributionInit(mean=5, stdDev=0.5)
    copied = switcher.getNumpyVersion()
    assert copied.mean() == pytest.approx(5, abs=0.1)
    assert copied.std() == pytest.approx(0.5, abs=0.05)
    switcher.customInit(torch.nn.init.constant_, 7)
    assert switcher.getTorchVar().eq(7).all()
    assert (switcher.getCupyVar() == 7).all()
    assert copied.mean() != 7
    switcher.customInit(lambda rows: torch.ones_like(rows))
    assert switcher.getTorchVar().eq(1).all()
    switcher.getTorchVar()[3] = 2
    assert switcher.getCupyVar()[3, 0] == 2  # one memory
    delattr(switcher, KINDS[kind].rows)
    assert not hasattr(switcher, KINDS[kind].rows)


# --- indexes ----------------------------------------------------------------------------------------------------------

MASK_LIST = [True] + [False] * 8 + [True]


# Those of a data gadget are more.
@pytest.mark.parametrize("index", [np.array([[4, 1], [7, 7]], "i4"), [-1, -10, 3], slice(2, 9, 3), MASK_LIST], ids=str)
def test_indexes(index):
    """Those of negative samples come behind."""
    weights, variable = made()
    weights.customInit(lambda rows: torch.arange(40.0).view(10, 4))
    weights.beforeForwardPass([1, 2], torch.tensor([[3], [1]], dtype=torch.uint8))
    assert variable.weight[:, 0].tolist() == [4, 8, 12, 4]
    whole = weights.getNumpyVersion()
    weights.beforeForwardPass(index)
    assert np.array_equal(variable.weight.detach().numpy(), whole[index].reshape(-1, 4))
    variable.weight.data = variable.weight.data + 100
    weights.afterOptimizerStep(index)
    whole[index] += 100
    assert np.array_equal(weights.getNumpyVersion(), whole)


# --- what is wrong ----------------------------------------------------------------------------------------------------


BAD_CALLS = """
weights.afterOptimizerStep([1, 10]) -> RowIndexError: index\\[1\\] is 10
weights.afterOptimizerStep([1, 2, 3]) -> InvalidValueError: have shape \\(2, 4\\) but the indexes ask for \\(3, 4\\)
weights.afterOptimizerStep([1.0, 2.0]) -> InvalidTypeError: float64
weights.afterOptimizerStep([True] * 9) -> InvalidValueError: boolean mask of shape \\(9,\\) but there are 10 rows
weights.afterOptimizerStep(torch.arange(10).lt(2).byte()) -> InvalidTypeError: pass index.bool\\(\\) or index.long\\(\\)
weights.uniformDistributionInit(1, 0) -> InvalidValueError: low is 1
weights.normalDistributionInit(0, -1) -> InvalidValueError: stdDev is -1
fresh.uniformDistributionInit(0, 1) -> InvalidTypeError: floating
fresh.beforeForwardPass([0]) -> InvalidValueError: Factory has no rows yet; call zerosInit\\(\\), uniform
fresh.afterOptimizerStep([0]) -> InvalidValueError: no rows yet
"""


def test_bad_calls_write_nothing():
    weights, variable = made()
    weights.beforeForwardPass([1, 2])
    variable.weight.data += 1
    fresh = SpeedTorch.ModelFactory(variable, 10, 4, datatype="int32")
    for refusal in refusals(BAD_CALLS):
        check_refused(refusal, weights=weights, fresh=fresh, torch=torch)
        assert not weights.CUPYcorpus.any()


WRONG = """
ModelFactory(nn.ReLU(), 5, 4) -> InvalidTypeError: ReLU without a weight
ModelFactory(st.Embedding(5, 4), 5, 4) -> InvalidTypeError: moves its rows by itself
ModelFactory(model.table, -5, 4) -> InvalidValueError: total_classes is -5
ModelFactory(model.table, 5, "4") -> InvalidTypeError: embed_dimension is '4'
OptimizerFactory(adam, 5, 4, model, "tabel") -> InvalidValueError: did you mean 'table'
OptimizerFactory(adam, 5, 4, OneVariable(), "table") -> InvalidValueError: does not train
OptimizerFactory(model, 5, 4, model, "table") -> InvalidTypeError: is a OneVariable but
OptimizerFactory(Lamb(model.parameters(), lr=0.1), 5, 4, model, "table") -> OptimizerError: not row by row
PytorchModelFactory(model.table, 5, 4, deviceType="gpu").zerosInit() -> InvalidValueError: deviceType is 'gpu'
PytorchModelFactory(model.table, 5, 4, pinType=True).zerosInit() -> InvalidValueError: pass deviceType='cpu'
COM(-1) -> InvalidValueError: total_classes is -1
"""


@pytest.mark.parametrize("refusal", refusals(WRONG), ids=str)
def test_bad_arguments(refusal):
    model = OneVariable()
    names = {"st": st, "nn": nn, "OneVariable": OneVariable, "Lamb": Lamb, "model": model}
    check_refused(refusal, adam=torch.optim.Adam(model.parameters()), **names, **vars(SpeedTorch))


def test_one_warning_a_process():
    memories._warn.cache_clear()
    variable = nn.Embedding(1, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SpeedTorch.PytorchModelFactory(variable, 5, 4, deviceType="cpu").zerosInit()
        assert caught == []
        SpeedTorch.ModelFactory(variable, 5, 4).zerosInit()
        SpeedTorch.ModelFactory(variable, 5, 4, CPUPinn=True).zerosInit()
        SpeedTorch.GPUPytorchModelFactory(variable, 5, 4).zerosInit()
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert "ask for CUDA" in str(warning.message)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind, tmp_path):
    switcher, _ = made(kind)
    switcher.uniformDistributionInit(-1, 1)
    switcher.saveCupy("rows")
    switcher.saveTorch(tmp_path / "rows.pt")
    assert np.array_equal(np.load("rows.npy"), switcher.getNumpyVersion())
    assert torch.equal(torch.load("rows.pt", weights_only=True), switcher.getTorchVar())
    for load, name in (("loadCupy", "rows.npy"), ("loadTorch", "rows.pt")):
        other = KINDS[kind].model(nn.Embedding(1, 4), 10, 4, **KINDS[kind].options)
        getattr(other, load)(name)
        assert np.array_equal(other.getNumpyVersion(), switcher.getNumpyVersion())


def test_old_files_load():
    array = np.random.default_rng(0).normal(size=(10, 4))
    np.save("old.npy", array)  # as cupy.save does it
    np.save("order.npy", np.asfortranarray(array))
    np.save("swapped.npy", array.astype(">f4"))
    torch.save(torch.from_numpy(array), "old.pt")
    torch.save(torch.from_numpy(array), "older.pt", _use_new_zipfile_serialization=False)
    for name in ("old.npy", "order.npy", "swapped.npy", "old.pt", "older.pt"):
        switcher, _ = made()
        (switcher.loadCupy if name.endswith("npy") else switcher.loadTorch)(name)
        assert np.array_equal(switcher.CUPYcorpus, array.astype(np.float32)), name


class Sneaky:
    def __reduce__(self):
        return print, ("this ran",)


BAD_FILES = """
loadCupy("nowhere.npy") -> StorageError: check the path
loadCupy("objects.npy") -> StorageError: is not a .npy file of numbers
loadCupy("other.npy") -> InvalidValueError: has shape \\(9, 4\\) but must be \\(10, 4\\)
loadCupy("whole.npy") -> InvalidTypeError: complex64
loadTorch("nowhere.pt") -> StorageError: check the path
loadTorch("sneaky.pt") -> StorageError: is not a file of tensors
saveCupy("no/folder.npy") -> StorageError: choose a folder
"""


def test_files_that_do_not_load(tmp_path, capsys):
    switcher, _ = made()
    np.save("objects.npy", np.array([Sneaky()], dtype=object), allow_pickle=True)
    np.save("other.npy", np.zeros((9, 4)))
    np.save("whole.npy", np.zeros((10, 4), dtype=np.complex64))
    (tmp_path / "text.npy").write_text("no array")
    torch.save(Sneaky(), "sneaky.pt")
    for refusal in refusals(BAD_FILES):
        check_refused(refusal, **{name: getattr(switcher, name) for name in ("loadCupy", "loadTorch", "saveCupy")})
    assert capsys.readouterr().out == ""
