"""What a block does to rows against autograd on the plain loss, prediction by prediction; compiled loops against torch."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit

from speedtransfer.word2vec import Block, gradients, lanes
from speedtransfer.word2vec.gradients import DRAWS, MODELS, block_gradients
from speedtransfer.word2vec.lanes import WIDTH, load, store
from speedtransfer.word2vec.places import MOST_WORDS_AT_ONCE, Places

WAYS = ["compiled", "torch"]
NUM_ROWS = 17  # fewer words than positions: rows repeat


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(gradients, "_may_be_compiled", lambda rows: False)
    return request.param


def draw_block(num_words, window, groups=2, k=8, num_rows=NUM_ROWS, seed=0):
    """Windows of other sizes to both sides, cut at the block and at a few edges of sequences."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    edges = torch.cat([torch.tensor([0, num_words]), draw(0, num_words + 1, num_words // 20)]).unique()
    position, windows = torch.arange(num_words), draw(0, window + 1, num_words)
    sequence = torch.searchsorted(edges, position, right=True)
    before = torch.minimum(windows, position - edges[sequence - 1])
    after = torch.minimum(draw(0, window + 1, num_words), edges[sequence] - 1 - position)
    return Block(draw(0, num_rows, num_words), before, after, draw(0, num_rows, groups * k))


def draw_tables(dim, num_rows=NUM_ROWS, dtype=torch.float64, scale=0.5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(num_rows, dim, dtype=dtype, generator=generator) * scale for _ in range(2)]


def in_rounds(places, spans):
    """Return places with rounds of so many spans each; None: as they are."""
    if spans is None:
        return places
    starts = [*range(0, max(len(places.draws), 1), spans), len(places.draws)]
    return dataclasses.replace(places, rounds=torch.tensor(starts), round_starts=starts)


def by_hand(vectors, output, block, model, negative=5, spans=None, **options):
    """Return the result, and both gradients spread over whole tables."""
    places = in_rounds(Places.find(block, len(vectors), DRAWS[model] * negative), spans)
    centers, contexts = places.bags.rows.ids, places.outputs.ids
    result = block_gradients(vectors[centers], output[contexts], places, model=model, negative=negative, **options)
    grads = torch.zeros_like(vectors), torch.zeros_like(output)
    grads[0][centers], grads[1][contexts] = result.center, result.context
    return result, *grads


# --- word2vec within a block as it is defined, one prediction at a time, with gradients from autograd -----------------


def span_of(block, rows_of=None):
    """Return how many words move at once: 16, or fewer where the most frequent row of the block would be among them twice."""
    words = block.words.tolist()
    rows = [row for word in words for row in (rows_of[word] if rows_of else [word])]
    counts = torch.bincount(torch.tensor(rows, dtype=torch.int64))
    return min(max(len(block.words) // int(counts.max()), 1), MOST_WORDS_AT_ONCE) if len(block.words) else 1


def rounds_of(block, model, negative, rows_of, span):
    """Return with which words rounds begin: of up to 16 spans, and a row up to 6 times unless one span has it more often."""
    starts, times, words = [0], Counter(), block.words.tolist()
    for first in range(0, len(words), span):
        here = Counter(row for word in words[first : first + span] for row in rows_of[word])
        here += Counter(f"drawn {word}" for word in draws_of(first, block, model, negative, rows_of))
        times += here
        if first > starts[-1] and (first == starts[-1] + 16 * span or any(times[row] > 6 for row in here)):
            starts.append(first)
            times = here
    return [*starts, len(words)]


def draws_of(position, block, model, negative, rows_of=None):
    """Return the words of the pool that the word at `position` of a block takes as negatives, with all of its span."""
    pool, span = block.negatives.tolist(), position // span_of(block, rows_of)
    count = min(len(pool), {"skipgram": 6, "cbow": 3}[model] * negative)
    return [pool[(span * count + draw) % len(pool)] for draw in range(count)]


def loss_of(vector, output, positives, drawn, negative, counts):
    """Of one vector that predicts words, with what each counts; the words drawn are weighted to `negative` a prediction."""
    counts = torch.tensor(counts, dtype=torch.float64)
    loss = -(F.logsigmoid(output[positives] @ vector) * counts).sum()
    return loss - F.logsigmoid(-(output[drawn] @ vector)).sum() * negative * counts.sum() / len(drawn)


def train(table, output, block, model, negative, rate, rows_of=None, spans=None):
    """Return both tables (float64) after `block`, the summed loss, and how many predictions it has.

    `rows_of` has for each word the rows of `table` that its vector is the mean of; by default that of its own number.
    """
    table, output, words = table.clone(), output.clone(), block.words.tolist()
    rows_of = rows_of or [[word] for word in range(len(output))]
    total, predictions, span = 0.0, 0, span_of(block, rows_of)
    starts = (
        [*range(0, len(words), span * spans), len(words)] if spans else rounds_of(block, model, negative, rows_of, span)
    )
    for first, last in itertools.pairwise(starts):
        found = output.clone().requires_grad_()
        vectors = torch.stack([table[rows].mean(0) for rows in rows_of]).requires_grad_()
        for i in range(first, last):
            window = range(i - int(block.before[i]), i + int(block.after[i]) + 1)
            places = [near for near in window if near != i]
            if not places:
                continue
            around, counts = [words[j] for j in places], [1] * len(places)
            if model == "cbow":
                # The whole gradient to each part of a mean, as in word2vec.c and fastText.
                whole = vectors[around].sum(0)
                vector, around, counts = whole - (whole - vectors[around].mean(0)).detach(), [words[i]], [1]
            else:
                vector = vectors[words[i]]
                if block.window:
                    counts = [(block.window + 1 - abs(i - j)) / block.window for j in places]
            loss = loss_of(vector, found, around, draws_of(i, block, model, negative, rows_of), negative, counts)
            loss.backward()
            total, predictions = total + float(loss.detach()), predictions + sum(counts)
        if found.grad is not None:
            for word, rows in enumerate(rows_of):
                for row in rows:
                    table[row] -= rate * vectors.grad[word]
            output -= rate * found.grad
    return table, output, total, predictions


# --- tests -----------------------------------------------------------------------------------------------------------

# Words, window, negatives for each group, a dimension, negatives a prediction, and rows: of a thousand few repeat, and spans
# have 16 words, of which the last is any part.
SHAPES = [
    (0, 3, 1, 4, 5, 2, 17), (1, 3, 1, 4, 5, 5, 17), (3, 5, 2, 4, 8, 1, 17), (50, 20, 1, 9, 70, 7, 17),
    (127, 3, 5, 10, 1, 5, 17), (17, 3, 1, 40, 3, 5, 1000), (50, 3, 1, 40, 3, 5, 1000), (300, 7, 2, 33, 5, 3, 17),
]  # fmt: skip
# Models, learning rates, and whether predictions have weights.
KINDS = list(itertools.product(MODELS, [1e-6, 0.05, 0.5], [False, True]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("way")
def test_rows_move_as_single_steps_move_them(shape):
    number = SHAPES.index(shape)
    check_steps(*shape, *KINDS[number * 5 % len(KINDS)], [None, 4, 16][number % 3])


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_rows_of_every_shape_and_kind_move_as_single_steps_move_them():
    for shape, kind, spans in itertools.product(SHAPES, KINDS, [None, 1, 3, 16]):
        check_steps(*shape, *kind, spans)


def test_rounds_end_where_a_row_would_be_there_too_often():
    words = torch.arange(640)
    words[100:120] = words[150] = 7  # 12 and 8 times in the spans 6 and 7, once in span 9
    words[400:640:16] = 9  # once in each span from 25 on
    none = torch.zeros_like(words)
    places = Places.find(Block(words, none, none, words[:40]), 640, 5)
    assert places.span == 16
    assert places.round_starts == [0, 6, 7, 9, 25, 31, 37, 40]
    assert Places.find(draw_block(0, 3), NUM_ROWS, 5).round_starts == [0, 0]


def check_steps(num_words, window, groups, k, dim, negative, num_rows, model, rate, weighted, spans):
    tables, block = draw_tables(dim, num_rows), draw_block(num_words, window, groups, k, num_rows)
    block = dataclasses.replace(block, window=window if weighted else 0)
    result, *grads = by_hand(*tables, block, model, negative, spans, rate=rate)
    *trained, loss, predictions = train(*tables, block, model, negative, rate, spans=spans)
    assert float(result.num_pairs) == pytest.approx(predictions)
    torch.testing.assert_close(float(result.loss), loss)
    for table, grad, expected in zip(tables, grads, trained, strict=True):
        torch.testing.assert_close(table - rate * grad, expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(grad, (table - expected) / rate, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("model", MODELS)
def test_extreme_scores_and_both_ways_agree(model, monkeypatch):
    block = draw_block(300, 5, 2, 16, num_rows=40)
    tables = draw_tables(33, num_rows=40, dtype=torch.float32, scale=5)  # scores up to about +-500
    compiled, *compiled_grads = by_hand(*tables, block, model, rate=1e-3)
    again, *again_grads = by_hand(*tables, block, model, rate=1e-3)
    assert all(map(torch.equal, compiled_grads, again_grads))
    assert torch.equal(compiled.loss, again.loss)
    monkeypatch.setattr(gradients, "_may_be_compiled", lambda rows: False)
    plain, *plain_grads = by_hand(*tables, block, model, rate=1e-3)
    assert plain.loss.isfinite()
    torch.testing.assert_close(compiled.loss, plain.loss)
    for grad, expected in zip(compiled_grads, plain_grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=5e-2)


# --- vectors for numba ------------------------------------------------------------------------------------------------

DTYPES = [np.float32, np.float64]


def random_rows(count, dim, dtype, seed=0):
    """Rows as wide as whole vectors, zero from `dim` on."""
    rows = lanes.zero_rows(count, dim, dtype)
    rows[:, :dim] = np.random.default_rng(seed).normal(size=(count, dim))
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 150])
def test_sums_and_products_of_rows_beside_numpy(dtype, dim):
    """One by one: numba keeps what it has compiled of `compiled` when a function that it calls has changed."""
    rows, others, into = random_rows(8, dim, dtype), random_rows(WIDTH, dim, dtype, 1), random_rows(8, dim, dtype, 4)
    weights, shares = random_rows(1, 6, dtype, 2), random_rows(8, WIDTH, dtype, 3)
    chosen, scores = np.array([0, 3, 3, 15, 1, 2]), np.zeros((8, WIDTH), dtype)
    # In float64: float32 of NumPy's BLAS is off by as much as ours, and on each processor by another.
    r, o, w, s = (each.astype(np.float64) for each in (rows, others, weights, shares))
    pairs = [(np.asarray(lanes.score(rows, 1, others, 7), dtype), r[1] @ o[7])]
    lanes.weighted_sum(into, 2, weights, others, chosen, 1, 5)
    pairs.append((into[2].copy(), w[0, 1:5] @ o[chosen[1:5]]))
    lanes.add_products(scores, True, rows, np.ascontiguousarray(others.T), dim)
    pairs.append((scores, r @ o.T))
    added, products = others.copy(), np.full_like(rows, 9)
    lanes.add_products(added, False, shares.T, rows, len(rows))
    lanes.add_products(products, True, shares, others, WIDTH)
    pairs += [(added, o + s.T @ r), (products, s @ o)]
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=0, atol=100 * np.finfo(dtype).eps)


@njit
def sigmoid_of(scores, heights, found):
    for n in range(0, scores.shape[1], WIDTH):
        store(found, 0, n, lanes.sigmoid(load(scores, 0, n), load(heights, 0, n)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_is_exact_to_a_few_roundings_and_takes_any_score(dtype):
    scores = np.concatenate([np.linspace(-79, 79, 10_000), np.zeros(16), np.linspace(-1e-3, 1e-3, 16)]).astype(dtype)[
        None
    ]
    heights, found = np.full_like(scores, -0.03), np.empty_like(scores)
    sigmoid_of(scores, heights, found)
    expected = heights.astype(np.float64) * torch.sigmoid(torch.from_numpy(scores).double()).numpy()
    assert np.abs(found / expected - 1).max() < 8 * np.finfo(dtype).eps
    scores = np.zeros((1, WIDTH), dtype)
    scores[0, :5] = np.inf, -np.inf, np.nan, 1e30, -1e30
    sigmoid_of(scores, np.ones_like(scores), found)
    assert np.isnan(found[0, 2])
    assert (found[0, [0, 3, 5]] == [1, 1, 0.5]).all()
    assert ((found[0, [1, 4]] > 0) & (found[0, [1, 4]] < 1e-34)).all()
