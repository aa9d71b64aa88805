"""The written-out gradients of CBOW against autograd on the plain loss, word by word."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lazy_oracle import one_thread  # noqa: F401 (a fixture that acts on every test here)

from speedtransfer.word2vec.cbow import cbow_gradients
from speedtransfer.word2vec.places import Places

VOCABULARY, NEGATIVE = 17, 5  # fewer words than positions: rows repeat


def plain_loss(input_rows, output_rows, words, negatives, before, after):
    """CBOW with negative sampling as it is defined: the mean of a window predicts the word and none of the negatives."""
    loss, predicted = input_rows.new_zeros(()), 0
    groups, k = negatives.shape
    size = -(-len(words) // groups)
    for i in range(len(words)):
        around = [j for j in range(i - before[i], i + after[i] + 1) if j != i]
        if not around:
            continue
        mean = torch.stack([input_rows[words[j]] for j in around]).sum(0) / len(around)
        loss = loss - F.logsigmoid(mean @ output_rows[words[i]])
        noise = F.logsigmoid(-(output_rows[negatives[i // size]] @ mean)).sum()
        loss = loss - noise * NEGATIVE / k
        predicted += 1
    return loss, predicted


def draw(num_words, window, groups, k, dim, seed=0, sequences=1):
    """Return tables, words, negatives and windows cut at the edges of the block and of equal sequences."""
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(VOCABULARY, dim, dtype=torch.float64, generator=generator) for _ in range(2)]
    words = torch.randint(0, VOCABULARY, (num_words,), generator=generator)
    negatives = torch.randint(0, VOCABULARY, (groups, k), generator=generator)
    windows = torch.randint(0, window + 1, (num_words,), generator=generator)
    length = -(-num_words // sequences)
    position = torch.arange(num_words) % length
    ends = torch.minimum(torch.tensor(num_words), (torch.arange(num_words) // length + 1) * length)
    before, after = torch.minimum(windows, position), torch.minimum(windows, ends - 1 - torch.arange(num_words))
    return *tables, words, negatives, before, after


def by_hand(input_rows, output_rows, words, negatives, before, after, with_loss=True):
    """Return the result, its gradients spread over whole tables."""
    places = Places.find(words, before, after, negatives, len(output_rows))
    inputs, outputs = places.words.ids, places.outputs.ids
    result = cbow_gradients(input_rows[inputs], output_rows[outputs], places, NEGATIVE, with_loss)
    result.center = torch.zeros_like(input_rows).index_copy_(0, inputs, result.center)
    result.context = torch.zeros_like(output_rows).index_copy_(0, outputs, result.context)
    return result


@pytest.mark.parametrize(
    ("num_words", "window", "groups", "k", "dim", "sequences"),
    [(1, 3, 1, 4, 5, 1), (2, 1, 1, 1, 3, 1), (3, 5, 2, 4, 8, 1), (5, 2, 4, 3, 2, 1), (31, 2, 1, 7, 4, 4),
     (32, 5, 3, 8, 4, 1), (33, 5, 2, 8, 4, 9), (64, 5, 64, 3, 6, 2), (70, 16, 4, 9, 5, 3), (50, 20, 1, 9, 5, 1),
     (90, 3, 2, 50, 1, 90)],
)  # fmt: skip
def test_gradients_are_those_of_autograd_on_the_plain_loss(num_words, window, groups, k, dim, sequences):
    input_rows, output_rows, words, negatives, before, after = draw(num_words, window, groups, k, dim, 0, sequences)
    result = by_hand(input_rows, output_rows, words, negatives, before, after)

    input_rows.requires_grad_(), output_rows.requires_grad_()
    expected, predicted = plain_loss(input_rows, output_rows, words, negatives, before.tolist(), after.tolist())
    if expected.requires_grad:
        expected.backward()
    assert int(result.num_pairs) == predicted
    torch.testing.assert_close(result.loss, expected.detach())
    for grad, rows in ((result.center, input_rows), (result.context, output_rows)):
        torch.testing.assert_close(grad, torch.zeros_like(rows) if rows.grad is None else rows.grad)


def test_windows_that_reach_farther_to_one_side():
    input_rows, output_rows, words, negatives, _, _ = draw(40, 1, 2, 3, 4)
    generator = torch.Generator().manual_seed(7)
    before, after = (torch.randint(0, 5, (40,), generator=generator) for _ in range(2))
    before, after = torch.minimum(before, torch.arange(40)), torch.minimum(after, torch.arange(40).flip(0))
    result = by_hand(input_rows, output_rows, words, negatives, before, after)
    input_rows.requires_grad_(), output_rows.requires_grad_()
    plain_loss(input_rows, output_rows, words, negatives, before.tolist(), after.tolist())[0].backward()
    torch.testing.assert_close(result.center, input_rows.grad)
    torch.testing.assert_close(result.context, output_rows.grad)


def test_one_word_by_hand():
    # Word 0 is predicted from the mean of 1 and 3, which is 2; its output row is 0, and so is that of the negative.
    inputs, outputs = torch.tensor([[9.0], [1.0], [3.0]]), torch.zeros(3, 1)
    words, zeros = torch.tensor([1, 0, 2]), torch.zeros(3, dtype=torch.int64)
    one = torch.tensor([0, 1, 0])
    result = by_hand(inputs, outputs, words, torch.tensor([[2, 2]]), one, one)
    assert result.num_pairs == 1
    assert result.loss.item() == pytest.approx((1 + 5) * 0.693147, rel=1e-5)
    assert not result.center.any()  # output rows are zero
    assert result.context.tolist() == [[-1.0], [0.0], [5.0]]  # -2 / 2; and 5 negatives of 2 / 2
    nothing = by_hand(inputs, outputs, words, torch.tensor([[2, 2]]), zeros, zeros)
    assert (nothing.num_pairs, nothing.loss) == (0, 0)
    assert not nothing.context.any()


def test_loss_is_left_out_on_demand():
    input_rows, output_rows, words, negatives, before, after = draw(40, 3, 2, 5, 4)
    with_loss, without = (
        by_hand(input_rows, output_rows, words, negatives, before, after, wanted) for wanted in (True, False)
    )
    assert without.loss is None
    assert torch.equal(with_loss.center, without.center)
    assert torch.equal(with_loss.context, without.context)


def test_no_words():
    none = torch.empty(0, dtype=torch.int64)
    result = by_hand(torch.randn(3, 2), torch.randn(3, 2), none, torch.tensor([[0, 1]]), none, none)
    assert (result.num_pairs, result.loss) == (0, 0)
    assert not result.center.any()
    assert not result.context.any()
