"""Tiny data that every project is trained on, made by code: who chose what in which order, clicks on fields, and a graph."""

from dataclasses import dataclass

import numpy as np

USERS, ITEMS = 60, 90
FIELDS = (40, 25, 12)  # values of each field of a click


@dataclass(frozen=True)
class Interactions:
    """What users chose, in order of time: four columns of one length."""

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray


def interactions(seed=0):
    """Return 12 to 24 different items for each user: popular ones, and those near the user's own taste."""
    rng = np.random.default_rng(seed)
    taste, kind = rng.normal(size=(USERS, 3)), rng.normal(size=(ITEMS, 3))
    popularity = -np.log1p(np.arange(ITEMS)) / 2
    users, items, ratings = [], [], []
    for user in range(USERS):
        score = taste[user] @ kind.T + popularity
        chosen = np.argsort(-(score + rng.gumbel(size=ITEMS)))[: rng.integers(12, 25)]
        rng.shuffle(chosen)
        users += [user] * len(chosen)
        items += chosen.tolist()
        ratings += np.clip(np.round(3 + score[chosen] + rng.normal(size=len(chosen)) / 2), 1, 5).tolist()
    return Interactions(np.array(users), np.array(items), np.array(ratings), np.arange(len(users)))


def sequences(length=10):
    """Return for each user the last `length` + 1 items but one, counted from 1 (0 pads on the left), and the last one."""
    data = interactions()
    history, target = np.zeros((USERS, length), dtype=np.int64), np.zeros(USERS, dtype=np.int64)
    for user in range(USERS):
        items = data.item[data.user == user] + 1
        history[user, -min(length, len(items) - 1) :] = items[:-1][-length:]
        target[user] = items[-1]
    return history, target


def clicks(rows=600, seed=0):
    """Return the fields' values (rows, 3), skewed as real ones are, two numbers (rows, 2), and whether it was clicked."""
    rng = np.random.default_rng(seed)
    fields = np.stack([(size * rng.random(rows) ** 2.5).astype(np.int64) for size in FIELDS], 1)
    numbers = rng.normal(size=(rows, 2))
    effects = sum(rng.normal(size=size)[fields[:, k]] for k, size in enumerate(FIELDS))
    clicked = rng.random(rows) < 1 / (1 + np.exp(-(1.5 * effects + numbers[:, 0])))
    return fields, numbers.astype(np.float32), clicked.astype(np.float32)


def write_atomic_files(folder, name="tiny"):
    """Write `folder`/`name` as RecBole reads data: tab-separated columns, each named with its type."""
    data = interactions()
    rng = np.random.default_rng(1)
    (folder / name).mkdir(parents=True)
    rows = zip(data.user, data.item, data.rating, data.time, strict=True)
    _write(folder / name / f"{name}.inter", "user_id:token item_id:token rating:float timestamp:float", rows)
    users = zip(range(USERS), rng.integers(0, 7, USERS), rng.integers(0, 2, USERS), strict=True)
    _write(folder / name / f"{name}.user", "user_id:token age:token gender:token", users)
    items = zip(range(ITEMS), rng.integers(0, 9, ITEMS), strict=True)
    _write(folder / name / f"{name}.item", "item_id:token class:token", items)


def _write(path, header, rows):
    lines = ["\t".join(header.split()), *("\t".join(str(value) for value in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def edges():
    """Return the edges (2, n) of a connected graph of the items, each in both directions."""
    head, tail = np.random.default_rng(2).integers(0, ITEMS, (2, 200))
    ring = np.arange(ITEMS)
    one_way = np.stack([np.concatenate([ring, head]), np.concatenate([(ring + 1) % ITEMS, tail])])
    return np.unique(np.concatenate([one_way, one_way[::-1]], 1), axis=1)
