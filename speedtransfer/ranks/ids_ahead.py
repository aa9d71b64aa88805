"""Ids of coming batches on their way to the owners of their rows, which nobody waits for before a lookup needs them.

Messages go by a group of their own and have a size that all processes know, so that no meeting comes before. All processes
must send as many, and receive them in the same order.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from speedtransfer.ranks.exchange import Exchange, Segment, check_counts

# What comes first in a message: what it is about, and how many numbers follow in the longest message of its sender.
_HEAD = 2
_STEP = 256  # messages have room for a multiple of so many numbers, at first for as many
_MOST_ROOM = 4  # times what a message needs, or those after it get less


class IdsAhead:
    """Ids that were sent to each process by an exchange that `may_be_beside`, and those that come from it.

    `parts` are for each table ``(n,)`` int64, sorted by the rank they go to, `sends` how many go to each, ``(ranks, tables)``;
    None: this process has refused its ids. All processes must send ids of what it is `about`.
    """

    def __init__(self, exchange: Exchange, sends: Tensor | None, parts: Sequence[Tensor], about: str) -> None:
        if exchange.beside is None:
            exchange.beside, exchange.room_beside = exchange.make_beside("looks up rows", about), _STEP
        room, self._tables = max(exchange.room_beside, len(parts)), len(parts)
        self._exchange, self._parts, self._about = exchange, parts, about
        self._word = zlib.crc32(about.encode())
        sent = torch.zeros(exchange.ranks, _HEAD + room, dtype=torch.int64, device="cpu")
        sent[:, 0], sent[:, 1] = self._word, -1
        if sends is not None:
            most, begin = len(parts) + int(sends.sum(1).max()), _HEAD + len(parts)
            sent[:, 1], sent[:, _HEAD:begin] = most, sends
            if most <= room:
                pieces = [part.cpu().split(each) for part, each in zip(parts, sends.T.tolist(), strict=True)]
                for rank, end in enumerate((begin + sends.sum(1)).tolist()):
                    torch.cat([piece[rank] for piece in pieces], out=sent[rank, begin:end])
        self._sends, self._got = sends, torch.empty_like(sent)
        # Raises if it was destroyed.
        others = exchange.group.size() - 1
        with exchange.told_of_failure("sends ids ahead"):
            self._work = exchange.beside.alltoall_base(self._got, sent, [], [])
        exchange.count("ids", others * sent[0].nbytes)

    @property
    def has_come(self) -> bool:
        """Whether all is there, in one message and as it should be, so that `take` needs nobody."""
        if not self._work.is_completed():
            return False
        words, sizes = self._got[:, 0], self._got[:, 1]
        return bool((words == self._word).all() and (sizes >= 0).all()) and self._fits()

    def _fits(self) -> bool:
        return int(self._got[:, 1].max()) <= self._got.shape[1] - _HEAD

    def wait(self) -> None:
        """Wait for what comes, before `take`. All processes know then how much room the messages after this one need.

        ProcessGroupError: a process has refused its ids, cannot be reached, or has sent those of other tables.
        """
        exchange, got = self._exchange, self._got
        with exchange.told_of_failure("sends ids ahead"):
            self._work.wait()
        check_counts(got[:, 1:2])
        exchange.check_same(got[:, 0], "looks up rows", self._about)
        most = int(got[:, 1].max())
        if not most <= exchange.room_beside <= max(_MOST_ROOM * most, _STEP):
            exchange.room_beside = -(-most * 9 // (8 * _STEP)) * _STEP

    def take(self) -> tuple[list[list[int]], list[Tensor]]:
        """Return for each table how many ids come from each rank, and the ids, (n,) in rank order.

        Collective where a message had no room for all.
        """
        begin, got = _HEAD + self._tables, self._got
        counts = got[:, _HEAD:begin]
        if self._fits():
            rows = [row[begin : begin + sum(each)].split(each) for row, each in zip(got, counts.tolist(), strict=True)]
            found = map(torch.cat, zip(*rows, strict=True))
            return counts.T.tolist(), [ids.to(part.device) for ids, part in zip(found, self._parts, strict=True)]
        assert self._sends is not None
        ways = zip(self._parts, self._sends.T.tolist(), counts.T.tolist(), strict=True)
        segments = [Segment(part.unsqueeze(1), sends, receives) for part, sends, receives in ways]
        return counts.T.tolist(), [ids[:, 0] for ids in self._exchange.move("ids", segments)]
