"""Train the rows of a block on a CUDA device by two kernels a round of spans, or in torch by two dozen operations a span."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.cuda import ARGUMENT_AT, KernelArgument, current_stream, launch_kernel, load_kernel
from speedtransfer.once import once
from speedtransfer.word2vec.places import MOST_WORDS_AT_ONCE, Places, pair_weight

CLUSTER = 8  # kBlocks of word2vec.cu: that many of Hopper and later train together, and before it there is one
THREADS = 512  # kThreads, of each block
_PLAN_THREADS, _ADD_THREADS = 128, 256
_SPAN, _PARTS = MOST_WORDS_AT_ONCE, 4  # kSpan, kParts
_SHARED_BYTES = 64 << 10  # of a block: every device that torch supports has as much
_TRAIN = KernelArgument("29q2d")  # struct Train, of which the round comes first


class Work(NamedTuple):
    """What the kernels of word2vec.cu are launched with."""

    argument: Any
    shared_bytes: int
    memory: tuple[Tensor, ...]  # that they work in, to be kept until they are queued; the first for moves


def pack_spans(
    center_rows: Tensor, context_rows: Tensor, places: Places, cbow: bool, negative: int, rate: float,
    losses: Tensor | None, blocks: int,
) -> Work:  # fmt: skip
    """Return what the kernels are launched with: arguments as `gradients.block_gradients`, rows contiguous.

    `losses`, zeros of float64, (most_spans, blocks, threads), get the loss in parts, to be summed; `blocks` train a span.
    """
    dim, num_spans = center_rows.shape[1], len(places.draws)
    bag_rows, rows, plan_size, room_size = _sizes(places, dim, cbow, blocks)
    exchanged = 4 * _exchanged(places, cbow, blocks)
    in_shared = exchanged + 4 * room_size <= _SHARED_BYTES
    plans, links = (
        torch.empty(num_spans * size, dtype=torch.int32, device=center_rows.device) for size in (plan_size, rows)
    )
    moves = center_rows.new_empty(places.most_spans * rows * dim)
    room = center_rows.new_empty(0 if in_shared else places.most_spans * blocks * room_size)
    bags = places.bags
    given = bags.rows.inverse, bags.starts, places.contexts, places.before, places.after, places.draws, places.rounds
    assert all(tensor.is_contiguous() for tensor in (center_rows, context_rows, *given))
    packed = _TRAIN.pack(
        0, 0, *(tensor.data_ptr() for tensor in (center_rows, context_rows, *given, plans, links, moves)),
        *(0 if tensor is None else tensor.data_ptr() for tensor in (room, losses)),
        len(places.before), dim, places.span, places.reach, places.draws.shape[1], bag_rows, _is_single(places), cbow,
        places.window, plan_size, room_size, blocks, len(places.rounds) - 1, negative, rate,
    )  # fmt: skip
    shared_bytes = exchanged + (4 * room_size if in_shared else 0)
    return Work(packed, shared_bytes, (moves, plans, links, room))


def fits_kernel(rows: Tensor, places: Places, cbow: bool) -> bool:
    """Return whether the kernel can train such rows: float32, in spans whose scores fit into shared memory."""
    if not rows.is_cuda or rows.dtype != torch.float32:
        return False
    ids = max(len(places.bags.rows.ids), len(places.outputs.ids))  # of 32 bits in a plan
    return 4 * _exchanged(places, cbow, _blocks(rows.device)) <= _SHARED_BYTES and ids < 1 << 31


def _exchanged(places: Places, cbow: bool, blocks: int) -> int:
    """Return how many numbers of 4 bytes each block has for scores and slopes."""
    targets = (1 if cbow else 2 * places.reach + 1) + places.draws.shape[1]
    slots = 4 * _up(targets * _SPAN // 4, blocks) // blocks
    return 4 + (blocks + 1) * slots + targets * _SPAN


def _sizes(places: Places, dim: int, cbow: bool, blocks: int) -> tuple[int, int, int, int]:
    """Return how many rows of bags a span reads at most, and rows, and numbers of 4 bytes: of its plan and a block's room."""
    reach = places.reach
    near, bags = (_SPAN, _SPAN + 2 * reach) if cbow else (_SPAN + 2 * reach, _SPAN)
    bag_rows, single = bags, _is_single(places)
    if not single:  # words that a block has not take the place of a row each
        starts, count, beside = places.starts, len(places.before), reach if cbow else 0
        firsts = range(0, count, places.span)
        bag_rows = beside + max(
            starts[min(first + places.span + beside, count)] - starts[max(first - beside, 0)] for first in firsts
        )
    rows = bag_rows + near + places.draws.shape[1]
    plan = _up(2 * rows + bag_rows + 2 * bags + 1 + 3 * _SPAN, 4)
    parts = _PARTS if blocks > 1 and not cbow else 1
    kept = rows + (0 if single else bags) + (_SPAN if cbow else 0) + parts * _SPAN
    chunks = _up(_up(dim, 4) // 4, blocks) // blocks  # of four columns, of each block
    return bag_rows, rows, plan, plan + kept * 4 * (chunks | 1)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _is_single(places: Places) -> bool:
    """Return whether each word has a row of its own."""
    return places.starts[-1] == len(places.before)


@once
def _blocks(device: torch.device) -> int:
    """Return how many blocks train a span."""
    return CLUSTER if torch.cuda.get_device_capability(device) >= (9, 0) else 1


def train_by_kernel(
    center_rows: Tensor, context_rows: Tensor, places: Places, cbow: bool, negative: int, rate: float, with_loss: bool
) -> Tensor | None:
    """Train rows in place; arguments as `pack_spans`. Return the loss, shape (), where it is wanted."""
    device = center_rows.device
    blocks = _blocks(device)
    losses = torch.zeros(places.most_spans, blocks, THREADS, dtype=torch.float64, device=device) if with_loss else None
    work = pack_spans(center_rows, context_rows, places, cbow, negative, rate, losses, blocks)
    stream = current_stream(device)

    def launch(name: str, blocks: int, threads: int, shared_bytes: int = 0) -> None:
        launch_kernel(_kernel(device, name), blocks, threads, work.argument, stream, shared_bytes)

    # The memory of the work may go once the kernels are queued: it is given to nothing that does not queue behind them.
    run_rounds(work, places, blocks, launch)
    return None if losses is None else losses.sum().to(center_rows.dtype)


def run_rounds(work: Work, places: Places, blocks: int, launch: Callable[..., None]) -> None:
    """Train round after round; `launch` gets the name of a kernel, its blocks and threads, and bytes of shared memory."""
    num_spans, field = len(places.draws), ARGUMENT_AT // 8
    if not num_spans:
        return
    for name in ("plan_spans", "link_spans"):
        launch(name, min(num_spans, 65_535), _PLAN_THREADS)
    for first, last in pairwise(places.round_starts):
        work.argument[field : field + 2] = first, last - first
        launch("train_spans", (last - first) * blocks, THREADS, work.shared_bytes)
        launch("add_moves", -(-len(work.memory[0]) // _ADD_THREADS), _ADD_THREADS)


# Finding it again would make the device current each time.
@once
def _kernel(device: torch.device, name: str) -> Any:
    return load_kernel("word2vec.cu", name, device, _SHARED_BYTES if name == "train_spans" else 0)


def train_in_torch(
    center_rows: Tensor, context_rows: Tensor, places: Places, cbow: bool, negative: int, rate: float, with_loss: bool
) -> Tensor | None:
    """Train rows in place by two dozen operations a span; arguments as `gradients.block_gradients`. Return the loss."""
    contexts, reach = places.contexts, places.reach
    loss = center_rows.new_zeros(()) if with_loss else None
    at = torch.arange(len(contexts), device=center_rows.device)
    added, ends = list[tuple[Tensor, Tensor, Tensor]](), set(places.round_starts)  # to tables, at rows: after a round
    for number, drawn in enumerate(places.draws):
        start, stop = number * places.span, min((number + 1) * places.span, len(contexts))
        here, near = slice(start, stop), slice(max(start - reach, 0), min(stop + reach, len(contexts)))
        gap = at[near] - at[here, None]
        inside = (gap >= -places.before[here, None]) & (gap <= places.after[here, None]) & (gap != 0)
        inside = inside.to(center_rows.dtype)  # (words of the span, words near them)
        around, noise = inside.sum(1, keepdim=True), context_rows[drawn]
        moved = near if cbow else here  # words whose rows are moved
        bags, bag_of, vectors = _vectors(center_rows, places, moved)
        if cbow:
            vectors = (inside / around.clamp(min=1)) @ vectors
            targets, counts = contexts[here], around.clamp(max=1)
            scores = (vectors * context_rows[targets]).sum(1, keepdim=True)
        else:
            targets, counts = contexts[near], inside * pair_weight(gap.abs(), places.window).to(inside.dtype)
            scores = vectors @ context_rows[targets].T
        noise_scores, weight = vectors @ noise.T, counts.sum(1, keepdim=True) * (negative / len(drawn))
        if loss is not None:
            loss += (F.softplus(-scores) * counts).sum() + (F.softplus(noise_scores) * weight).sum()
        slope, noise_slope = torch.sigmoid(-scores) * counts * rate, torch.sigmoid(noise_scores) * weight * -rate
        positives = context_rows[targets]
        moves = noise_slope @ noise + (slope * positives if cbow else slope @ positives)
        added += [
            (context_rows, targets, slope * vectors if cbow else slope.T @ vectors),
            (context_rows, drawn, noise_slope.T @ vectors),
            (center_rows, bags, (inside.T @ moves if cbow else moves)[bag_of]),
        ]
        if number + 1 in ends:
            for move in added:
                _add(*move)
            added.clear()
    return loss


def _vectors(rows: Tensor, places: Places, words: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that consecutive `words` are made of, which word each belongs to, and the vectors: (words, dim)."""
    inside = slice(places.starts[words.start], places.starts[words.stop])
    bags, starts = places.bags.rows.inverse[inside], places.bags.starts[words] - inside.start
    bag_of = places.bags.bag_of[inside] - words.start
    return bags, bag_of, F.embedding_bag(bags, rows, starts, mode="mean")


def _add(rows: Tensor, index: Tensor, values: Tensor) -> None:
    """Add `values` to `rows`, always in the same order."""
    if rows.device.type == "cpu":
        rows.index_add_(0, index, values)
    else:
        rows.index_put_((index,), values, accumulate=True)  # sorts; index_add_ adds in any order there
