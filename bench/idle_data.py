"""Users and their items, to train with and held out: read, in batches, and ranked.

The files are those of LightGCN's repository: one line a user, its number and then its items.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from experiment import DataError
from torch import Tensor

TOP = 20
_USERS_AT_ONCE = 1024
_MOST = 10_000_000  # users or items: each has a row, also for the dense optimizer
_FORMAT = "lines with the number of a user, then those of its items, as in LightGCN's Gowalla"


@dataclass(frozen=True)
class Settings:
    """What is trained and how.

    Attributes
    ----------
    steps, batch, dim, seed : int
    lr, weight_decay : float
        Of AdamW; SparseAdam has no decay.
    points : int
        How often the ways are compared.
    users : int
        At most so many users are scored on held-out items.
    """

    steps: int = 2000
    batch: int = 2048
    dim: int = 32
    lr: float = 0.01
    weight_decay: float = 0.1
    seed: int = 0
    points: int = 20
    users: int = 1500


class Data(NamedTuple):
    """Pairs of user and item, ``(n, 2)`` int64 sorted by user."""

    train: Tensor
    test: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of users and of items."""
        users, items = (torch.cat([self.train, self.test]).amax(0) + 1).tolist()
        return users, items


def read_data(folder: Path) -> Data:
    """Read ``train.txt`` and ``test.txt`` of `folder`, packed (``.xz``) or not.

    Raises
    ------
    DataError
        A file is not there or has another format.
    """
    return Data(_read_pairs(folder, "train.txt"), _read_pairs(folder, "test.txt"))


def _read_pairs(folder: Path, name: str) -> Tensor:
    path = next((path for path in (folder / name, folder / f"{name}.xz") if path.is_file()), None)
    if path is None:
        raise DataError(f"there is no {name} or {name}.xz in {str(folder)!r}; name the folder that has them: {_FORMAT}")
    pairs: list[tuple[int, int]] = []
    number = 0
    try:
        with lzma.open(path, "rt", encoding="ascii") if path.suffix == ".xz" else path.open(encoding="ascii") as file:
            for number, line in enumerate(file, start=1):  # noqa: B007
                user, *items = map(int, line.split())
                if not 0 <= min([user, *items]) <= max([user, *items]) < _MOST:
                    raise ValueError(f"a number is negative or not below {_MOST:,}")
                pairs += [(user, item) for item in items]
    except (ValueError, OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(
            f"cannot read line {max(number, 1)} of {str(path)!r} ({error}); it must have {_FORMAT}"
        ) from error
    if not pairs:
        raise DataError(f"{str(path)!r} names no item at all; it must have {_FORMAT}")
    return torch.tensor(sorted(pairs))


def batches(data: Data, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield users, and their items followed by as many random ones, epoch by epoch in a new order."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    count, items = min(settings.batch, len(data.train)), data.sizes[1]
    while True:
        order = torch.randperm(len(data.train), generator=generator)
        for first in range(0, len(order) - count + 1, count):
            users, wanted = data.train[order[first : first + count]].unbind(1)
            yield users, torch.cat([wanted, torch.randint(items, (count,), generator=generator)])


def pairs_of(pairs: Tensor, first: int, count: int) -> Tensor:
    """Return the pairs of `count` users from number `first` on, their users counted from there; `pairs` are sorted by user."""
    begin, end = torch.searchsorted(pairs[:, 0].contiguous(), torch.tensor([first, first + count])).tolist()
    return pairs[begin:end] - torch.tensor([first, 0])


def hits_among_best(scores: Tensor, known: Tensor, wanted: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Rank for each user all items that it was not trained with.

    Parameters
    ----------
    scores : Tensor
        Of shape (users, items); those of `known` are overwritten.
    known, wanted : Tensor
        Pairs of user and item that were trained with, and that are held out, (n, 2).
    top : int

    Returns
    -------
    (Tensor, Tensor)
        Whether each of the `top` best items is held out, (users, top) bool, and how many items are, (users,).
    """
    known, wanted = known.to(scores.device), wanted.to(scores.device)
    scores[known[:, 0], known[:, 1]] = -torch.inf
    is_wanted = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    is_wanted[wanted[:, 0], wanted[:, 1]] = True
    best = scores.topk(min(top, scores.shape[1]), dim=1).indices
    return is_wanted.gather(1, best), is_wanted.sum(1)


class Recall:
    """The share of a user's held-out items among the `TOP` best of all items that it has not been trained with."""

    def __init__(self, data: Data, settings: Settings) -> None:
        users = data.test[:, 0].unique()
        order = torch.randperm(len(users), generator=torch.Generator().manual_seed(settings.seed))
        self.users = users[order[: settings.users]].sort().values
        self._data = [self._of_users(pairs) for pairs in data]

    def _of_users(self, pairs: Tensor) -> Tensor:
        """Return the pairs of the chosen users, by their places in `users`."""
        users, items = pairs.T.contiguous()
        place = torch.searchsorted(self.users, users).clamp_max(len(self.users) - 1)
        chosen = self.users[place] == users
        return torch.stack([place[chosen], items[chosen]], dim=1)

    def __call__(self, users: Tensor, items: Tensor) -> float:
        """Return the mean over the users, for the weights of a model."""
        shares = []
        for first in range(0, len(self.users), _USERS_AT_ONCE):
            chosen = self.users[first : first + _USERS_AT_ONCE].to(users.device)
            known, wanted = (pairs_of(pairs, first, len(chosen)) for pairs in self._data)
            hits, counts = hits_among_best(users[chosen] @ items.T, known, wanted, TOP)
            shares.append(hits.sum(1).float().cpu() / counts.cpu())
        return float(torch.cat(shares).mean())
