"""word2vec within a block as it is defined, one prediction at a time, with gradients from autograd; for tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from speedtransfer.word2vec import places


def span_of(block, rows_of=None):
    """Return how many words move at once: 16, or fewer where the most frequent row of the block would be among them twice."""
    words = block.words.tolist()
    rows = [row for word in words for row in (rows_of[word] if rows_of else [word])]
    counts = torch.bincount(torch.tensor(rows, dtype=torch.int64))
    return min(max(len(block.words) // int(counts.max()), 1), places.MOST_WORDS_AT_ONCE) if len(block.words) else 1


def draws_of(position, block, model, negative, rows_of=None):
    """Return the words of the pool that the word at `position` of a block takes as negatives, with all of its span."""
    pool, span = block.negatives.tolist(), position // span_of(block, rows_of)
    count = min(len(pool), {"skipgram": 6, "cbow": 3}[model] * negative)
    return [pool[(span * count + draw) % len(pool)] for draw in range(count)]


def window_of(block, position):
    first, last = position - int(block.before[position]), position + int(block.after[position])
    return [near for near in range(first, last + 1) if near != position]


def loss_of(vector, output, positives, drawn, negative, counts=None):
    """Of one vector that predicts the words `positives`; the words drawn are weighted to `negative` a prediction.

    `counts` is what each prediction counts, by default 1.
    """
    counts = torch.tensor([1] * len(positives) if counts is None else counts, dtype=torch.float64)
    loss = -(F.logsigmoid(output[positives] @ vector) * counts).sum()
    return loss - F.logsigmoid(-(output[drawn] @ vector)).sum() * negative * counts.sum() / len(drawn)


def train(table, output, block, model, negative, rate, rows_of=None):
    """Return both tables (float64) after `block`, the summed loss, and how many predictions it has.

    `rows_of` has for each word the rows of `table` that its vector is the mean of; by default that of its own number.
    """
    table, output, words = table.clone(), output.clone(), block.words.tolist()
    rows_of = rows_of or [[word] for word in range(len(output))]
    total, predictions = 0.0, 0
    span = span_of(block, rows_of)
    for first in range(0, len(words), span):
        found = output.clone().requires_grad_()
        vectors, moves = torch.stack([table[rows].mean(0) for rows in rows_of]), torch.zeros_like(table)
        for i in range(first, min(first + span, len(words))):
            around = window_of(block, i)
            if not around:
                continue
            cbow = model == "cbow"
            vector = vectors[[words[j] for j in around]].mean(0) if cbow else vectors[words[i]].clone()
            vector.requires_grad_()
            positives = [words[i]] if cbow else [words[j] for j in around]
            counts = [
                (block.window + 1 - abs(i - j)) / block.window if block.window and not cbow else 1 for j in around
            ][: len(positives)]
            loss = loss_of(vector, found, positives, draws_of(i, block, model, negative, rows_of), negative, counts)
            loss.backward()
            total, predictions = total + float(loss.detach()), predictions + sum(counts)
            for j in (
                around if cbow else [i]
            ):  # the whole gradient to each part of a mean, as in word2vec.c and fastText
                for row in rows_of[words[j]]:
                    moves[row] -= rate * vector.grad
        table += moves
        if found.grad is not None:
            output -= rate * found.grad
    return table, output, total, predictions
