"""Train the rows of a block on the host by compiled loops, those of `compiled`.

One core does all of it: a second one, given half of the rows to copy, takes them out of the caches of the first.
"""

from __future__ import annotations

from torch import Tensor

from speedtransfer.buffers import empty
from speedtransfer.word2vec import compiled
from speedtransfer.word2vec.lane_rows import set_way, widen
from speedtransfer.word2vec.lanes import WIDTH
from speedtransfer.word2vec.places import Places


def gradients(
    starts: tuple[Tensor, Tensor], places: Places, cbow: bool, negative: int, rate: float, with_loss: bool
) -> tuple[list[Tensor], float]:
    """Return how far training moves the rows `starts` against the gradient, divided by `rate`, and the loss.

    Arguments as `gradients.block_gradients`.
    """
    kind, bags, ways = (starts[0].dtype, starts[0].device), places.bags, list[Tensor]()
    rows = [start.detach().contiguous().numpy() for start in starts]
    copies = [empty((len(row), -(-row.shape[1] // WIDTH) * WIDTH), *kind).numpy() for row in rows]
    for row, copy in zip(rows, copies, strict=True):
        widen(row, copy)
    where = bags.rows.inverse, bags.starts, places.contexts, places.before, places.after, places.draws
    numbers, typed_rate = [tensor.numpy() for tensor in where], rows[0].dtype.type(rate)
    dim = rows[0].shape[1]
    loss: float = compiled.train(*copies, *numbers, dim, places.span, negative, typed_rate, cbow, with_loss)
    for row, copy in zip(rows, copies, strict=True):
        ways.append(empty(row.shape, *kind))
        set_way(row, copy, typed_rate, ways[-1].numpy())
    return ways, loss
