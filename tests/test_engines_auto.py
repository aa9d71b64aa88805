"""Choice by measurement with the CPU in the part of the device, and the engine of a table."""

import itertools

import pytest
import torch
from cases import raising
from test_engines import OnCpu

import speedtransfer as st
from speedtransfer.engines import AutoEngine, HostEngine, ReferenceEngine, calibration, timing
from speedtransfer.engines.calibration import Calibration, Point, load, machine_of, remember
from speedtransfer.errors import DeviceError, InvalidValueError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path / "cache"))
    calibration._known.clear()
    yield tmp_path / "cache"
    calibration._known.clear()


@pytest.fixture
def engine():
    return AutoEngine({"host": HostEngine(), "reference": ReferenceEngine()}, CPU)


@pytest.mark.sweep
class TestAuto(OnCpu):
    pass


def made(points, rate=0.0):
    return Calibration(machine_of(CPU), [Point(*point) for point in points], rate)


POINTS = [
    ("gather", 16, 1000, {"host": 3e-6, "reference": 1e-6}),
    ("gather", 512, 100_000, {"host": 1e-3, "reference": 2e-3}),
    ("scatter", 512, 100_000, {"host": 5e-3, "reference": 4e-3}),
]


class TestChoice:
    def test_the_fastest_at_the_nearest_point(self, engine):
        made(POINTS).save()
        assert engine.choose("gather", 8, 500) == "reference"
        assert engine.choose("gather", 700, 50_000) == "host"
        assert engine.choose("scatter", 16, 10) == "reference"

    def test_an_engine_waits_for_what_others_may_still_do(self):
        calls = []

        def noting(name):
            made = ReferenceEngine()
            made.name = name
            made.gather = lambda *given, **options: calls.append(f"{name} gathers")
            made.scatter = lambda *given, **options: calls.append(f"{name} scatters")
            made.wait = lambda writes_only=False: calls.append(f"wait for {'writes of ' if writes_only else ''}{name}")
            return made

        engine = AutoEngine({name: noting(name) for name in ("mapped", "staged")}, CPU)
        plane, index, rows = torch.zeros(4, 4), torch.tensor([1]), [torch.zeros(1, 4)]

        def steps(gather, scatter, count=2):
            remember(CPU, made([("gather", 16, 1, {gather: 1e-6}), ("scatter", 16, 1, {scatter: 1e-6})]))
            calls.clear()
            for _ in range(count):
                engine.gather([plane], index, rows)
                engine.scatter([plane], index, rows)
            return calls

        assert steps("mapped", "mapped") == ["mapped gathers", "mapped scatters"] * 2
        assert engine.runs_kernels
        first = ["wait for writes of mapped", "staged gathers", "wait for mapped", "staged scatters"]
        assert steps("staged", "staged") == [*first, "staged gathers", "staged scatters"]
        assert not engine.runs_kernels  # which would not wait for this one
        # Only what one has left to do makes the other wait.
        there = ["wait for writes of staged", "mapped gathers", "wait for mapped", "staged scatters"]
        assert steps("mapped", "staged") == there * 2
        back = ["wait for writes of mapped", "staged gathers", "wait for staged", "mapped scatters"]
        assert steps("staged", "mapped") == [back[1], *back[2:], *back]

    def test_a_step_stays_with_one_engine(self, engine):
        """Rows of one plane are gathered, those of three scattered: what was chosen holds for all that a row has."""
        used, bests = [], itertools.product(("gather", "scatter"), ((64, "host"), (192, "reference")))
        remember(CPU, made([(way, size, 1000, {"host": 1, "reference": 1, best: 0.5}) for way, (size, best) in bests]))
        planes, index = [torch.zeros(5000, 16) for _ in range(3)], torch.arange(1000)
        for engine_name in ("host", "reference"):
            one = engine.engines[engine_name]
            for call in ("gather", "scatter"):
                setattr(one, call, lambda *args, name=engine_name, call=call: used.append((name, call)))
        rows = [torch.zeros(1000, 16) for _ in range(3)]
        engine.gather(planes[:1], index, rows[:1])
        for _ in range(2):
            engine.scatter(planes, index, rows)
            engine.gather(planes[:1], index, rows[:1])
        assert used == [("host", "gather"), *[("reference", "scatter"), ("reference", "gather")] * 2]


class TestCalibration:
    def test_measures_every_call_and_engine(self):
        plane, seen = torch.zeros(1 << 20, dtype=torch.uint8), []
        engines = {"host": HostEngine(), "reference": ReferenceEngine()}
        found = timing.calibrate(engines, CPU, plane, (16, 4096), (10, 100, 10**6), seen.append)
        assert found.points == seen
        sizes = {(p.direction, p.row_bytes, p.num_rows) for p in seen}
        counts = {16: (10, 100, (1 << 20) // 16), 4096: (10, 100, 256)}
        assert sizes == {(d, size, n) for d in ("gather", "scatter") for size, some in counts.items() for n in some}
        assert all(set(p.seconds) == set(engines) and min(p.seconds.values()) > 0 for p in seen)
        assert found.copy_bytes_per_s > 0

    def test_an_engine_that_moves_wrong_rows_is_left_out(self, caplog):
        wrong, broken, right = (ReferenceEngine() for _ in range(3))
        wrong.gather = lambda planes, index, rows, *given, **options: right.gather(planes, index.flip(0), rows)
        broken.scatter = raising(DeviceError("no such luck"))
        engines = {"wrong": wrong, "broken": broken, "reference": right}
        found = timing.calibrate(engines, CPU, torch.zeros(1 << 16, dtype=torch.uint8), (16,), (100,))
        assert [set(point.seconds) for point in found.points] == [{"reference"}] * 2
        assert "'wrong' is left out of the calibration: it moves rows wrongly" in caplog.text
        assert "no such luck" in caplog.text
        none = timing.calibrate({"wrong": wrong}, CPU, torch.zeros(1 << 16, dtype=torch.uint8), (16,), (100,))
        assert none.points == []

    def test_other_versions_do_not_count(self, monkeypatch):
        made(POINTS).save()
        monkeypatch.setattr(calibration, "__version__", "9.9")
        assert load(CPU) is None


def test_the_engine_of_a_table(monkeypatch):
    for name, used in (("reference", "reference"), ("mapped", "host"), ("auto", "host"), ("", "host")):
        monkeypatch.setenv("SPEEDTRANSFER_ENGINE", name)
        table = st.Table(4, 4, memory="pageable", device="cpu")
        assert table.engine == used
    table.engine = ReferenceEngine("cpu")
    assert table.engine == "reference"
    monkeypatch.setenv("SPEEDTRANSFER_ENGINE", "hsot")
    with pytest.raises(InvalidValueError, match=r"SPEEDTRANSFER_ENGINE is 'hsot' .* did you mean 'host'"):
        st.Table(4, 4, memory="pageable", device="cpu")
    for engine, name in ((ReferenceEngine("meta"), "'reference' on meta"), *((n, n) for n in ("mapped", "hsot"))):
        with pytest.raises(InvalidValueError, match=f"{name}.*, which does not move rows of memory='pageable' on cpu"):
            table.engine = engine
    table.engine = "auto"  # where there is nothing to choose from the default
    assert table.engine == "host"
