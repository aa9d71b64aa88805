"""st.plan and `speedtransfer plan`: what they take, recommend, measure, show and refuse, and code that runs."""

import functools
import itertools
import json
from dataclasses import replace

import pytest
import torch
from cases import take_step
from refusals import check_refused, refusals
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, StorageError
from speedtransfer.planning import planner, this_machine
from speedtransfer.planning.hosts import CALL_S, LINKS
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.workload import make_workload
from speedtransfer.ranks.zipf import expected_distinct_share, expected_unique
from speedtransfer.units import format_seconds

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


def test_tables_of_this_package_and_sizes():
    model = nn.ModuleDict({"one": st.Embedding(50, 4), "many": st.MultiEmbedding([20, 30], 4)})
    model["bags"] = st.MultiEmbeddingBag([20, 30], 4)
    one, many, bags = workload(model, batch=10, lookups=2).tables
    assert one.is_table
    assert (bags.kind, bags.rows) == ("MultiEmbeddingBag", 50)
    assert (many.kind, many.rows, many.features, many.lookups) == ("MultiEmbedding", 50, ((20, 20), (30, 20)), 40)
    assert many.unique == expected_unique(20, 1.05, 20) + expected_unique(30, 1.05, 20)
    for sizes, names in (([(1e6, 8), [20, 8]], ["table0", "table1"]), ({"a": (10, 8)}, ["a"])):
        assert [table.name for table in workload(sizes).tables] == names


# --- optimizers ---------------------------------------------------------------------------------------------------------


def test_one_that_was_made_has_its_hyperparameters():
    first = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.5, betas=(0.1, 0.2), amsgrad=True)
    torch.optim.lr_scheduler.ExponentialLR(first, 0.5)  # which adds initial_lr to the group
    trainer = optimizer_given(first)
    group = trainer.make([nn.Parameter(torch.zeros(2))]).param_groups[0]
    assert trainer.name == "AdamW"
    assert (group["lr"], group["betas"], group["amsgrad"], group["initial_lr"]) == (0.5, (0.1, 0.2), True, 0.5)


# --- plans --------------------------------------------------------------------------------------------------------------

ON_CPU = Machine("m", host_bytes=1e9, disk_bytes=1e9)
FAST_GPU = Machine("gpu", "GPU", device_bytes_per_s=2e12, host_bytes_per_s=2e11, disk_bytes_per_s=5e9)
FAST_GPU = replace(FAST_GPU, link_up_bytes_per_s=5e10, link_down_bytes_per_s=5e10)


def gpu(device=80e9, host=500e9, disk=4e12):
    return replace(FAST_GPU, device_bytes=device, host_bytes=host, disk_bytes=disk)


def test_measured_here(monkeypatch):
    monkeypatch.setattr(planner, "_folder", lambda: planner.Path.cwd())
    plan = st.plan((2000, 8), batch=64, lookups=2, idle="lazy", storage_dtype=torch.float32)
    timed = {option.memory: option for option in plan.options if "measured" in option.how}
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
        assert len({option.form for option in plan.options}) == 7
    assert st.plan(size, batch=65_536, machine=gpu()).best.bound == "bus"
    few = st.plan((1000, 8), "SGD", batch=65_536, machine=gpu())
    assert not few.best.is_table
    assert "keep torch.nn" in str(few)
    nothing = st.plan(size, batch=65_536, machine=gpu(20e9, 10e9, 1e9))
    assert nothing.best is None
    assert "nothing fits; the smallest" in str(nothing)


def test_what_is_not_trained_has_no_gradient_and_no_state():
    model = nn.ModuleDict({"a": nn.Embedding(1000, 8), "b": nn.Embedding(1000, 8), "head": nn.Linear(8, 100)})
    trained, frozen = (st.plan(model.requires_grad_(trains), "AdamW", machine="h200") for trains in (True, False))
    assert frozen.dense_bytes * 4 == trained.dense_bytes
    assert frozen.bytes[next(iter(frozen.bytes))].state == 0


def test_sizes_that_are_given_instead():
    plan = st.plan((1000, 8), machine=gpu(), host_memory="1kB", disk="2 TB")
    assert (plan.machine.host_bytes, plan.machine.disk_bytes) == (1000, 2e12)
    (pinned,) = [option for option in plan.options if option.memory == "pinned" and option.level == 0]
    assert "of host memory, 1 kB are available" in pinned.reason


@pytest.mark.parametrize("optimizer", ["AdamW", "SparseAdam", None])
def test_code_of_sizes_runs(optimizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = st.plan({"users": (50, 8), "class": (20, 4)}, optimizer, machine=ON_CPU)
    for option in plan.options:
        names = {"st": st, "torch": torch}
        exec(option.code, names)
        assert names["users"].weight.shape == (50, 8)
        assert (optimizer is not None) == names["users"].weight.requires_grad
        assert "_freeze" not in option.code
        assert names["table_class"].weight.shape == (20, 4)
        if option.is_table:
            assert names["users"].table.memory == option.memory
            assert names["users"].weight.requires_grad == (optimizer is not None)
        if optimizer is not None and option.same:
            opt = getattr(torch.optim, optimizer)(names["users"].parameters())
            take_step(opt, names["users"](torch.tensor([1, 2])).sum())
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


def test_code_of_a_model_with_tables():
    model = nn.ModuleDict(
        {"one": nn.ModuleDict({"two": st.EmbeddingBag(50, 8, mode="max")}), "one_two": nn.Embedding(9, 8)}
    )
    model["all"] = st.MultiEmbedding([5, 6], 8)
    for optimizer, other in (("Adagrad", "dense"), ("SGD", "nn.Embedding(sparse=True)")):
        (plain, *rest) = st.plan(model, optimizer, machine=ON_CPU).options
        names = {"st": st, "torch": torch, "model": model}
        exec(plain.code, names)
        assert type(names["model"]["one"]["two"]) is nn.EmbeddingBag
        assert "# with the other arguments of 'one.two'" in rest[0].code
        assert all(option.memory != other for option in rest)
    del model["one"], model["all"]
    names["model"] = model
    (sparse,) = [
        each for each in st.plan(model, "SGD", machine=ON_CPU).options if each.memory == "nn.Embedding(sparse=True)"
    ]
    exec(sparse.code, names)
    assert model["one_two"].sparse


def test_data_is_json_and_complete(tmp_path):
    plan = st.plan((1_000_000, 32), torch.optim.Adam, 1024, 4, machine=gpu(), dense_ms=5)
    data = json.loads(json.dumps(plan.data()))
    assert data["best"]["step_s"] > 5e-3
    assert len(data["options"]) == len(plan.options)
    (held,) = [each for each in data["bytes"] if (each["storage_dtype"], each["state_dtype"]) == ("float32", "float32")]
    assert held["total"] == 1_000_000 * (3 * 32 * 4 + 4)
    assert held["last_step"] == 4_000_000
    parts = ("weight", "state", "last_step", "scale")
    assert all(each["total"] == sum(each[part] for part in parts) for each in data["bytes"])
    assert [size["share"] for size in data["cache"]] == sorted(size["share"] for size in data["cache"])
    with pytest.raises(StorageError):
        plan.draw(tmp_path / "none" / "plan.png")
    with pytest.raises(InvalidTypeError, match=r"path is \S+ \(int\) but must be the path of a picture"):
        plan.draw(3)


def test_a_cache_leaves_less_on_the_bus():
    plan = st.plan((100_000_000, 64), batch=65_536, machine=gpu(device=10e9))
    assert plan.best.memory == "pinned"
    assert len(plan.cache) >= 3
    assert all(a.up > b.up for a, b in itertools.pairwise(plan.cache))


def test_one_of_several_hosts():
    """It has its share of the rows, of which a step updates those that any host looks up; bytes and times by hand."""
    given = {"batch": 1000, "zipf": 0.0, "idle": "lazy", "storage_dtype": "float32", "machine": gpu(), "dense_ms": 3}
    plan = st.plan({"t": (1_000_000, 64)}, hosts=4, link="10Gbit, 2ms", **given)
    alone, found = plan.workload.tables[0], plan.hosts
    assert alone.rows == 250_000
    assert alone.unique == pytest.approx(expected_unique(1_000_000, 0.0, 4000) / 4)
    away = 0.75 * expected_unique(1_000_000, 0.0, 1000)
    assert (found.cost.ids, found.cost.rows) == (pytest.approx(8 * away), pytest.approx(256 * away))
    assert found.cost.sent == pytest.approx(520 * away + 2 * 3 * 64)
    # Five calls; rows and gradients, of 64 kB to each, wait for answers.
    assert found.parts["delays"] == pytest.approx(12 * 2e-3)
    assert found.parts["bytes"] == pytest.approx(found.cost.sent / 1.25e9, rel=0.01)
    assert found.parts["calls"] == 5 * CALL_S
    assert 1 <= found.busiest < 1.01
    assert not any(option.memory.startswith("nn.") for option in plan.options)
    assert 'st.Embedding(1000000, 64, process_group="world", memory=' in plan.best.code
    text = " ".join(str(plan).split())
    assert "4 hosts, a process each, by 10Gbit, 2ms (1.25 GB/s each way, 2.00 ms one way)" in text
    assert f"a step of all hosts: {format_seconds(plan.best.step_s)} as above and the exchange, " in text
    assert format_seconds(plan.best.step_s + found.seconds) in text
    several = st.plan([(1000, 8)] * 26, None, hosts=2, link="IB", machine=gpu())
    assert several.hosts.cost.calls < several.hosts.apart
    assert f"where the ids of all tables are parts of one tensor; else {several.hosts.apart} calls" in str(several)
    assert several.hosts.cost.gradients == 0, "frozen tables"


def test_owners_of_many_hosts_are_asked_for_about_as_much():
    """Of ids by Zipf's law, the first of which every host asks one owner for."""
    hosts = st.plan((100_000_000, 64), batch=65_536, hosts=8, link="ib", machine=gpu()).hosts
    found = {each.number: each for each in hosts.by_number()}
    assert list(found) == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert found[8] == hosts
    assert 1 <= found[2].busiest < found[64].busiest < found[1024].busiest < 1.2
    assert found[2].cost.rows < found[1024].cost.rows < 2 * found[2].cost.rows
    # The busiest is waited for.
    link = LINKS["IB"]
    assert found[1024].parts["bytes"] == found[1024].busiest * found[1024].cost.sent / link.bytes_per_s


REFUSED = r"""
plan((0, 8)) -> InvalidValueError: rows of 'table' is 0 but must be at least 1
plan((10, 8), batch=0) -> InvalidValueError: batch is 0 but must be at least 1
plan((2**49, 8)) -> InvalidValueError: rows of 'table' is 562949953421312 but must be at most 2\*\*48
plan((1.5, 8)) -> InvalidValueError: rows of 'table' is 1.5 but must be a whole number; pass for instance 1e9
plan((10, 8), lookups=0.5) -> InvalidValueError: lookups is 0.5 but must be at least 1
plan((10, 8), lookups={"tabel": 1}) -> InvalidValueError: names a table 'tabel', which is not there; did you mean 'table'
plan((10, 8), unique=2.0) -> InvalidValueError: must be above 0 and at most the lookups and the rows of 'table', 1
plan([(10, 8), (10, 8)], unique=1.0) -> InvalidValueError: unique is 1.0 for 2 tables; pass a dict
plan([]) -> InvalidValueError: sizes are empty
plan(nn.Linear(2, 2)) -> InvalidValueError: the model, a Linear, has no nn.Embedding
plan(nn.Embedding(9, 4).double()) -> InvalidTypeError: the weight of 'Embedding' is torch.float64, but plans are of rows
plan(3) -> InvalidTypeError: sizes are 3 but must be
plan((10, 8), hosts=4) -> InvalidValueError: hosts is given without link; pass both
plan((10, 8), hosts=1, link="IB") -> InvalidValueError: hosts is 1 but must be at least 2
plan((10, 8), hosts=4, link="25GbX") -> InvalidValueError: link is '25GbX'; did you mean '25GbE'
plan((10, 8), hosts=4, link="1.2.3Gbit,1ms") -> InvalidValueError: or a rate and a delay such as '10Gbit,0.05ms'
plan((10, 8), hosts=4, link=10) -> InvalidTypeError: link is 10 \(int\) but must be text; pass for instance '25GbE'
plan((10, 8), machine="h2000") -> InvalidValueError: machine is 'h2000'
plan((10, 8), machine=3) -> InvalidTypeError: machine is 3 \(int\) but must be a name
plan((10, 8), host_memory=True) -> InvalidValueError: host_memory is True but must be a size
plan((10, 8), machine=Machine("m", device="GPU")) -> InvalidValueError: machine 'm' has no figure device_bytes
plan((10, 8), "LBFGS") -> OptimizerError: LBFGS cannot train rows of a table
plan((10, 8), "AdmW") -> InvalidValueError: optimizer is 'AdmW'; did you mean 'AdamW' or 'Adam'
plan((10, 8), lambda params: None) -> InvalidTypeError: optimizer makes a NoneType but must make an optimizer
plan((10, 8), "SGD(momentm=0.9)") -> InvalidValueError: unexpected keyword argument 'momentm'
plan((10, 8), "SGD(lr=open('x'))") -> InvalidValueError: must be a name with keyword arguments or without
plan((10, 8), "no_such_package.Lion") -> InvalidValueError: No module named 'no_such_package'; install it
plan((10, 8), "os.path") -> InvalidValueError: is 'os.path' but os has no optimizers; choose one of torch.optim
"""


@pytest.mark.parametrize("refusal", refusals(REFUSED), ids=str)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(refusal, monkeypatch):
    monkeypatch.setattr(planner, "_measured", lambda *_: pytest.fail("measured"))
    check_refused(refusal, plan=st.plan, nn=nn, Machine=Machine)


# --- the command ------------------------------------------------------------------------------------------------------


SIZES = ["--rows", "1e6", "--dim", "64", "--ranks", "4", "--lookups", "65536"]


@pytest.fixture
def run(run, monkeypatch):
    # What this machine copies in a second is no matter here; test_planning_machines.py measures it.
    monkeypatch.setattr(this_machine, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(this_machine, "_BUDGET_S", 0.01)
    return functools.partial(run, "plan")


def test_bytes_and_times(run):
    given = ["--unique", "1000", "--distinct-share", "0.5"]
    code, out, _ = run(*SIZES, "--idle", "lazy", *given)
    assert code == 0
    assert "each looks up 1,000 distinct rows a step, 0.50 of these are distinct over all" in out
    share = expected_distinct_share([(1_000_000, 65_536)], 1.05, 4)
    assert f"{share:.2f} of these are distinct over all" in run(*SIZES, "--idle", "lazy")[1]
    rows = [line.split("  ") for line in out.partition("this machine:")[0].splitlines() if "  " in line]
    cells = ([cell for cell in row if cell.strip()] for row in rows)
    found = {name: [cell.strip() for cell in others] for name, *others in cells}
    # 750 rows of others: 8 bytes of id, 256 of row, 256 of gradient; 500 rows owned, with two planes of state.
    assert found["sharded"] == ["192 MB", "384 bytes", "6 kB", "192 kB", "192 kB", "5", "384 kB", "384 kB"]
    assert found['memory="shared"'] == ["192 MB", "768 bytes", "6 kB", "192 kB", "6", "640 kB", "384 kB"]
    assert found["nn.Embedding, sparse, DDP"] == ["768 MB", "24 kB", "768 kB", "3"]
    assert found["nn.Embedding, DDP"] == ["1.02 GB", "384 MB", "1"]


TABLE = ["--rows", "1000", "--dim", "160"]


def test_one_process(run):
    asked = ["--tokens", "50", "--rows-per-token", "16", "--unique", "500"]
    code, out, _ = run(*TABLE, "--storage", "bfloat16", "--state", "uint8", *asked)
    assert code == 0
    told = " ".join(out.split())
    assert "distinct" not in run(*TABLE)[1], "memory alone needs no lookups"
    assert "table: 1,000 x 160, 800 lookups a step, 500 of them distinct" in told
    # 320 bytes of weights; 160 with a scale of 8 bytes twice; 4 of the last step.
    held = "320 kB of weights, 320 kB of state, 4 kB of last steps, 16 kB of scales, 660 bytes a row"
    assert f"AdamW, idle rows exact, ids by Zipf's law with exponent 1.05; in bfloat16, uint8 state {held}" in told


FAST = ["--rows", "1000", "--dim", "8", "--machine", "h200", "--host-memory", "512GB"]


def test_json_and_pictures(run, tmp_path):
    """Of several tables, and of several hosts, whose picture is that of their bytes."""
    picture = str(tmp_path / "plan.png")
    found = json.loads(run(*FAST, "--rows", "2000", "--batch", "64", "--json", "-", "--picture", picture)[1])
    assert [(table["rows"], table["lookups"]) for table in found["tables"]] == [(1000, 64), (2000, 64)]
    sizes = {(tmp_path / "plan.png").stat().st_size}
    shared = ["--lookups", "64", "--hosts", "4", "--link", "25GbE", "--json", str(tmp_path / "plan.json")]
    assert run(*FAST, *shared, "--picture", picture)[0] == 0
    found = json.loads((tmp_path / "plan.json").read_text())["hosts"]
    assert (found["hosts"], found["calls"], found["link"]["name"]) == (4, 5, "25GbE")
    assert found["seconds"].keys() == {"bytes", "delays", "calls"}
    sizes.add((tmp_path / "plan.png").stat().st_size)
    assert len(sizes) == 2
    assert min(sizes) > 5000


RANKED = ["--rows", "1e6", "--dim", "64", "--lookups", "65536", "--rank", "--host-memory", "64GB"]


def test_machines_are_ranked(run, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("base: h200\nname: mine\n")
    prices = tmp_path / "prices.yaml"
    prices.write_text("mine: {hourly_price: 3, currency: EUR, date: 2026}")
    out = tmp_path / "ranking.json"
    code, text, _ = run(*RANKED, "--machine", str(own), "--json", str(out), "--picture", str(tmp_path / "rank.png"))
    assert code == 0
    assert "by the time of a step" in text
    data = json.loads(out.read_text())
    assert {"h200", "a100-pcie", "mine"} <= {each["machine"] for each in data["ranked"]}
    assert (tmp_path / "rank.png").read_bytes().startswith(b"\x89PNG")
    code, text, _ = run(*RANKED, "--machine", str(own), "--by", "hour", "--prices", str(prices), "--json", "-")
    assert json.loads(text)["ranked"][0]["machine"] == "mine"


BASES = {"SIZES": SIZES, "TABLE": TABLE, "FAST": FAST, "RANKED": RANKED}
# One of these, further arguments, and what is told.
WRONG = """
SIZES --comm-dtype in8 -> --comm-dtype is 'in8', not one of its values; did you mean 'int8'?
SIZES --distinct-share 0.1 -> --distinct-share is 0.1 but must be from 1 / --ranks to 1
SIZES --tokens 4 -> --lookups is given, and --tokens or --rows-per-token too; pass one or the others
RANKED --hosts 4 --link IB -> --rank is given with --hosts
SIZES --machine h200 -> --machine is given with --ranks
SIZES --host-memory 0 -> --host-memory is given with --ranks
SIZES --scale-block 64 -> scale_block is 64 but storage_dtype is None, and only float8 rows have blocks
TABLE --lookups 2.5 -> --lookups is 2.5 but must be a whole number from 1 on, or with --batch any; pass for instance 65536
TABLE --hosts 2 --link IB -> --hosts is given without the lookups of a step
TABLE --rows-per-token 2 -> --rows-per-token is given without --tokens
TABLE --scale-block 64 --storage int8 -> scale_block is 64 but storage_dtype is torch.int8, and only float8 rows have blocks
TABLE --idle exat -> idle is 'exat'
TABLE --storage int9 -> storage_dtype is 'int9', not one of its values; did you mean 'int8'
FAST --dense-ms inf -> --dense-ms is inf but must be finite
TABLE --comm-dtype int8 -> --comm-dtype is 'int8' without --ranks
TABLE --by hour -> --by is 'hour' without --rank
FAST --dim 8 --dim 9 -> --dim is given 3 times and --rows 1
FAST --picture plan.qqq -> 'plan.qqq' ends in '.qqq' but the picture is a PNG; use the ending .png
RANKED --prices none.yaml -> none.yaml
"""


@pytest.mark.parametrize("wrong", WRONG.strip().splitlines())
def test_what_makes_no_sense_is_told_in_one_line(run, wrong):
    arguments, words = wrong.split(" -> ")
    sizes, *others = arguments.split()
    code, _, err = run(*BASES[sizes], *others)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_the_help_lists_what_there_is():
    """It is shown without the modules that know."""
    from speedtransfer.planning import command
    from speedtransfer.planning.footprint import STATE, STORAGE
    from speedtransfer.planning.rank import MEASURES

    assert (tuple(STORAGE), tuple(STATE)) == (command.STORAGE_NAMES, command.STATE_NAMES)
    assert (tuple(MEASURES), tuple(LINKS)) == (command.MEASURE_NAMES, command.LINK_NAMES)
