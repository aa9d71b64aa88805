"""bench/experiments/: each runs small, and its checks notice what is wrong."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from speedtransfer.benchmark.measure import measure
from speedtransfer.benchmark.report import markdown, plot
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.cuda import cuda_status

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}


@pytest.fixture(autouse=True)
def suites(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("store").suites()


@pytest.fixture
def tax(suites, monkeypatch):
    module = suites["tax"].module
    monkeypatch.setattr(module, "_SPIN_S", 0.0)
    return module


def shown(suite: str, groups: list[GroupResult]) -> str:
    """The markdown of a result, of which a picture can be drawn."""
    environment = {
        "device": "A CPU",
        "commit": "0" * 40,
        "dirty": False,
        "date": "2026-01-02",
        "versions": {"torch": "2"},
    }
    recorded = {"suite": suite, "quick": False, "environment": environment, "groups": [g.to_json() for g in groups]}
    assert plot(recorded).startswith(b"\x89PNG")
    return markdown(recorded)


def test_each_is_declared_as_a_suite_is(suites):
    for name in importlib.import_module("store").EXPERIMENTS:
        groups = suites[name].groups(CPU, True, seed=3, rows=5, whatever=1)
        assert len({group.title for group in groups}) == len(groups)
        assert len(suites[name].groups(CPU, False)) >= len(groups)
        assert suites[name].declared("NOTE", "")


# --- compute against transfer -------------------------------------------------------------------------------------------


def test_tax_compares_the_same_three_ways(tax):
    found = [measure(group, CPU, **FAST) for group in tax.groups(CPU, True)[:2]]
    assert all([case.name for case in group.ran] == [tax.HOST, tax.RESIDENT, tax.COPIES] for group in found)
    assert "| NumPy | " in shown("tax", found)
    for case in tax._cases(40, CPU, 0):
        with pytest.raises(AssertionError, match="of its norm off"):
            case.check()  # nothing has run yet
        case.run()
        case.check()


# --- other libraries ----------------------------------------------------------------------------------------------------


def test_peers_compares_tables_before_it_times_steps():
    peers = importlib.import_module("experiments.peers")
    by_title = {
        group.title: measure(group, CPU, **FAST) for group in peers.groups(CPU, True) if "3 tables" in group.title
    }
    for title, found in by_title.items():
        ran, ours = set(found.by_name), {case.name for case in found.cases if case.role == "ours"}
        assert ours <= ran
        assert len(ours) == (4 if title.endswith("AdamW") else 2)
        missing = [case.error for case in found.cases if case.name in ("FBGEMM", "TorchRec, fused", "TFRA")]
        assert all("not installed" in error or "peers" in error or "not pooled" in error for error in missing)
    data = peers.Data(peers.QUICK[-1], "SGD")
    faster = functools.partial(
        peers.modules, kind=torch.nn.EmbeddingBag, make=functools.partial(torch.optim.SGD, lr=0.02)
    )
    for same in (True, False):
        wrong = peers.Training(peers.Contender("wrong", faster, same), data)
        wrong.run()
        with pytest.raises(AssertionError, match="a weight is") if same else contextlib.nullcontext():
            wrong.check()


# --- mixed precision ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(suites, monkeypatch):
    """On a tiny network, with no memory measured."""
    module = suites["mixed"].module
    monkeypatch.setattr(module, "memory_of", lambda *given: {"host_bytes": 1000})
    for limit in ("_MOST_STEP_S", "_MOST_TRAINING_S"):
        monkeypatch.setattr(module, limit, math.inf)
    tiny = module._QUICK._replace(classes=50, dim=4, hidden=8, windows=2048, held_out=200, lr=1e-2)
    monkeypatch.setattr(module, "_QUICK", tiny)
    return module


def test_fp32_is_torch_nn_to_rounding_on_stretches_of_the_text(mixed):
    training = mixed.Training(mixed.FP32, mixed._QUICK, 64, CPU, 0, {})
    windows = training.windows.train
    assert windows.shape[1] == 3
    counts = torch.bincount(windows[:, -1])
    assert len(counts) == 50
    assert counts[0] == counts.max(), "words are numbered by frequency"
    assert 0.05 < len(training.windows.held_out) / len(windows) < 0.2
    training.restart()
    model, batches = training.model, training._batches
    plain = nn.Embedding(training.windows.num_words, 4)
    plain.load_state_dict({"weight": model.words.state_dict()["weight"]})
    mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 50))
    mlp.load_state_dict(model.mlp.state_dict())
    optimizer = torch.optim.AdamW([*plain.parameters(), *mlp.parameters()], lr=training.optimizer.defaults["lr"])
    for _ in range(3):
        batch = next(batches)
        training._batches = iter([batch])
        training.run()
        F.cross_entropy(mlp(plain(batch[:, :-1]).flatten(1)), batch[:, -1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.words.state_dict()["weight"], plain.weight.detach(), rtol=1e-4, atol=1e-5)


def test_every_form_is_measured_and_judged(mixed, monkeypatch):
    found = measure(mixed.groups(CPU, True)[0], CPU, **FAST)
    assert [case.name for case in found.ran] == [form.name for form in mixed.FORMS]
    for case in found.ran:
        assert 0 <= case.figures[mixed.ACCURACY] <= 1
        assert case.figures[mixed.LOSS] < math.log(50)
    text = shown("mixed", [found])
    assert "- the device lists " in text
    assert "| accuracy, by windows of a batch | 128 |" in text
    case = mixed.Training(mixed.FORMS[2], mixed._QUICK, 64, CPU, 0, {"loss": 1.0, "seconds": 1.0})
    case.run()
    monkeypatch.setattr(mixed.Training, "evaluate", lambda training: (0.1, 1.2))
    with pytest.raises(AssertionError, match=r"ends with a loss of 1\.2000, FP32 with 1\.0000"):
        case.check()


# --- fewer bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gradients", "rows of a table"])
def test_every_method_comes_to_the_loss_of_one_process(suites, kind):
    exchange = suites["exchange"].module
    (group,) = [group for group in exchange.groups(CPU, True) if group.params["kind"] == kind]
    found = measure(group, CPU, **FAST)
    assert [case.name for case in found.ran] == list(exchange.METHODS[kind])
    sent = [case.figures["sent_bytes"] * case.figures["steps"] for case in found.ran]
    assert max(sent[1:]) < sent[0]
    assert f"| {found.ran[0].name} | " in shown("exchange", [found]).replace("**", "")


def test_what_did_not_come_to_the_loss_is_told(suites, monkeypatch):
    exchange, how = suites["exchange"].module, ("gradients", suites["exchange"].module._QUICK, 2, 16, 1)
    whole = {"losses": [0.5, 0.3], "sent_bytes": 160.0, "seconds": [1.0]}
    found = {"all-reduce": whole, "one_bit_hook": {"losses": [0.5, 0.4], "sent_bytes": 10.0, "seconds": []}}
    alone = {"all-reduce": {"losses": [0.5, 0.3]}}
    monkeypatch.setattr(exchange, "train", lambda ranks, *_: found if ranks > 1 else alone)
    first, signs = exchange._measured(*how)
    assert first.figures == {"steps": 16.0, "sent_bytes": 10.0, "loss": 0.3}
    assert signs.error == "did not come to a loss of 0.303 in 48 steps"
    groups = [GroupResult("train", {"kind": "gradients", "ranks": 2}, [first, signs])]
    assert "- not run: train, one_bit_hook: did not come" in shown("exchange", groups)
    alone["all-reduce"]["losses"] = [0.5, 0.31]
    with pytest.raises(AssertionError, match=r"0\.3, but one process 0\.31"):
        exchange._measured(*how)


@pytest.mark.parametrize("name", ["OneBitState", "one_bit_hook", "BlockMomentumAverager"])
def test_the_package_says_where_it_is(name):
    for package in ("speedtransfer", "speedtransfer.ranks"):
        with pytest.raises(
            ImportError, match=rf"{package}\.{name} is no part of the package any more; copy it from ex"
        ):
            getattr(importlib.import_module(package), name)


# --- plans and a step on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plans_are_compared_with_what_a_step_takes(suites, monkeypatch, tmp_path):
    plans = suites["plan_accuracy"].module
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plans, "in_process", lambda what, case: what(case))
    monkeypatch.setattr(plans, "CASES", [plans.CASES[number] for number in (3, 6, 9)])
    found = measure(plans.groups(CPU, True)[0], CPU, **FAST)
    assert [case.name for case in found.ran] == [case.name for case in plans.CASES]
    assert found.cases[1].memory == {"host_bytes": 20_000 * 3 * (128 + 4) + 20_000 * 4}
    for case, ratio in zip(found.cases, (1.2, 0.5, 0.8), strict=True):
        case.figures[plans.RATIO] = ratio
    text = shown("plan_accuracy", [found])
    assert "- 2 of 3 planned times are within a factor of 1.5 of the measured ones, the median within 1.25" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(cuda_status().available, reason="there is a CUDA device")
def test_what_a_gpu_is_asked_runs_small_and_what_needs_one_says_so(suites):
    gpu, found = suites["gpu"].module, {}
    for group in gpu.groups(CPU, True):
        result = measure(group, CPU)
        assert not [case.error for case in result.cases if case.error]
        found.setdefault(group.params["experiment"], []).append(result)
    assert list(found) == ["step", "fbgemm", "both_ways", "few_blocks", "host", "words", "profile", "pages"]
    for name, results in found.items():
        for result in results:
            if name in ("both_ways", "few_blocks", "pages"):
                assert (result.skipped, result.cases) == ("needs CUDA", [])
            else:
                assert all(value > 0 for case in result.cases for value in case.figures.values() if name != "profile")
                assert len(result.ran) > 1
    names = [*(", ".join(way) for way in gpu.WAYS), "nn.Embedding, SGD", "nn.Embedding, AdamW"]
    assert [case.name for case in found["step"][0].ran] == names

    def cases(scale):
        yield "fails", lambda: 1 / 0
        yield "runs", lambda: {"ms": 1.0}

    fails, runs = gpu._measured(cases, gpu.TINY)
    assert fails.error == "ZeroDivisionError: division by zero"
    assert (runs.error, runs.figures) == ("", {"ms": 1.0})
