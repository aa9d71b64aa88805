"""Suite `ngram`: what it compares is what it says, and its checks notice what is wrong."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from speedtransfer.benchmark import ngram
from speedtransfer.benchmark.measure import measure
from speedtransfer.benchmark.ngram import added_share
from speedtransfer.benchmark.ngram_training import Gpt, Sizes, token_batches
from speedtransfer.benchmark.report import headlines
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn import Embedding

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
NAMES = [
    "no tables",
    "speedtransfer, idle=lazy",
    "speedtransfer, idle=lazy, prefetch",
    "speedtransfer, idle=lazy, prefetch a batch ahead",
    "speedtransfer, idle=exact",
    "speedtransfer, idle=exact, prefetch",
    "speedtransfer, idle=exact, prefetch a batch ahead",
    "nn.Embedding + AdamW",
    "nn.Embedding(sparse=True) + SparseAdam",
]


def cases():
    (group,) = ngram.groups(CPU, True, rows=3000)
    return group.make()


def test_every_method_is_measured():
    (group,) = ngram.groups(CPU, True, rows=3000, seed=2)
    found = measure(group, CPU, **FAST)
    assert not [case.error for case in found.cases if case.error]
    assert [case.name for case in found.ran] == NAMES
    assert found.params["rows"] >= 3000
    assert found.params["tokens"] == 64
    by_name = {case.name: case for case in found.ran}
    assert {name for name, case in by_name.items() if case.figures} == set(NAMES[1:7])
    lazy, exact = (by_name[NAMES[number]].figures["moved_bytes"] for number in (1, 4))
    # Weights and two planes of state each way, and the last step.
    assert lazy % (2 * 3 * 4 * 8) == 0
    assert exact % 4 == 0
    (line,) = headlines("ngram", [found])
    assert "without tables; more with speedtransfer, idle=lazy " in line
    assert "the speed of nn.Embedding + AdamW" in line


@pytest.mark.parametrize("quick", [True, False])
def test_groups_make_nothing_yet(quick):
    assert all(group.title for group in ngram.groups(CPU, quick, seed=3, whatever=1))
    assert ngram.NOTE
    with pytest.raises(InvalidValueError, match="rows is 3 but must be at least 400"):
        ngram.groups(CPU, quick, rows=3)
    with pytest.raises(InvalidTypeError, match=r"rows is 1\.5"):
        ngram.groups(CPU, quick, rows=1.5)


def test_full_sizes_are_those_of_the_example_and_of_a_published_gpt(monkeypatch):
    (cpu,) = ngram.groups(CPU, False)
    assert (cpu.params["tokens"], cpu.params["rows"] // 16 // 10_000, cpu.params["dim"]) == (1024, 5, 16)
    monkeypatch.setattr("speedtransfer.benchmark.environment.physical_bytes", lambda: 128 << 30)
    _, lazy, exact = ngram.groups(torch.device("cuda"), False)
    for group, idle in ((lazy, "lazy"), (exact, "exact")):
        assert group.params["tokens"] == 65_536
        assert group.params["idle"] == idle
        assert 100_000_000 <= group.params["rows"] < 100_100_000
        assert "x 160 bfloat16, 8-bit state" in group.title
    monkeypatch.setattr("speedtransfer.benchmark.environment.physical_bytes", lambda: 8 << 30)
    small = ngram.groups(torch.device("cuda"), False)[1].params["rows"]
    assert 0.9 < small * 660 / (0.6 * (8 << 30)) < 1.1


def test_what_does_not_fit_is_left_out(monkeypatch):
    (group,) = ngram.groups(CPU, True, rows=3000)
    monkeypatch.setattr("speedtransfer.benchmark.environment.physical_bytes", lambda: 1_000_000)
    found = measure(group, CPU, **FAST)
    assert [case.name for case in found.ran] == NAMES[:4]
    assert "of the host's memory together, of which those beside it leave" in found.cases[-1].error


def test_a_model_without_tables_is_the_same_but_for_them():
    sizes = ngram._QUICK
    windows = token_batches(sizes, 1, 0, CPU)[0]
    with_tables, without = cases()[1].run.__self__.training.model, Gpt(sizes, None, CPU)
    # Rows begin as zeros.
    assert torch.equal(with_tables(windows), without(windows))
    assert windows.shape == (4, 17)
    assert windows.min() >= 0
    assert windows.max() < sizes.vocabulary


def test_a_token_does_not_see_those_after_it():
    sizes = Sizes(50, 16, 2, 2, 2, 8, 30, 4, 1)
    model = Gpt(sizes, None, CPU)
    hidden = []
    model.head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    windows = token_batches(sizes, 1, 0, CPU)[0]
    model(windows)
    windows[:, 5:] += 1
    windows %= 50
    model(windows)
    torch.testing.assert_close(hidden[0][:, :5], hidden[1][:, :5])
    assert not torch.equal(hidden[0][:, 5:], hidden[1][:, 5:])


@pytest.mark.parametrize("number", [1, 4, 7, 8])
def test_a_wrong_step_is_noticed(number):
    case = cases()[number]
    case.run()
    training = case.run.__self__.training
    embedding = training.ngrams.embedding
    before = embedding.weight.detach().clone()
    ids = training.ngrams.ngrams(training.first[:, :-1]).unique()
    with torch.no_grad():
        embedding.weight[ids[: len(ids) // 8]] += 1e-3
    with pytest.raises(AssertionError, match=r"% of the values are not those of torch\.nn"):
        case.check()
    with torch.no_grad():
        embedding.weight.copy_(before)
    case.check()


def test_wrong_rows_read_ahead_are_noticed(monkeypatch):
    _, plain, begin, *_ = cases()
    plain.run()
    begin.run()
    begin.check()
    ticket = type(begin.run.__self__.training.ngrams.prefetch(torch.zeros(1, 3, dtype=torch.int64)))
    wait = ticket.wait

    def wrong(self, *args):
        ahead = wait(self, *args)
        if ahead is not None:
            for values in ahead.fetched.values():
                values += 1
        return ahead

    monkeypatch.setattr(ticket, "wait", wrong)
    with pytest.raises(AssertionError, match="rows read ahead are not those of the table"):
        begin.check()


def test_rows_are_read_ahead(monkeypatch):
    found = {}
    for case in cases()[1:4]:
        asked = []
        method = case.run.__self__
        ngrams = method.training.ngrams
        prefetch = ngrams.prefetch
        monkeypatch.setattr(ngrams, "prefetch", lambda tokens, p=prefetch, a=asked: a.append(tokens) or p(tokens))
        looked = []
        handle = ngrams.register_forward_pre_hook(lambda module, args, looked=looked: looked.append(args[0]))
        for _ in range(2):
            case.run()
        handle.remove()
        monkeypatch.undo()
        found[case.name] = asked, looked
    assert not found[NAMES[1]][0]
    asked, looked = found[NAMES[2]]
    assert [tokens.tolist() for tokens in asked] == [tokens.tolist() for tokens in looked]
    asked, looked = found[NAMES[3]]
    # In two parts each: those of the second step were asked for in the first.
    assert [tokens.tolist() for tokens in asked[:2]] == [tokens.tolist() for tokens in looked[2:]]


def test_tables_end_with_their_group():
    made = cases()
    made[1].run()
    emb = made[1].run.__self__.training.ngrams.embedding
    assert isinstance(emb, Embedding)
    gone = weakref.ref(emb.table)
    del made, emb
    gc.collect()
    assert gone() is None


# --- sentences -------------------------------------------------------------------------------------------------------


def result(**seconds):
    kinds = {"none": NAMES[0], "lazy": NAMES[1], "ahead": NAMES[3], "dense": NAMES[7]}
    found = [
        CaseResult(kinds[key], "ours" if key in ("lazy", "ahead") else "other", 0, [value] * 4)
        for key, value in seconds.items()
    ]
    return GroupResult("a step", {}, found)


def test_what_tables_add():
    group = result(none=0.1, lazy=0.12, ahead=0.102, dense=0.51)
    assert headlines("ngram", [group]) == [
        "a step: 100 ms without tables; more with speedtransfer, idle=lazy 20%, speedtransfer, idle=lazy, prefetch a batch "
        "ahead 2.0%, nn.Embedding + AdamW 410%; speedtransfer, idle=lazy, prefetch a batch ahead is 5.00x the speed of "
        "nn.Embedding + AdamW"
    ]
    assert added_share(group.cases[1], group.cases[0]) == pytest.approx(0.2)
    assert "ahead nothing" in headlines("ngram", [result(none=0.1, ahead=0.099)])[0]
    assert headlines("ngram", [result(lazy=0.1, dense=0.2)])[0].startswith(
        "a step: speedtransfer, idle=lazy 100 ms, nn"
    )
    group.cases[0].samples_s[:] = [0.05, 0.05, 0.2, 0.2]
    assert headlines("ngram", [group])[0].endswith(" (noisy)")
    assert headlines("ngram", [result(none=0.1)]) == []
