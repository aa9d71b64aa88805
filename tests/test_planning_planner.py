"""st.plan: what it recommends, measures, shows and refuses, and code that runs."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, OptimizerError, StorageError
from speedtransfer.planning import planner
from speedtransfer.planning.machine import Machine

RATES = {
    "device_bytes_per_s": 2e12,
    "link_up_bytes_per_s": 5e10,
    "link_down_bytes_per_s": 5e10,
    "host_bytes_per_s": 2e11,
}


def gpu(device=80e9, host=500e9, disk=4e12, **more):
    given = {"device_bytes": device, "host_bytes": host, "disk_bytes": disk, "disk_bytes_per_s": 5e9, **RATES, **more}
    return Machine("gpu", device="GPU", **given)


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
    size, given = (100_000_000, 128), {"batch": 65_536}
    total = {option.form: option for option in st.plan(size, machine=gpu(), **given).options}
    assert len(total) == 6
    everything = st.plan(size, machine=gpu(device=1e12), **given).best
    assert (everything.level, everything.memory) == (0, "device")
    host = st.plan(size, machine=gpu(), **given).best
    assert (host.level, host.memory, host.bound) == (0, "pinned", "bus")
    less = st.plan(size, machine=gpu(device=20e9, host=100e9), **given).best
    assert (less.level, less.memory) == (1, "pinned")
    least = st.plan(size, machine=gpu(device=20e9, host=45e9), **given).best
    assert (least.level, least.memory) == (2, "pinned")
    files = st.plan(size, machine=gpu(device=20e9, host=10e9), **given)
    assert (files.best.level, files.best.memory, files.best.form.storage) == (3, "mmap", files.best.form.storage)
    nothing = st.plan(size, machine=gpu(device=20e9, host=10e9, disk=1e9), **given)
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
    plan = st.plan(
        {"users": (50, 8), "class": (20, 4)}, optimizer, machine=Machine("m", host_bytes=1e9, disk_bytes=1e9)
    )
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
    modules = {"a": nn.Embedding(50, 8), "b": nn.EmbeddingBag(30, 8), "tied": nn.Embedding(50, 8)}
    model = nn.ModuleDict(modules)
    model["tied"].weight = model["a"].weight
    plan = st.plan(model, machine=Machine("m", host_bytes=1e9, disk_bytes=1e9))
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
    sizes = plan.cache
    assert len(sizes) >= 3
    assert all(a.up > b.up and a.step_s >= b.step_s for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"idle": "exat"}, InvalidValueError, "idle is 'exat'"),
        ({"dense_ms": float("nan")}, InvalidValueError, "dense_ms is nan"),
        ({"storage_dtype": "int9"}, InvalidValueError, "storage_dtype is 'int9'; did you mean 'int8'"),
        ({"machine": "h2000"}, InvalidValueError, "machine is 'h2000'"),
        ({"machine": 3}, InvalidTypeError, "machine is 3 (int)"),
        ({"host_memory": "much"}, InvalidValueError, "host_memory is 'much' but must be"),
        ({"disk": -1}, InvalidValueError, "disk is"),
        ({"optimizer": "LBFGS"}, OptimizerError, "LBFGS cannot train rows of a table"),
        ({"optimizer": "AdmW"}, InvalidValueError, "did you mean 'AdamW'"),
        ({"machine": Machine("m", device="GPU")}, InvalidValueError, "machine 'm' has no figure device_bytes"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(given, kind, words, monkeypatch):
    monkeypatch.setattr(planner, "_measured", lambda *_: pytest.fail("measured"))
    with pytest.raises(kind) as error:
        st.plan((1000, 8), **given)
    assert words in str(error.value)


def test_a_disk_that_cannot_be_measured_is_not_said_to_be(monkeypatch, tmp_path):
    """And the rate is that of the folder in which files are tried."""
    asked = []
    monkeypatch.setattr(planner, "_folder", lambda: tmp_path)
    monkeypatch.setattr(planner, "disk_bytes", lambda *_: 1.0)
    monkeypatch.setattr(
        planner, "this_machine", lambda *given, **_: asked.append(given) or Machine("m", host_bytes=1e9)
    )
    workload = planner.make_workload((10, 4), planner.optimizer_given("SGD"), 1, 1, 1.0, None, "auto")
    here = Machine("m", host_bytes=1e9, disk_bytes=1e9)
    options = planner.make_options(workload, planner.forms_for(workload, None, None), here)
    assert planner._with_disk_rate(here, workload, options) == here
    assert asked == [(tmp_path,)]
