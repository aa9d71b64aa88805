"""Suite `mixed`: forms of 16 bits are what they say, train as torch.nn does, and what they save or cost is computed."""

from __future__ import annotations

import math

import pytest
import torch
from lazy_oracle import one_thread  # noqa: F401 - a fixture
from torch import nn

from speedtransfer.benchmark import mixed, mixed_cases
from speedtransfer.benchmark.measure import WrongResultError, measure
from speedtransfer.benchmark.mixed_training import (
    AMP_BF16,
    AMP_FP16,
    BF16,
    FORMS,
    FP32,
    Form,
    Sizes,
    Training,
    read_windows,
)
from speedtransfer.benchmark.report import headlines, markdown, plot
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.errors import DeviceError, HostMemoryError, SpeedtransferError
from speedtransfer.nn import Embedding

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
TINY = Sizes(context=2, classes=50, dim=8, hidden=16, layers=2, windows=2560, epochs=1, held_out=1000, lr=1e-2)
NAMES = ["FP32", "BF16, all of it", "AMP, bfloat16", "AMP, float16 + GradScaler", "FP32, rows in BF16"]
ENVIRONMENT = {"device": "CPU", "cuda": False, "versions": {}, "commit": "abc", "dirty": False, "date": "2026-01-02"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def windows():
    return read_windows(TINY.context, TINY.classes)


@pytest.fixture
def small(monkeypatch):
    """The quick suite is smaller still, and no process measures memory: a list of what was asked for."""
    asked = []

    def of_host(forms, batch, sizes):
        asked.append((batch, sizes))
        return {form.name: {"host_bytes": 1000 * number} for number, form in enumerate(forms, start=1)}

    monkeypatch.setattr(mixed, "_QUICK", TINY)
    monkeypatch.setattr(mixed_cases, "of_host", of_host)
    # Whatever else this machine does.
    monkeypatch.setattr(mixed_cases, "_MOST_STEP_S", math.inf)
    monkeypatch.setattr(mixed_cases, "_MOST_TRAINING_S", math.inf)
    return asked


# --- the text -----------------------------------------------------------------------------------------------------------


def test_windows_are_stretches_of_the_text(windows):
    train, held_out = windows.train, windows.held_out
    assert train.shape[1] == held_out.shape[1] == TINY.context + 1
    assert 0 <= int(train.min()) <= int(train[:, -1].max()) < TINY.classes
    assert int(held_out.max()) < windows.num_words
    every = read_windows(1, windows.num_words)
    # With all words to choose from there is a window for each word, and each begins where the one before ends.
    assert torch.equal(every.train[:-1, 1], every.train[1:, 0])
    counts = every.train[:, 1].bincount(minlength=windows.num_words)
    counts[every.train[0, 0]] += 1
    words = counts[:-2]
    assert (words[:-1] >= words[1:]).all(), "the commonest first"
    assert counts[-1] == 0, "words that the part for training does not have"
    assert (every.held_out == windows.num_words - 1).any()
    assert len(every.held_out) == pytest.approx(0.1 * (len(every.train) + len(every.held_out)), rel=1e-3)


# --- training -----------------------------------------------------------------------------------------------------------


def training(form, windows, batch=32, **options):
    return Training(form, TINY, windows, batch, CPU, seed=3, **options)


def test_fp32_is_torch_nn_to_rounding(windows):
    ours, plain = training(FP32, windows), training(FP32, windows, table=nn.Embedding)
    assert isinstance(ours.model.words, Embedding)
    assert type(plain.model.words) is nn.Embedding
    assert torch.equal(ours.model.words.weight.detach(), plain.model.words.weight.detach())
    for number in range(ours.steps):
        torch.testing.assert_close(ours.step(), plain.step(), rtol=1e-5, atol=1e-6, msg=f"step {number}")
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], value, rtol=1e-4, atol=2e-5)
    assert ours.evaluate()[0] == pytest.approx(plain.evaluate()[0], abs=1 / TINY.held_out)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_forms_are_what_they_say(windows, form):
    one, plain = training(form, windows), training(FP32, windows)
    first = float(one.step())
    dtypes = {value.dtype for value in one.model.parameters()}
    weights = {torch.bfloat16} if form is BF16 else {torch.float32}
    # A table shows its rows as what they are computed with.
    assert dtypes == weights
    state = one.optimizer.state[one.model.mlp[0].weight]
    assert {state["exp_avg"].dtype} == weights
    assert one.scaler.is_enabled() == (form is AMP_FP16)
    assert first == pytest.approx(float(plain.step()), rel=5e-3), "all begin alike, with the same batch"
    assert one.steps == 80
    one.train()
    chance = math.log(TINY.classes)
    assert one.evaluate()[1] < chance
    again = training(form, windows)
    again.train()
    assert again.evaluate() == one.evaluate()


def test_the_share_of_right_words_is_counted(windows):
    one = training(FP32, windows)
    held_out = windows.held_out[: TINY.held_out]
    logits = one.model(held_out[:, :-1]).detach()
    accuracy, loss = one.evaluate()
    assert accuracy == (logits.argmax(1) == held_out[:, -1]).double().mean()
    assert loss == pytest.approx(float(nn.functional.cross_entropy(logits, held_out[:, -1])), rel=1e-5)


def test_every_epoch_has_every_window_once(windows):
    one = training(FP32, windows, batch=128)
    batches = one._all_batches()
    epochs = [torch.cat([next(batches) for _ in range(20)]) for _ in range(2)]
    assert not torch.equal(*epochs)
    assert torch.equal(*(epoch.unique(dim=0, return_counts=True)[0] for epoch in epochs))
    assert torch.equal(*(epoch.unique(dim=0, return_counts=True)[1] for epoch in epochs))
    other = Training(FP32, TINY, windows, 128, CPU, seed=4)
    assert not torch.equal(next(other._all_batches()), epochs[0][:128])


def test_a_step_that_overflows_is_skipped_and_rows_stay(windows):
    one = training(AMP_FP16, windows)
    one.model  # noqa: B018 - makes it
    one.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    one.step()
    assert one.scaler.get_scale() == 2.0**59
    assert all(torch.equal(value, before[name]) for name, value in one.model.state_dict().items())
    for _ in range(59):
        one.step()
    assert one.scaler.get_scale() < 2.0**40
    assert not torch.equal(one.model.state_dict()["words.weight"], before["words.weight"])


def test_a_torch_that_computes_in_something_else_is_refused(windows):
    with pytest.raises(DeviceError, match="this torch computes in float32 on cpu where float16 is asked for"):
        training(Form("half", torch.float16), windows).step()


# --- the suite ----------------------------------------------------------------------------------------------------------


def test_a_quick_run_gives_every_field(small):
    groups = mixed.groups(CPU, True, seed=1, rows=5, whatever=1)
    found = [measure(group, CPU, **FAST) for group in groups]
    assert not [case.error for group in found for case in group.cases if case.error]
    for group in found:
        assert [case.name for case in group.ran] == NAMES
        assert all(case.role == "ours" for case in group.ran)
        assert all(set(case.figures) == {"accuracy", "loss"} for case in group.ran)
        assert [case.memory["host_bytes"] for case in group.ran] == [1000, 2000, 3000, 4000, 5000]
        by_name = {case.name: case.figures for case in group.ran}
        assert by_name["FP32"]["accuracy"] > 0
        for name in NAMES[1:]:
            assert by_name[name]["loss"] == pytest.approx(by_name["FP32"]["loss"], rel=0.05)
    assert [group.params["batch"] for group in found] == [128, 512]
    assert [batch for batch, _ in small] == [128, 512], "once a group"
    lines = headlines("mixed", found)
    assert [line.partition(":")[0] for line in lines[2:]] == NAMES[1:]
    assert lines[0].startswith("computing in bfloat16 ")
    assert "2.00x the memory at batch 128, 2.00x at 512" in lines[2]
    result = {"suite": "mixed", "quick": True, "environment": ENVIRONMENT}
    result["groups"] = [group.to_json() for group in found]
    assert plot(result).startswith(b"\x89PNG")
    assert "| **AMP, bfloat16** |" in markdown(result)


def test_full_sizes(monkeypatch):
    groups = mixed.groups(CPU, False)
    assert [group.params["batch"] for group in groups] == [128, 256, 512, 1024, 2048]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    large = mixed.groups(torch.device("cuda"), False)
    assert large[0].params["hidden"] > groups[0].params["hidden"]
    assert "MLP of 4096 and 4096" in large[0].title
    for group in (*groups, *large):
        assert group.params["windows"] % group.params["batch"] == 0, "every form and batch sees all windows"
        # pytest-benchmark's run of all suites but `memory` goes by titles.
        assert "memory" not in group.title


def test_hardware(monkeypatch):
    listed = {"fpu", "f16c", "amx_bf16", "avx512_bf16", "avx512_fp16"}
    monkeypatch.setattr(mixed, "cpu_features", lambda: listed)
    assert mixed.hardware(CPU) == {"bfloat16": ["amx_bf16", "avx512_bf16"], "float16": ["avx512_fp16"]}
    monkeypatch.setattr(mixed, "cpu_features", lambda: {"fpu", "avx2", "f16c"})
    assert mixed.hardware(CPU) == {"bfloat16": [], "float16": []}
    monkeypatch.setattr(mixed, "cpu_features", lambda: frozenset())
    assert mixed.hardware(CPU) == {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert mixed.hardware(torch.device("cuda")) == {"bfloat16": [], "float16": ["sm_75"]}


def test_what_takes_too_long_is_left_out_and_named(small, monkeypatch):
    (group, _) = mixed.groups(CPU, True)
    monkeypatch.setattr(mixed_cases, "_MOST_TRAINING_S", 0.0)
    monkeypatch.setattr(mixed_cases, "_MOST_TIMES", 0.0)
    found = measure(group, CPU, **FAST)
    assert set(found.ran[0].figures) == {"accuracy", "loss"}
    assert all(set(case.figures) == {"would_take_s"} for case in found.ran[1:])
    assert "not trained through, for the time it would take, at batch 128 (" in headlines("mixed", [found])[2]
    monkeypatch.setattr(mixed_cases, "_MOST_STEP_S", 0.0)
    found = measure(group, CPU, **FAST)
    assert [case.name for case in found.ran] == NAMES[:1]
    assert all("too long to take more" in case.error for case in found.cases[1:])
    assert headlines("mixed", [found]) == []


@pytest.mark.parametrize(
    ("name", "judged", "says"),
    [
        ("FP32", (0.1, 9.9), r"FP32 gives a wrong result \(ends with a loss of 9\.9000, and guessing has 3\.9120\)"),
        ("AMP, bfloat16", (0.1, 3.9), r"AMP, bfloat16 gives a wrong result \(ends with a loss of 3\.9000, FP32 with"),
        ("FP32, rows in BF16", (0.1, math.nan), "ends with a loss of nan"),
    ],
)
def test_a_network_that_has_learned_nothing_is_noticed(small, monkeypatch, name, judged, says):
    judge = Training.evaluate
    monkeypatch.setattr(Training, "evaluate", lambda self: judged if self.form.name == name else judge(self))
    with pytest.raises(WrongResultError, match=says):
        measure(mixed.groups(CPU, True)[0], CPU, **FAST)


def test_a_table_of_another_form_is_noticed(small, monkeypatch):
    monkeypatch.setattr(mixed_cases, "FORMS", (FP32, Form("small", torch.float32, value_bytes=2)))
    with pytest.raises(WrongResultError, match=r"small gives a wrong result \(the table holds .* bytes, not "):
        measure(mixed.groups(CPU, True)[0], CPU, **FAST)


# --- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_in_a_process_of_its_own():
    """Most of it is that of rows: the weights of all, and the state of those that are touched."""
    sizes = TINY._replace(dim=512)
    found = mixed_cases.of_host([FP32, Form("half", torch.float16)], 64, sizes)
    weights = 4 * sizes.dim * read_windows(sizes.context, sizes.classes).num_words
    assert weights <= found["FP32"]["host_bytes"] <= 3 * weights + 50e6
    assert isinstance(found["half"], HostMemoryError)
    assert "the process that trains it failed: this torch computes in float32" in str(found["half"])


def test_no_memory_is_told_where_its_process_failed(small, monkeypatch):
    failed = {form.name: SpeedtransferError("no room") for form in FORMS}
    monkeypatch.setattr(mixed_cases, "of_host", lambda *arguments: failed)
    found = measure(mixed.groups(CPU, True)[0], CPU, **FAST)
    assert [case.memory for case in found.ran] == [{}] * 5
    lines = headlines("mixed", [found])
    assert not any("the memory" in line for line in lines)
    result = {"suite": "mixed", "quick": True, "environment": ENVIRONMENT, "groups": [found.to_json()]}
    assert plot(result).startswith(b"\x89PNG")
    assert markdown(result)


# --- sentences -------------------------------------------------------------------------------------------------------


def result(batch, hardware=None, accuracy=0.4, **times):
    forms = {"fp32": FP32, "bf16": BF16, "amp": AMP_BF16, "half": AMP_FP16}
    cases = [
        CaseResult(
            forms[key].name,
            "ours",
            0,
            [seconds] * 4,
            memory={"host_bytes": 100},
            figures={"accuracy": 0.42 if key == "fp32" else accuracy},
        )
        for key, seconds in times.items()
    ]
    return GroupResult(f"{batch}", {"batch": batch, "hardware": hardware or {}}, cases)


def test_what_16_bits_save_or_cost_is_computed():
    listed = {"bfloat16": ["amx_bf16"], "float16": []}
    found = [
        result(2048, listed, accuracy=0.37, fp32=0.1, bf16=0.05, amp=0.04, half=1.0),
        result(128, listed, fp32=0.01, bf16=0.009, amp=0.008, half=0.05),
    ]
    assert headlines("mixed", found) == [
        "computing in bfloat16 saves time here at every batch size: 0.40x to 0.90x the time of FP32; the device lists "
        "amx_bf16",
        "computing in float16 costs time here at every batch size: 5.00x to 10.0x the time of FP32; the device lists no "
        "instructions for float16",
        "BF16, all of it: 0.90x the time of a step in FP32 at batch 128, 0.50x at 2,048; 1.00x the memory at batch 128, 1.00x "
        "at 2,048; accuracy farthest from FP32's at batch 2,048: 37.0% against 42.0%",
        "AMP, bfloat16: 0.80x the time of a step in FP32 at batch 128, 0.40x at 2,048; 1.00x the memory at batch 128, 1.00x "
        "at 2,048; accuracy farthest from FP32's at batch 2,048: 37.0% against 42.0%",
        "AMP, float16 + GradScaler: 5.00x the time of a step in FP32 at batch 128, 10.0x at 2,048; 1.00x the memory at batch "
        "128, 1.00x at 2,048; accuracy farthest from FP32's at batch 2,048: 37.0% against 42.0%",
    ]


def test_neither_saves_nor_costs():
    found = [result(128, fp32=0.01, amp=0.02), result(256, fp32=0.01, amp=0.01), result(512, fp32=0.01, amp=0.005)]
    assert headlines("mixed", found)[0] == (
        "computing in bfloat16 is faster here in 1 and slower in 1 of 3 measurements: 0.50x to 2.00x the time of FP32"
    )
    found = [result(128, fp32=0.01, amp=0.0101)]
    assert (
        "is faster here in 0 and slower in 0 of 1 measurements: 1.01x the time of FP32" in headlines("mixed", found)[0]
    )
    found[0].cases[1].samples_s[:] = [0.01, 0.01, 0.05, 0.05]
    assert all(line.endswith(" (noisy)") for line in headlines("mixed", found))
    assert headlines("mixed", [result(128, fp32=0.01)]) == []
    assert headlines("mixed", [result(128, amp=0.01)]) == []
