"""The written-out gradients against autograd on the plain loss, pair by pair; compiled pairs against those of torch."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from speedtransfer.word2vec import gradients
from speedtransfer.word2vec.band import Noise
from speedtransfer.word2vec.cbow import cbow_gradients
from speedtransfer.word2vec.gradients import skipgram_gradients
from speedtransfer.word2vec.places import Places

WAYS = ["compiled", "torch"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "compiled":
        pytest.importorskip("numba")
        assert gradients._compiled() is not None
    else:
        monkeypatch.setattr(gradients, "_compiled", lambda: None)
    return request.param


def draw_block(num_words, num_rows, window, groups, k, seed=0):
    """Return words, before, after, negatives; windows end at the block and at a few edges of sequences."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    edges = torch.cat([torch.tensor([0, num_words]), draw(0, num_words + 1, num_words // 20)]).unique()
    position, windows = torch.arange(num_words), draw(0, window + 1, num_words)
    sequence = torch.searchsorted(edges, position, right=True)
    before = torch.minimum(windows, position - edges[sequence - 1])
    after = torch.minimum(draw(0, window + 1, num_words), edges[sequence] - 1 - position)
    return draw(0, num_rows, num_words), before, after, draw(0, num_rows, groups, k)


def plain_loss(center_table, context_table, words, before, after, negatives, negative):
    """Skip-gram with negative sampling as it is defined, one pair at a time; shared negatives weighted to `negative` draws."""
    unique = words.unique().tolist()
    share = -(-len(unique) // len(negatives))
    loss, num_pairs = center_table.new_zeros(()), 0
    for i, word in enumerate(words.tolist()):
        noise = context_table[negatives[unique.index(word) // share]]
        for j in range(i - int(before[i]), i + int(after[i]) + 1):
            if j == i:
                continue
            num_pairs += 1
            loss = loss - F.logsigmoid(center_table[word] @ context_table[words[j]])
            loss = loss - F.logsigmoid(-(noise @ center_table[word])).sum() * negative / len(noise)
    return loss, num_pairs


def by_hand(center_table, context_table, block, negative, with_loss=True):
    """Return the result, and both gradients spread over whole tables."""
    words, before, after, negatives = block
    places = Places.find(words, before, after, negatives, len(center_table))
    centers, contexts = places.words.ids, places.outputs.ids
    result = skipgram_gradients(center_table[centers], context_table[contexts], places, negative, with_loss)
    center_grad, context_grad = torch.zeros_like(center_table), torch.zeros_like(context_table)
    center_grad[centers], context_grad[contexts] = result.center, result.context
    return result, center_grad, context_grad


@pytest.mark.parametrize(
    ("num_words", "window", "groups", "k", "dim"),
    [(1, 3, 1, 4, 5), (2, 1, 1, 1, 3), (3, 5, 2, 4, 8), (31, 2, 3, 7, 4), (32, 5, 1, 8, 4), (33, 5, 20, 2, 4),
     (64, 5, 2, 3, 6), (70, 16, 4, 9, 5), (50, 20, 1, 9, 5), (100, 3, 5, 10, 1)],
)  # fmt: skip
@pytest.mark.usefixtures("way")
def test_gradients_are_those_of_autograd_on_the_plain_loss(num_words, window, groups, k, dim):
    num_rows, negative = 17, 5  # fewer words than positions: rows repeat
    generator = torch.Generator().manual_seed(1)
    tables = [torch.randn(num_rows, dim, dtype=torch.float64, generator=generator) for _ in range(2)]
    block = draw_block(num_words, num_rows, window, groups, k)
    result, *grads = by_hand(*tables, block, negative)

    for table in tables:
        table.requires_grad_()
    expected, num_pairs = plain_loss(*tables, *block, negative)
    if num_pairs:
        expected.backward()
    assert int(result.num_pairs) == num_pairs
    torch.testing.assert_close(result.loss, expected.detach())
    for grad, table in zip(grads, tables, strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(table) if table.grad is None else table.grad)


@pytest.mark.usefixtures("way")
def test_one_pair_by_hand():
    # Two words, both windows 1, vectors of one number: scores 0 and 0, one negative (word 1) weighted by 2 a pair.
    rows, at, ones = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), torch.tensor([1, 1])
    nobody = torch.zeros(2, dtype=torch.int64)
    before, after = torch.minimum(ones, at), torch.minimum(ones, 1 - at)
    places = Places.find(at, before, after, torch.tensor([[1]]), 2)
    result = skipgram_gradients(rows, torch.zeros(2, 1), places, 2)
    assert result.num_pairs == 2
    assert result.loss.item() == pytest.approx(2 * (1 + 2) * 0.693147, rel=1e-5)
    assert result.center.tolist() == [[0.0], [0.0]]  # contexts are zero
    # context 0 meets center 1: -2/2; context 1 meets center 0: -1/2; as a negative: 2 * (1 + 2)/2
    assert result.context.tolist() == [[-1.0], [2.5]]
    alone = skipgram_gradients(rows, torch.ones(2, 1), Places.find(at, nobody, nobody, torch.tensor([[1]]), 2), 2)
    assert (alone.num_pairs, alone.loss) == (0, 0)
    assert not alone.center.any()
    assert not alone.context.any()


@pytest.mark.usefixtures("way")
def test_loss_is_left_out_on_demand():
    block, rows = draw_block(40, 10, 3, 2, 5), torch.randn(10, 4)
    (with_loss, *expected), (without, *grads) = (by_hand(rows, rows, block, 5, wanted) for wanted in (True, False))
    assert without.loss is None
    assert with_loss.loss > 0
    assert all(map(torch.equal, grads, expected))


def test_extreme_scores_and_both_ways_agree(monkeypatch):
    pytest.importorskip("numba")
    block = draw_block(300, 40, 5, 2, 16)
    generator = torch.Generator().manual_seed(2)
    tables = [torch.randn(40, 33, generator=generator) * 5 for _ in range(2)]  # scores up to about +-500
    compiled, *compiled_grads = by_hand(*tables, block, 5)
    again, *again_grads = by_hand(*tables, block, 5)
    assert all(map(torch.equal, compiled_grads, again_grads))
    assert torch.equal(compiled.loss, again.loss)
    monkeypatch.setattr(gradients, "_compiled", lambda: None)
    plain, *plain_grads = by_hand(*tables, block, 5)
    assert plain.loss.isfinite()
    torch.testing.assert_close(compiled.loss, plain.loss)
    for grad, expected in zip(compiled_grads, plain_grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-3)


def test_training_leaves_a_core_to_the_thread_of_the_pairs(monkeypatch):
    pytest.importorskip("numba")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with gradients.leave_a_core(torch.device("cpu")):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
        with gradients.leave_a_core(torch.device("cuda")):
            assert torch.get_num_threads() == 3
        monkeypatch.setattr(gradients, "_compiled", lambda: None)
        with gradients.leave_a_core(torch.device("cpu")):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def record_threads(monkeypatch, first):
    """Note which thread computes which groups, where the thread `first` ("main", "helper", or None) has one before others."""
    taken, begun, compute = [], threading.Event(), Noise.compute

    def recorded(noise, groups):
        thread = "main" if threading.current_thread() is threading.main_thread() else "helper"
        assert thread == first or first is None or begun.wait(20)
        taken.append((thread, groups))
        compute(noise, groups)
        begun.set()

    monkeypatch.setattr(Noise, "compute", recorded)
    return taken


@pytest.mark.parametrize("with_loss", [True, False])
def test_groups_are_the_same_from_either_thread(with_loss, torch_threads, monkeypatch):
    pytest.importorskip("numba")
    torch_threads(1)
    block, generator = draw_block(300, 90, 5, 4, 16), torch.Generator().manual_seed(3)
    tables, results = [torch.randn(90, 20, generator=generator) for _ in range(2)], []
    for first in ("main", "helper"):
        with monkeypatch.context() as patch:
            taken = record_threads(patch, first)
            result, *grads = by_hand(*tables, block, 5, with_loss)
        assert taken[0][0] == first
        assert sorted(groups.start for _, groups in taken) == [0, 1, 2, 3]
        results.append([*grads, *([result.loss] if with_loss else [])])
    assert all(map(torch.equal, *results))


def test_threads_of_torch_compute_the_groups_at_once(torch_threads, monkeypatch):
    pytest.importorskip("numba")
    torch_threads(2)
    taken = record_threads(monkeypatch, None)
    by_hand(torch.ones(40, 3), torch.ones(40, 3), draw_block(50, 40, 2, 3, 4), 5)
    assert taken == [("main", slice(None))]


def test_what_fails_in_the_helping_thread_reaches_the_caller(torch_threads, monkeypatch):
    pytest.importorskip("numba")
    torch_threads(1)
    compute = Noise.compute

    def failing(noise, groups):
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            raise MemoryError("no room in the helper")
        assert failed.wait(20)
        compute(noise, groups)

    failed = threading.Event()
    monkeypatch.setattr(Noise, "compute", failing)
    with pytest.raises(MemoryError, match="no room"):
        by_hand(torch.ones(40, 3), torch.ones(40, 3), draw_block(50, 40, 2, 9, 4), 5)


class Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_loss", [True, False])
@pytest.mark.parametrize("gradients_of", [skipgram_gradients, cbow_gradients])
def test_on_a_device_nothing_is_read_and_nothing_added_in_any_order(gradients_of, with_loss):
    """On the device "meta", which has no values: what the host reads there raises."""
    words, before, after, negatives = draw_block(60, 17, 3, 2, 5)
    device = torch.device("meta")
    places = Places.find(words, before, after, negatives, 17, grouped=True).to(device)
    rows = [torch.empty(len(groups.ids), 4, device=device) for groups in (places.words, places.outputs)]
    with Operations() as operations:
        result = gradients_of(*rows, places, 5, with_loss)
    assert [result.center.shape, result.context.shape] == [tensor.shape for tensor in rows]
    assert result.num_pairs.device.type == "cpu"
    assert "bmm" in operations.names
    in_any_order = ("index_add", "scatter_add", "scatter_reduce", "index_put", "put_", "cumsum", "bincount")
    assert not [name for name in operations.names if name.startswith(in_any_order)]
