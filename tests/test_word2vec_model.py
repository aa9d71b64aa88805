"""The written-out gradients against autograd on the plain loss, pair by pair; and the model around them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import Block, SkipGram
from speedtransfer.word2vec.gradients import block_gradients, num_pairs_of


def pairs_of(windows):
    n = len(windows)
    return [(i, j) for i in range(n) for j in range(n) if 1 <= abs(i - j) <= windows[i]]


def plain_loss(center_table, context_table, words, negatives, windows, negative):
    """Skip-gram with negative sampling as it is defined, one pair at a time; shared negatives weighted to `negative` draws."""
    loss = center_table.new_zeros(())
    for i, j in pairs_of(windows.tolist()):
        center = center_table[words[i]]
        loss = loss - F.logsigmoid(center @ context_table[words[j]])
        noise = F.logsigmoid(-(context_table[negatives] @ center)).sum()
        loss = loss - noise * negative / len(negatives)
    return loss


def draw_block(num_words, vocabulary, window, num_negatives, seed=0):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, vocabulary, (num_words,), generator=generator)
    windows = torch.randint(1, window + 1, (num_words,), generator=generator)
    negatives = torch.randint(0, vocabulary, (num_negatives,), generator=generator)
    return Block(words, windows, negatives, num_words)


def by_hand(center_table, context_table, block, window, negative):
    """Return loss, pairs and both gradients, spread over whole tables."""
    centers, centers_at = torch.unique(block.words, return_inverse=True)
    contexts, contexts_at = torch.unique(torch.cat([block.words, block.negatives]), return_inverse=True)
    n = len(block.words)
    result = block_gradients(
        center_table[centers], context_table[contexts], centers_at, contexts_at[:n], contexts_at[n:],
        block.windows, window, negative,
    )  # fmt: skip
    center_grad, context_grad = torch.zeros_like(center_table), torch.zeros_like(context_table)
    center_grad[centers], context_grad[contexts] = result.center, result.context
    return result, center_grad, context_grad


@pytest.mark.parametrize(
    ("num_words", "window", "num_negatives", "dim"),
    [(1, 3, 4, 5), (2, 1, 1, 3), (3, 5, 4, 8), (31, 2, 7, 4), (32, 5, 8, 4), (33, 5, 8, 4), (64, 5, 3, 6),
     (70, 16, 9, 5), (50, 20, 9, 5), (100, 3, 50, 1)],
)  # fmt: skip
def test_gradients_are_those_of_autograd_on_the_plain_loss(num_words, window, num_negatives, dim):
    vocabulary, negative = 17, 5  # fewer words than positions: rows repeat
    generator = torch.Generator().manual_seed(1)
    center_table, context_table = (
        torch.randn(vocabulary, dim, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    block = draw_block(num_words, vocabulary, window, num_negatives)
    result, center_grad, context_grad = by_hand(center_table, context_table, block, window, negative)

    center_table.requires_grad_(), context_table.requires_grad_()
    expected = plain_loss(center_table, context_table, block.words, block.negatives, block.windows, negative)
    if expected.requires_grad:
        expected.backward()
    assert int(result.num_pairs) == len(pairs_of(block.windows.tolist()))
    torch.testing.assert_close(result.loss, expected.detach())
    for grad, table in ((center_grad, center_table), (context_grad, context_table)):
        torch.testing.assert_close(grad, torch.zeros_like(table) if table.grad is None else table.grad)


def test_one_pair_by_hand():
    # Two words, both windows 1, vectors of one number: scores 0 and 0, one negative (word 1) weighted by 2 a pair.
    rows = torch.tensor([[1.0], [2.0]])
    zeros = torch.zeros(2, 1)
    at, windows = torch.tensor([0, 1]), torch.tensor([1, 1])
    result = block_gradients(rows, zeros, at, at, torch.tensor([1]), windows, 1, 2)
    assert result.num_pairs == 2
    assert result.loss.item() == pytest.approx(2 * (1 + 2) * 0.693147, rel=1e-5)
    assert result.center.tolist() == [[0.0], [0.0]]  # contexts are zero
    # context 0 meets center 1: -2/2; context 1 meets center 0: -1/2; as a negative: 2 * (1 + 2)/2
    assert result.context.tolist() == [[-1.0], [2.5]]


def test_loss_is_left_out_on_demand():
    block = draw_block(40, 10, 3, 5)
    rows = torch.randn(10, 4)
    with_loss, without = (
        block_gradients(rows, rows, block.words, block.words, block.negatives, block.windows, 3, 5, wanted)
        for wanted in (True, False)
    )
    assert without.loss is None
    assert torch.equal(with_loss.center, without.center)
    assert torch.equal(with_loss.context, without.context)


def test_num_pairs():
    assert num_pairs_of(torch.tensor([2, 2, 1, 5])).tolist() == [2, 3, 2, 3]
    assert num_pairs_of(torch.tensor([4])).tolist() == [0]


def test_first_weights():
    model = SkipGram(50, 8, device="cpu", generator=torch.Generator().manual_seed(4))
    weights = model.input.table.numpy()
    assert abs(weights).max() <= 0.5 / 8
    assert weights.std() == pytest.approx(1 / 8 / 12**0.5, rel=0.1)
    assert not model.output.table.numpy().any()
    again = SkipGram(50, 8, device="cpu", generator=torch.Generator().manual_seed(4))
    assert (again.input.table.numpy() == weights).all()


def test_step_of_the_model_is_the_step_of_torch():
    block = draw_block(60, 20, 4, 6)
    model = SkipGram(20, 5, window=4, negative=3, device="cpu", generator=torch.Generator().manual_seed(4))
    model.output.table.normal_(0, 0.3, generator=torch.Generator().manual_seed(5))
    tables = [torch.nn.Parameter(t.table.torch().clone()) for t in (model.input, model.output)]
    plain_loss(*tables, block.words, block.negatives, block.windows, 3).backward()
    oracle = torch.optim.SGD(tables, lr=0.1)
    oracle.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = model.deposit_gradients(block)
    optimizer.step()
    assert result.num_pairs == len(pairs_of(block.windows.tolist()))
    torch.testing.assert_close(model.input.table.torch(), tables[0].detach())
    torch.testing.assert_close(model.output.table.torch(), tables[1].detach())


def test_scores_of_single_pairs_go_through_autograd():
    model = SkipGram(20, 5, device="cpu")
    model.output.table.fill_(1.0)
    scores = model(torch.tensor([[1, 2]]), torch.tensor([[3, 4]]))
    assert scores.shape == (1, 2)
    torch.testing.assert_close(scores[0], model.input.table.torch()[[1, 2]].sum(1))
    scores.sum().backward()
    assert model.input.weight.grad.shape == (2, 5)


def test_tables_in_files(tmp_path):
    model = SkipGram(20, 5, memory="mmap", path=tmp_path / "new" / "tables", device="cpu")
    assert sorted(p.name for p in (tmp_path / "new" / "tables").iterdir()) == [
        "input.safetensors",
        "output.safetensors",
    ]
    assert model.input.table.memory == "mmap"


def test_bad_places(tmp_path):
    with pytest.raises(InvalidValueError, match="memory='mmap' needs path, the folder for the table files"):
        SkipGram(20, 5, memory="mmap")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot make folder"):
        SkipGram(20, 5, memory="mmap", path=tmp_path / "file" / "tables")
    with pytest.raises(InvalidValueError, match="pagable"):
        SkipGram(20, 5, memory="pagable")
