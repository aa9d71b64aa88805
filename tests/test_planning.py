"""st.plan: what it takes, recommends, measures, shows and refuses, and code that runs."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from refusals import check_refused, refusals
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
from speedtransfer.planning import planner
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.workload import make_workload
from speedtransfer.ranks.zipf import expected_unique

# --- workloads ----------------------------------------------------------------------------------------------------------


def workload(given, batch=1, lookups=1, zipf=1.05, unique=None):
    return make_workload(given, optimizer_given("AdamW"), batch, lookups, zipf, unique, "auto")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(1000, 16)
        self.items = nn.EmbeddingBag(500, 8)
        self.head = nn.Linear(16, 500)
        self.tied = nn.Embedding(1000, 16)
        self.tied.weight = self.users.weight


def test_a_model_by_names():
    found = workload(Model(), batch=32, lookups={"items": 4})
    users, items = found.tables
    assert (users.name, users.names, users.rows, users.dim) == ("users", ("users", "tied"), 1000, 16)
    assert (users.lookups, users.kind) == (32, "Embedding")
    assert (items.lookups, items.bag, items.kind) == (128, 4, "EmbeddingBag")
    assert users.unique == expected_unique(1000, 1.05, 32)
    assert found.dense_bytes == 4 * 500 * 17
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(1 << 33, 128), nn.Linear(128, 1))
    (table,) = workload(model).tables
    assert (table.rows, table.dim, table.names) == (1 << 33, 128, ("0",))


def test_tables_of_this_package():
    model = nn.ModuleDict({"one": st.Embedding(50, 4), "many": st.MultiEmbedding([20, 30], 4)})
    model["bags"] = st.MultiEmbeddingBag([20, 30], 4)
    one, many, bags = workload(model, batch=10, lookups=2).tables
    assert (bags.kind, bags.rows) == ("MultiEmbeddingBag", 50)
    assert one.is_table
    assert (many.kind, many.rows, many.features, many.lookups) == ("MultiEmbedding", 50, ((20, 20), (30, 20)), 40)
    assert many.unique == expected_unique(20, 1.05, 20) + expected_unique(30, 1.05, 20)


@pytest.mark.parametrize(
    ("sizes", "names"),
    [((1e6, 8), ["table"]), ([(10, 8), [20, 8]], ["table0", "table1"]), ({"a": (10, 8), "b": (20, 4)}, ["a", "b"])],
)
def test_sizes(sizes, names):
    assert [table.name for table in workload(sizes).tables] == names


def test_other_numbers_of_rows():
    given = workload((1000, 8), 100, 3, unique=50.0)
    larger = given.with_rows(10)
    assert larger.tables[0].rows == 10_000
    ratio = 50 / expected_unique(1000, 1.05, 300)
    assert larger.unique == pytest.approx(ratio * expected_unique(10_000, 1.05, 300))
    assert given.with_rows(1).unique == pytest.approx(50)


# --- optimizers ---------------------------------------------------------------------------------------------------------


def made(given):
    trainer = optimizer_given(given)
    return trainer.name, trainer.make([nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize("given", ["SGD(momentum=0.5)", torch.optim.SGD, lambda params: torch.optim.SGD(params, 0.1)])
def test_every_way_makes_an_optimizer(given):
    name, optimizer = made(given)
    assert type(optimizer) is torch.optim.SGD
    assert name in ("SGD(momentum=0.5)", "SGD", "<lambda>")


def test_sizes_of_rows_are_kept_from_plan_to_plan():
    # They are kept by what makes the optimizer.
    assert optimizer_given("SGD(momentum=0.5)") == optimizer_given("SGD(momentum=0.5)")
    assert optimizer_given("SGD(momentum=0.5)") != optimizer_given("SGD(momentum=0.6)")


def test_one_that_was_made_has_its_hyperparameters():
    first = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.5, betas=(0.1, 0.2), amsgrad=True)
    torch.optim.lr_scheduler.ExponentialLR(first, 0.5)  # which adds initial_lr to the group
    name, optimizer = made(first)
    group = optimizer.param_groups[0]
    assert name == "AdamW"
    assert (group["lr"], group["betas"], group["amsgrad"], group["initial_lr"]) == (0.5, (0.1, 0.2), True, 0.5)


# --- plans --------------------------------------------------------------------------------------------------------------

RATES = {
    "device_bytes_per_s": 2e12,
    "link_up_bytes_per_s": 5e10,
    "link_down_bytes_per_s": 5e10,
    "host_bytes_per_s": 2e11,
}
ON_CPU = Machine("m", host_bytes=1e9, disk_bytes=1e9)


def gpu(device=80e9, host=500e9, disk=4e12):
    sizes = {"device_bytes": device, "host_bytes": host, "disk_bytes": disk, "disk_bytes_per_s": 5e9}
    return Machine("gpu", device="GPU", **sizes, **RATES)


def test_measured_here(monkeypatch):
    monkeypatch.setattr(planner, "_folder", lambda: planner.Path.cwd())
    plan = st.plan((2000, 8), batch=64, lookups=2, idle="lazy", storage_dtype="float32")
    timed = {option.memory: option for option in plan.options if option.trial is not None}
    assert plan.here
    assert {"nn.Embedding", "nn.Embedding(sparse=True)", "pageable", "mmap"} <= timed.keys()
    assert all(option.how == "measured" and option.step_s > 0 for option in timed.values())
    assert plan.best in plan.options
    assert plan.best.fits
    assert "measured here" in str(plan)


def test_lossless_first_then_smaller_then_files():
    size, less = (100_000_000, 128), {"device": 20e9}
    for sizes, level, memory in (
        ({"device": 1e12}, 0, "device"),
        ({}, 0, "pinned"),
        ({**less, "host": 100e9}, 1, "pinned"),
        ({**less, "host": 45e9}, 2, "pinned"),
        ({**less, "host": 10e9}, 3, "mmap"),
    ):
        plan = st.plan(size, batch=65_536, machine=gpu(**sizes))
        assert (plan.best.level, plan.best.memory) == (level, memory)
        assert len({option.form for option in plan.options}) == 6
    assert st.plan(size, batch=65_536, machine=gpu()).best.bound == "bus"
    nothing = st.plan(size, batch=65_536, machine=gpu(20e9, 10e9, 1e9))
    assert nothing.best is None
    assert "nothing fits; the smallest" in str(nothing)


def test_torch_where_that_is_enough():
    plan = st.plan((1000, 8), "SGD", batch=65_536, machine=gpu())
    assert not plan.best.is_table
    assert "keep torch.nn" in str(plan)


def test_sizes_that_are_given_instead():
    plan = st.plan((1000, 8), machine=gpu(), host_memory="1kB", disk="2 TB")
    assert (plan.machine.host_bytes, plan.machine.disk_bytes) == (1000, 2e12)
    (pinned,) = [option for option in plan.options if option.memory == "pinned" and option.level == 0]
    assert "of host memory, 1 kB are available" in pinned.reason


@pytest.mark.parametrize("optimizer", ["AdamW", None])
def test_code_of_sizes_runs(optimizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = st.plan({"users": (50, 8), "class": (20, 4)}, optimizer, machine=ON_CPU)
    for option in plan.options:
        names: dict[str, object] = {"st": st, "torch": torch}
        exec(option.code, names)
        assert names["users"].weight.shape == (50, 8)
        assert names["table_class"].weight.shape == (20, 4)
        if option.is_table:
            assert names["users"].table.memory == option.memory
            assert names["users"].weight.requires_grad == (optimizer is not None)
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()


def test_code_of_a_model_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.ModuleDict({"a": nn.Embedding(50, 8), "b": nn.EmbeddingBag(30, 8), "tied": nn.Embedding(50, 8)})
    model["tied"].weight = model["a"].weight
    plan = st.plan(model, machine=ON_CPU)
    (option,) = [each for each in plan.options if each.memory == "mmap" and each.form.storage == "int8"]
    exec(option.code, {"st": st, "torch": torch, "model": model})
    assert all(module.table.memory == "mmap" for module in model.values())
    assert model["a"].table is model["tied"].table
    assert model["b"].table.dtype == torch.int8


def test_data_is_json_and_complete(tmp_path):
    plan = st.plan((1_000_000, 32), torch.optim.Adam, 1024, 4, machine=gpu(), dense_ms=5)
    data = json.loads(json.dumps(plan.data()))
    assert data["best"]["step_s"] > 5e-3
    assert len(data["options"]) == len(plan.options)
    (held,) = [each for each in data["bytes"] if (each["storage_dtype"], each["state_dtype"]) == ("float32", "float32")]
    assert held["total"] == 1_000_000 * (3 * 32 * 4 + 4)
    assert held["last_step"] == 4_000_000
    assert [size["share"] for size in data["cache"]] == sorted(size["share"] for size in data["cache"])
    plan.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(StorageError):
        plan.draw(tmp_path / "none" / "plan.png")
    with pytest.raises(InvalidValueError, match=r"ends in '\.jpg' but the picture is a PNG"):
        plan.draw(tmp_path / "plan.jpg")
    with pytest.raises(InvalidTypeError, match="path is a int but must be the path of a picture"):
        plan.draw(3)


def test_a_cache_leaves_less_on_the_bus():
    plan = st.plan((100_000_000, 64), batch=65_536, machine=gpu(device=10e9))
    assert plan.best.memory == "pinned"
    assert len(plan.cache) >= 3
    assert all(a.up > b.up and a.step_s >= b.step_s for a, b in itertools.pairwise(plan.cache))


REFUSED = r"""
plan((0, 8)) -> InvalidValueError: rows of 'table' is 0 but must be at least 1
plan((2**49, 8)) -> InvalidValueError: rows of 'table' is 562949953421312 but must be at most 2\*\*48
plan((10, 2**30)) -> InvalidValueError: dim of 'table' is 1073741824 but must be at most 2\*\*20
plan((1.5, 8)) -> InvalidValueError: rows of 'table' is 1.5 but must be a whole number; pass for instance 1e9
plan((10, 8), batch=0) -> InvalidValueError: batch is 0 but must be at least 1
plan((10, 8), lookups=0.5) -> InvalidValueError: lookups is 0.5 but must be a number from 1 on
plan((10, 8), lookups={"tabel": 1}) -> InvalidValueError: names a table 'tabel', which is not there; did you mean 'table'
plan((10, 8), zipf=-1) -> InvalidValueError: zipf is -1 but must be a number from 0 on
plan((10, 8), unique=2.0) -> InvalidValueError: must be above 0 and at most the lookups and the rows of 'table', 1
plan([(10, 8), (10, 8)], unique=1.0) -> InvalidValueError: unique is 1.0 for 2 tables; pass a dict
plan([]) -> InvalidValueError: sizes are empty
plan(nn.Linear(2, 2)) -> InvalidValueError: the model, a Linear, has no nn.Embedding
plan(3) -> InvalidTypeError: sizes are 3 but must be
plan([1, 2, 3]) -> InvalidTypeError: sizes are
plan({"a": 3}) -> InvalidTypeError: sizes are
plan((10, 8), idle="exat") -> InvalidValueError: idle is 'exat'
plan((10, 8), dense_ms=float("nan")) -> InvalidValueError: dense_ms is nan
plan((10, 8), storage_dtype="int9") -> InvalidValueError: storage_dtype is 'int9'; did you mean 'int8'
plan((10, 8), machine="h2000") -> InvalidValueError: machine is 'h2000'
plan((10, 8), machine=3) -> InvalidTypeError: machine is 3 \(int\)
plan((10, 8), machine=Machine("m", device="GPU")) -> InvalidValueError: machine 'm' has no figure device_bytes
plan((10, 8), host_memory="much") -> InvalidValueError: host_memory is 'much' but must be
plan((10, 8), disk=-1) -> InvalidValueError: disk is
plan((10, 8), "LBFGS") -> OptimizerError: LBFGS cannot train rows of a table
plan((10, 8), "AdmW") -> InvalidValueError: optimizer is 'AdmW'; did you mean 'AdamW'
plan((10, 8), lambda params: None) -> InvalidTypeError: optimizer makes a NoneType but must make an optimizer
plan((10, 8), 3) -> InvalidTypeError: optimizer is 3 \(int\) but must be an optimizer
plan((10, 8), "SGD(momentm=0.9)") -> InvalidValueError: unexpected keyword argument 'momentm'
plan((10, 8), "SGD(lr=-1.0)") -> InvalidValueError: optimizer is 'SGD\(lr=-1.0\)' but Invalid learning rate
plan((10, 8), "SGD(0.1)") -> InvalidValueError: must be a name with keyword arguments or without
plan((10, 8), "SGD(lr=open('x'))") -> InvalidValueError: must be a name with keyword arguments or without
plan((10, 8), "AdamW+") -> InvalidValueError: must be a name with keyword arguments or without
plan((10, 8), "no_such_package.Lion") -> InvalidValueError: No module named 'no_such_package'; install it
plan((10, 8), "torch.optim.Optimizer") -> InvalidValueError: optimizer is 'torch.optim.Optimizer'; choose from
plan((10, 8), "os.path") -> InvalidValueError: is 'os.path' but os has no optimizers; choose one of torch.optim
"""


@pytest.mark.parametrize("refusal", refusals(REFUSED), ids=str)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(refusal, monkeypatch):
    monkeypatch.setattr(planner, "_measured", lambda *_: pytest.fail("measured"))
    check_refused(refusal, plan=st.plan, nn=nn, Machine=Machine)


def test_a_disk_that_cannot_be_measured_is_not_said_to_be(monkeypatch, tmp_path):
    """And the rate is that of the folder in which files are tried."""
    asked = []
    monkeypatch.setattr(planner, "_folder", lambda: tmp_path)
    monkeypatch.setattr(planner, "disk_bytes", lambda *_: 1.0)
    unknown = Machine("m", host_bytes=1e9)
    monkeypatch.setattr(planner, "this_machine", lambda *given, **_: asked.append(given) or unknown)
    work = workload((10, 4))
    options = planner.make_options(work, planner.forms_for(work, None, None), ON_CPU)
    assert planner._with_disk_rate(ON_CPU, work, options) == ON_CPU
    assert asked == [(tmp_path,)]
