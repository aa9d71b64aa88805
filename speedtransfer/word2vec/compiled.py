"""Train the rows of a block on the host, and find its rounds, compiled by numba.

One core does it: a second one, given half of the rows to copy, takes them out of the caches of the first. A pair costs a dot
product and two additions of a row, all in the cache; negatives, which the words of a span share, cost products of small
matrices.

A span's words are counted from its first one, and those near it from the first of these. A pair is a word and one in its
window; a prediction is a pair in skip-gram, and in CBOW a word that has a window. Arrays are handed over one by one, as each
that is taken out of a tuple costs as much as a few rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from speedtransfer.buffers import empty
from speedtransfer.word2vec import lanes
from speedtransfer.word2vec.lanes import WIDTH, zero_rows
from speedtransfer.word2vec.places import Places


@lanes.compile_loops
def find_rounds(
    rows: np.ndarray, starts: np.ndarray, draws: np.ndarray, num_rows: tuple[int, int], most_spans: int, most_times: int
) -> np.ndarray:  # fmt: skip
    """Return the span that each round begins with, and last how many spans there are.

    `starts` (spans + 1,) says where each span begins in `rows` (n,) and last where they end; `draws` (spans, num_draws) are
    other rows. They are below `num_rows`. A round is as long as it may be: of `most_spans`, with no row of either kind more
    than `most_times`, but for what one span has.
    """
    found, times, drawn = [0], np.zeros(num_rows[0], np.int64), np.zeros(num_rows[1], np.int64)
    for span in range(len(draws)):
        is_full = span - found[-1] == most_spans
        for is_new in (False, True):
            for row in rows[starts[span] : starts[span + 1]]:
                times[row] += 1
                is_full = is_full or times[row] > most_times
            for row in draws[span]:
                drawn[row] += 1
                is_full = is_full or drawn[row] > most_times
            if is_new or not is_full or span == found[-1]:
                break
            for row in rows[starts[found[-1]] : starts[span + 1]]:
                times[row] = 0
            for row in draws[found[-1] : span + 1].flat:
                drawn[row] = 0
            found.append(span)
    found.append(len(draws))
    return np.array(found)


@lanes.compile_inlined
def _find_pairs(
    start: int, stop: int, low: int, before: np.ndarray, after: np.ndarray, window: int, pair_near: np.ndarray,
    pair_slots: np.ndarray, pair_shares: np.ndarray, pair_weights: np.ndarray, near_words: np.ndarray,
    near_sizes: np.ndarray, weights: np.ndarray
) -> None:  # fmt: skip
    """List the pairs of the words from `start` to `stop`: whom they are near, one by the size of the window, and their weight.

    `weights` is the sum of `places.pair_weight` of each word; `near_words` gets, for each word near, up to `WIDTH` words that
    have it in their window, and `pair_slots` where there.
    """
    n = 0
    for near in range(len(near_sizes)):
        near_sizes[near] = 0
    for i in range(start, stop):
        size = before[i] + after[i]
        share = 1 / max(size, 1)
        weights[i - start] = 0
        for j in range(size):
            near = i - before[i] + j
            near += near >= i  # no word is in its own window
            weight = (window + 1 - abs(near - i)) / window if window else 1.0
            near -= low
            slot = near * WIDTH + near_sizes[near]
            near_sizes[near] += 1
            near_words[slot] = i - start
            pair_near[n], pair_slots[n], pair_shares[0, n], pair_weights[0, n] = near, slot, share, weight
            weights[i - start] += weight
            n += 1


@lanes.compile_loops
def _loss(score: Any) -> float:
    """Return softplus of -score."""
    return max(-score, 0.0) + math.log1p(math.exp(-abs(score)))


@lanes.compile_inlined
def _predict(
    counts: np.ndarray, words: int, vectors: np.ndarray, context_rows: np.ndarray, predicted: np.ndarray,
    weights: np.ndarray, slopes: np.ndarray, moves: np.ndarray, rate: Any, with_loss: bool
) -> float:  # fmt: skip
    """Set the slopes of the rows `predicted`, `counts` of them a word, and the moves of `vectors`; return the loss.

    `weights` is what each prediction counts.
    """
    n, loss = 0, 0.0
    for at in range(words):
        for _ in range(counts[at]):
            slopes[0, n] = -lanes.score(vectors, at, context_rows, predicted[n])
            n += 1
    if with_loss:
        for j in range(n):
            loss += weights[0, j] * _loss(-slopes[0, j])
    for j in range(0, n, WIDTH):
        height = lanes.mul_add(lanes.load(weights, 0, j), lanes.fill(rate), lanes.fill(rate - rate))
        lanes.store(slopes, 0, j, lanes.sigmoid(lanes.load(slopes, 0, j), height))
    n = 0
    for at in range(words):
        lanes.weighted_sum(moves, at, slopes, context_rows, predicted, n, n + counts[at])
        n += counts[at]
    return loss


@lanes.compile_inlined
def _meet_noise(
    served: np.ndarray, words: int, vectors: np.ndarray, by_column: np.ndarray, noise: np.ndarray, weights: np.ndarray,
    slopes: np.ndarray, moves: np.ndarray, negatives: int, num_draws: int, rate: Any, with_loss: bool
) -> float:  # fmt: skip
    """Add to the moves of `vectors` by the rows `noise`, replace these by how far they move, and return the loss.

    `served` is what the predictions of each word count.
    """
    loss = 0.0
    for d in range(len(by_column)):
        for at in range(WIDTH):
            by_column[d, at] = vectors[at, d]
    lanes.add_products(slopes, True, noise, by_column, len(by_column))
    for at in range(WIDTH):
        weights[0, at] = negatives * served[at] / num_draws if at < words else 0  # negatives that a draw stands for
    if with_loss:
        for t in range(num_draws):
            for at in range(words):
                loss += weights[0, at] * _loss(-slopes[t, at])
    for at in range(WIDTH):
        weights[0, at] *= -rate
    for t in range(len(slopes)):
        lanes.store(slopes, t, 0, lanes.sigmoid(lanes.load(slopes, t, 0), lanes.load(weights, 0, 0)))
    lanes.add_products(moves, False, slopes.T, noise, len(noise))
    lanes.add_products(noise, True, slopes, vectors, WIDTH)
    return loss


def _scratch(places: Places, dim: int, dtype: Any, cbow: bool) -> tuple[Any, Any, np.ndarray]:
    """Return the arrays that `train` works in: numbers of the dtype, places, and what the predictions of each word count.

    It is not compiled: that would take some seconds, and save microseconds.
    """
    most_near, most_pairs = WIDTH + 2 * places.reach, WIDTH * (2 * places.reach + 1)
    nearby, by_column = zero_rows(most_near, dim, dtype), zero_rows(dim, WIDTH, dtype)  # the vectors of words
    vectors = zero_rows(WIDTH, dim, dtype) if cbow else nearby[:WIDTH]  # what predicts
    num_noise = -(-places.draws.shape[1] // 4) * 4
    # How far the spans of a round move rows: of their words, of words near them, and negatives.
    moves, near_moves, noise = (
        zero_rows(places.most_spans * count, dim, dtype).reshape(places.most_spans, count, nearby.shape[1])
        for count in (WIDTH, most_near, num_noise)
    )
    noise_slopes, noise_weights = zero_rows(num_noise, WIDTH, dtype), zero_rows(1, WIDTH, dtype)
    slopes, shares, weights = (zero_rows(1, most_pairs, dtype) for _ in range(3))
    weights[:] = 1  # CBOW predicts one word from all of a window: it counts once
    pair_weights = zero_rows(1, most_pairs, dtype) if cbow else weights
    near_slopes = np.ones((1, most_near * WIDTH), dtype)
    counts, near_sizes = np.zeros(WIDTH, np.int64), np.zeros(most_near, np.int64)  # predictions of each word
    predicted, predicting, pair_near, pair_slots = np.zeros((4, most_pairs), np.int64)
    near_words = np.zeros(most_near * WIDTH, np.int64)
    return (
        (nearby, vectors, moves, near_moves, by_column, noise, noise_slopes, noise_weights, slopes, shares, weights,
         pair_weights, near_slopes),
        (counts, near_sizes, predicted, predicting, pair_near, pair_slots, near_words),
        np.zeros(WIDTH),
    )  # fmt: skip


@lanes.compile_inlined
def _add_words(rows: np.ndarray, places: np.ndarray, moves: np.ndarray, start: int, stop: int) -> None:
    for i in range(start, stop):
        lanes.add_row(rows, places[i], moves, i - start)


@lanes.compile_inlined
def _add_bags(
    rows: np.ndarray, places: np.ndarray, starts: np.ndarray, moves: np.ndarray, start: int, stop: int
) -> None:
    for i in range(start, stop):
        for bag in range(starts[i], starts[i + 1]):
            lanes.add_row(rows, places[bag], moves, i - start)


@lanes.compile_loops
def train(
    center_rows: np.ndarray, context_rows: np.ndarray, bag_rows: np.ndarray, starts: np.ndarray, contexts: np.ndarray,
    before: np.ndarray, after: np.ndarray, draws: np.ndarray, rounds: np.ndarray, most_words: int, reach: int,
    window: int, negatives: int, rate: Any, cbow: bool, with_loss: bool, scratch: Any
) -> float:  # fmt: skip
    """Train both kinds of rows in place, and return the loss.

    Both, (u, width) and (v, width), are float32 or float64, as `rate` is; width is a multiple of `WIDTH`, with zeros from the
    dimension of the vectors on. It is fastest where each row begins where a line of the cache does. A span has `most_words`,
    `WIDTH` at most; the others are as in `Places` and `block_gradients`.
    """
    numbers, indices, served = scratch
    nearby, vectors, all_moves, all_near_moves, by_column, all_noise, noise_slopes, noise_weights = numbers[:8]
    slopes, shares, weights, pair_weights, near_slopes = numbers[8:]
    counts, near_sizes, predicted, predicting, pair_near, pair_slots, near_words = indices
    count, num_draws, loss, turn = len(contexts), draws.shape[1], 0.0, 0

    for number in range(len(draws)):
        first_span, next_span = rounds[turn], rounds[turn + 1]
        place = number - first_span
        moves, near_moves, noise = all_moves[place], all_near_moves[place], all_noise[place]
        start, stop = number * most_words, min((number + 1) * most_words, count)
        low, high = max(start - reach, 0), min(stop + reach, count)
        _find_pairs(
            start, stop, low, before, after, window, pair_near, pair_slots, shares, pair_weights, near_words, near_sizes,
            served
        )  # fmt: skip

        first, last = (low, high) if cbow else (start, stop)
        for i in range(first, last):
            lanes.mean_row(nearby, i - first, center_rows, bag_rows, starts[i], starts[i + 1])
        n = predictions = 0
        for i in range(start, stop):
            size = before[i] + after[i]
            counts[i - start] = min(size, 1) if cbow else size
            if cbow:
                served[i - start] = counts[i - start]
                lanes.weighted_sum(vectors, i - start, shares, nearby, pair_near, n, n + size)
            for j in range(counts[i - start]):
                predicted[predictions] = contexts[i if cbow else low + pair_near[n + j]]
                predicting[predictions] = i - start
                predictions += 1
            n += size
        for t in range(num_draws):
            lanes.copy_row(noise, t, context_rows, draws[number, t])
        for t in range(num_draws, len(noise)):
            for d in range(noise.shape[1]):
                noise[t, d] = 0
        words = stop - start
        loss += _predict(counts, words, vectors, context_rows, predicted, weights, slopes, moves, rate, with_loss)
        loss += _meet_noise(
            served, words, vectors, by_column, noise, noise_weights, noise_slopes, moves, negatives, num_draws, rate,
            with_loss
        )  # fmt: skip
        if not cbow:
            for n in range(predictions):
                near_slopes[0, pair_slots[n]] = slopes[0, n]
        for near in range(high - low):
            n, movers = near * WIDTH, moves if cbow else vectors
            lanes.weighted_sum(near_moves, near, near_slopes, movers, near_words, n, n + near_sizes[near])
        if cbow:  # from here on `moves` are those of what is predicted
            n = 0
            for at in range(words):
                lanes.weighted_sum(moves, at, slopes, vectors, predicting, n, n + counts[at])
                n += counts[at]

        if number + 1 < next_span:
            continue
        turn += 1
        for done in range(next_span - first_span):
            start = (first_span + done) * most_words
            stop = min(start + most_words, count)
            low, high = max(start - reach, 0), min(stop + reach, count)
            if cbow:
                _add_words(context_rows, contexts, all_moves[done], start, stop)
                _add_bags(center_rows, bag_rows, starts, all_near_moves[done], low, high)
            else:
                _add_words(context_rows, contexts, all_near_moves[done], low, high)
                _add_bags(center_rows, bag_rows, starts, all_moves[done], start, stop)
            _add_words(context_rows, draws[first_span + done], all_noise[done], 0, num_draws)
    return loss


def gradients(
    starts: tuple[Tensor, Tensor], places: Places, cbow: bool, negative: int, rate: float, with_loss: bool
) -> tuple[list[Tensor], float]:
    """Return how far training moves the rows `starts` against the gradient, divided by `rate`, and the loss.

    Arguments as `gradients.block_gradients`.
    """
    kind, bags, dim, ways = (starts[0].dtype, starts[0].device), places.bags, starts[0].shape[1], list[Tensor]()
    rows = [start.detach().contiguous().numpy() for start in starts]
    copies = [empty((len(row), -(-dim // WIDTH) * WIDTH), *kind).numpy() for row in rows]
    for row, copy in zip(rows, copies, strict=True):
        copy[:, :dim], copy[:, dim:] = row, 0
    where = bags.rows.inverse, bags.starts, places.contexts, places.before, places.after, places.draws, places.rounds
    numbers, typed_rate = [tensor.numpy() for tensor in where], rows[0].dtype.type(rate)
    scratch = _scratch(places, dim, rows[0].dtype, cbow)
    sizes = places.span, places.reach, places.window, negative
    loss: float = train(*copies, *numbers, *sizes, typed_rate, cbow, with_loss, scratch)
    for row, copy in zip(rows, copies, strict=True):
        ways.append(empty(row.shape, *kind))
        lanes.set_way(row, copy, typed_rate, ways[-1].numpy())
    return ways, loss
