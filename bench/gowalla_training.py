"""Train a recommender in one process or several, with its tables kept in one of five ways, and score it.

Matrix factorization with BPR's loss (Rendle et al., 2009). The dot product of the rows of a user and an item is weighted (He
et al., 2017): the weights are an ordinary parameter, without which `DistributedDataParallel` would refuse the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from idle_data import Data, hits_among_best, pairs_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st
from speedtransfer.ranks import exchange_of

DENSE, ALONE, REPLICAS, SHARDED, SHARED = KINDS = ("dense", "table", "replicas", "sharded", "shared")
TOP = 20
_USERS_AT_ONCE = 1024
_DRAWS = 10  # of a negative item at most; then one that the user has is accepted


@dataclass(frozen=True)
class Settings:
    """What is trained and how.

    Attributes
    ----------
    epochs, batch, dim, seed : int
        A batch has so many pairs of user and item, in all processes together.
    lr, weight_decay : float
        Of AdamW.
    dtype : str
        "float32" or "float64".
    """

    epochs: int = 10
    batch: int = 8192
    dim: int = 64
    seed: int = 0
    lr: float = 0.01
    weight_decay: float = 0.1
    dtype: str = "float32"


class Model(nn.Module):
    """A table of users, one of items, and the weights of the dot product."""

    def __init__(self, sizes: tuple[int, int], settings: Settings, kind: str, group: Any = None) -> None:
        super().__init__()
        dtype = getattr(torch, settings.dtype)
        options: dict[str, Any] = {"dtype": dtype}
        if kind != DENSE:
            options |= {"idle": "exact", "device": "cpu"}
        if kind in (SHARDED, SHARED):
            options["process_group"] = group
        if kind == SHARED:
            options["memory"] = "shared"
        make = nn.Embedding if kind == DENSE else st.Embedding
        # The same seed gives the same rows, on whichever rank they are.
        torch.manual_seed(settings.seed)
        self.users, self.items = (make(size, settings.dim, **options) for size in sizes)
        for emb in (self.users, self.items):
            nn.init.normal_(emb.weight, std=0.1)
        self.scale = nn.Parameter(torch.ones(settings.dim, dtype=dtype))

    def forward(self, users: Tensor, items: Tensor, others: Tensor) -> Tensor:
        """Return the loss of each pair of user and item, (n,), against an item that the user does not have."""
        # One lookup, so that the rows of both cross in one message.
        own, other = self.items(torch.cat([items, others])).chunk(2)
        return F.softplus((self.users(users) * self.scale * (other - own)).sum(1))


class Batches:
    """The batches of all processes together: users, their items and as many items that they do not have, (n,) each."""

    def __init__(self, data: Data, settings: Settings) -> None:
        self._pairs, self._batch, self._num_items = data.train, settings.batch, data.sizes[1]
        self._known = (data.train[:, 0] * self._num_items + data.train[:, 1]).sort().values
        # With the same seed in every process.
        self._generator = torch.Generator().manual_seed(settings.seed + 1)

    def __len__(self) -> int:
        return -(-len(self._pairs) // self._batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        order = torch.randperm(len(self._pairs), generator=self._generator)
        for chosen in order.split(self._batch):
            users, items = self._pairs[chosen].unbind(1)
            yield users, items, self._others(users)

    def _others(self, users: Tensor) -> Tensor:
        others = torch.randint(self._num_items, users.shape, generator=self._generator)
        for _ in range(_DRAWS):
            pairs = users * self._num_items + others
            has = self._known[torch.searchsorted(self._known, pairs).clamp_max(len(self._known) - 1)] == pairs
            if not has.any():
                break
            others[has] = torch.randint(self._num_items, (int(has.sum()),), generator=self._generator)
        return others


def train(data: Data, settings: Settings, kind: str, group: Any = None) -> dict[str, Any]:
    """Train and return, in rank 0, ``state`` (the state dict of nn.Embedding modules), the losses and scores; else nothing.

    Parameters
    ----------
    data : Data
    settings : Settings
    kind : str
        Of `KINDS`.
    group : ProcessGroup, optional
        The processes that train together; all must call it.
    """
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    model = Model(data.sizes, settings, kind, group)
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr, weight_decay=settings.weight_decay, fused=True)
    net: nn.Module = model
    if group is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
            net = DistributedDataParallel(model, process_group=group)
    batches, losses = Batches(data, settings), []
    for epoch in range(1, settings.epochs + 1):
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss = net(*(ids[rank::ranks] for ids in batch)).sum()
            optimizer.zero_grad()
            # Gradients are averaged over the processes: this makes it the mean of the whole batch, also if parts are uneven.
            (loss * (ranks / len(batch[0]))).backward()
            optimizer.step()
            total += loss.detach()
        if group is not None:
            dist.all_reduce(total, group=group)
        losses.append(float(total) / len(data.train))
        if rank == 0:
            print(f"{kind}: epoch {epoch}/{settings.epochs}, loss {losses[-1]:.4f}", flush=True)
    traffic = _traffic(model, kind, group)
    state = st.full_state_dict(model)
    if rank != 0:
        return {}
    recall, ndcg = score(state["users.weight"] * state["scale"], state["items.weight"], data)
    steps = settings.epochs * len(batches)
    return {"state": state, "losses": losses, "recall": recall, "ndcg": ndcg, "steps": steps, **traffic}


def _traffic(model: Model, kind: str, group: Any) -> dict[str, int]:
    """Return the rows read from all tables, and the bytes that all processes together have sent to each other for them."""
    if kind == DENSE:
        return {}
    tables: list[Any] = [model.users.table, model.items.table]
    rows, sent = sum(table.stats().gathered_rows for table in tables), 0
    if group is not None:
        # What `emb.table.stats()` of sharded and shared tables has too; this also knows of replicas.
        traffic = exchange_of(group).traffic
        sent = traffic.control + traffic.ids + traffic.rows + traffic.gradients
        counts = torch.tensor([rows, sent])
        dist.all_reduce(counts, group=group)
        rows, sent = counts.tolist()
    return {"gathered_rows": rows, "sent_bytes": sent}


def score(users: Tensor, items: Tensor, data: Data) -> tuple[float, float]:
    """Return recall and NDCG at `TOP` as LightGCN has them: means over users of a ranking of all items not trained on."""
    count, places = min(TOP, len(items)), torch.arange(2, TOP + 2, dtype=torch.float64)
    gains, found = 1 / places.log2(), []
    ideal = gains.cumsum(0)
    for first in range(0, len(users), _USERS_AT_ONCE):
        scores = users[first : first + _USERS_AT_ONCE] @ items.T
        known, wanted = (pairs_of(pairs, first, len(scores)) for pairs in data)
        hits, counts = hits_among_best(scores, known, wanted, TOP)
        hits = hits.double()
        measures = [hits.sum(1) / counts, hits @ gains[:count] / ideal[counts.clamp(1, TOP) - 1]]
        found.append(torch.stack(measures, dim=1)[counts > 0])
    recall, ndcg = torch.cat(found).mean(0).tolist()
    return recall, ndcg
