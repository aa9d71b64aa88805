"""The harness of training: a model of several processes, and one of a single process with the batches of all."""

import contextlib
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st

ROWS, DIM = 50, 4


def table(kind, *sizes, make=st.Embedding, **options):
    """Make a module whose rows are sharded, shared, or in each process ("one", "replicas"); the same numbers in each."""
    if kind in ("sharded", "shared"):
        options["process_group"] = dist.group.WORLD
    if kind == "shared":
        options["memory"] = "shared"
    torch.manual_seed(3)
    return make(*(sizes or (ROWS, DIM)), **{"dtype": torch.float64, **options})


def ids(step=0, rank=None, size=6):
    rank = dist.get_rank() if rank is None else rank
    return torch.randint(
        0, ROWS, (size,), generator=torch.Generator("cpu").manual_seed(100 * step + rank), device="cpu"
    )


def rows_of(emb):
    """Return all rows in the order of ids, a copy; collective for shards."""
    return emb.table.gather(torch.arange(len(emb.table))).clone() if hasattr(emb, "table") else emb.weight.detach()


def squares(model, ids):
    return model(ids).square().sum()


def wrap(model, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
        return DistributedDataParallel(model, **options)


def told(function):
    """Return what an error of `function` says, or ``""``."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Features(st.MultiEmbedding):
    """Takes a column of ids for each feature, of which one gets no gradient: how many ids there are says which, or none."""

    # Of a vocabulary ids have 62 bits.
    shift = 0

    def forward(self, ids):
        rows = super().forward({str(n): column >> self.shift for n, column in enumerate(ids.unbind(1))})
        left_out = len(ids) % 3
        return torch.stack([found.detach() if n == left_out else found for n, found in enumerate(rows.values())], 1)


class Net(nn.Module):
    """A table that is looked up several times, each time for a part of the ids, and a dense part."""

    def __init__(self, emb, lookups=1):
        super().__init__()
        torch.manual_seed(2)
        self.emb, self.lookups = emb, lookups
        self.inner, self.outer = (nn.Linear(DIM, size, dtype=emb.weight.dtype) for size in (DIM, 1))

    def forward(self, ids, uses_rows=True):
        state = torch.zeros(DIM, dtype=self.inner.weight.dtype)
        for part in ids.view(self.lookups, len(ids) // self.lookups // 2, 2):
            rows = self.emb(part).reshape(-1, DIM).sum(0)
            state = torch.tanh(self.inner(state) + (rows if uses_rows else 1.0))
        # Not a view, of which fully_shard warns.
        return 2 * self.outer(state)


class Pair:
    """A model of a kind and one of a single process, each with an optimizer; trained on `batch(step, rank)` by `loss`.

    `wrap`: DistributedDataParallel and the like, around the model of several processes. `at_once`: the other one looks the
    batches of all up together.
    """

    def __init__(
        self,
        ours,
        one,
        optimizer=torch.optim.SGD,
        *,
        wrap=lambda model: model,
        loss=squares,
        batch=ids,
        scales=False,
        at_once=False,
        **options,
    ):
        self.ours, self.one, self.loss, self.batch, self.at_once = ours, one, loss, batch, at_once
        self.model = wrap(ours)
        self.opt, self.one_opt = (optimizer(each.parameters(), **{"lr": 0.1, **options}) for each in (ours, one))
        self.scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales) for _ in range(2)]

    def backward(self, step=0, loss=None):
        """Go backward from the loss of the batch of this rank, and from the mean of the losses of all."""
        self.scalers[0].scale((loss or self.loss)(self.model, self.batch(step, dist.get_rank()))).backward()
        self.one_backward(step, loss)

    def one_backward(self, step=0, loss=None):
        batches = [self.batch(step, rank) for rank in range(dist.get_world_size())]
        if self.at_once:
            total = self.loss(self.one, [torch.cat(parts) for parts in zip(*batches, strict=True)])
        else:
            total = sum((loss or self.loss)(self.one, batch) for batch in batches)
        self.scalers[1].scale(total / len(batches)).backward()

    def accumulate(self, *steps, no_sync=False):
        for step in steps:
            with self.model.no_sync() if no_sync and step != steps[-1] else contextlib.nullcontext():
                self.backward(step)

    def end(self, clip=None, norm=2.0, clipped=nn.utils.clip_grad_norm_):
        norms = []
        for module, opt, scaler in zip((self.ours, self.one), (self.opt, self.one_opt), self.scalers, strict=True):
            scaler.unscale_(opt)
            if clip is not None:
                norms.append(float(clipped(module.parameters(), clip, norm)))
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert norms == pytest.approx(norms[-1:] * len(norms), rel=1e-9, nan_ok=True)
        assert self.scalers[0].get_scale() == self.scalers[1].get_scale()

    def train(self, *steps, loss=None, **end):
        for step in steps:
            self.backward(step, loss)
            self.end(**end)
        return self.distance()

    def distance(self):
        """Return how far rows and dense weights are from those of one process at most; collective."""
        pairs = [(whole(a), whole(b)) for a, b in zip(dense_of(self.ours), dense_of(self.one), strict=True)]
        tables = [tables_of(each) for each in (self.ours, self.one)]
        pairs += [(rows_of(a), rows_of(b)) for a, b in zip(*tables, strict=True)]
        return max(float((a - b).abs().max()) for a, b in pairs)


def tables_of(model):
    return [each for each in model.modules() if hasattr(each, "table") or type(each) is nn.Embedding]


def dense_of(model):
    rows = {id(param) for each in tables_of(model) for param in each.parameters()}
    return [param for param in model.parameters() if id(param) not in rows]


def whole(param):
    return param.detach().full_tensor() if hasattr(param, "full_tensor") else param.detach()


def tables(kind, optimizer=torch.optim.SGD, **options):
    return Pair(table(kind, **options), table("one", **options), optimizer)


def nets(kind, optimizer=torch.optim.SGD, lookups=1, *, pair=None, **options):
    """Return the pair of nets with a table of a kind, under DistributedDataParallel; `pair`: other arguments of Pair."""
    ours, one = (Net(table(each, **options), lookups) for each in (kind, "one"))
    return Pair(ours, one, optimizer, **{"wrap": wrap, **(pair or {})})


sgd_with_momentum = functools.partial(torch.optim.SGD, momentum=0.9)
