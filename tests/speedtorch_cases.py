"""A client of SpeedTorch as its users wrote them, for every kind of class, and the same for the tests on a GPU."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import speedtransfer.speedtorch as SpeedTorch

WORDS, DIM, BATCH, NEGATIVES = 120, 8, 6, 3


class Kind(NamedTuple):
    """The classes of one memory: how users make a switcher of a variable and of an optimizer's state."""

    model: Callable[..., Any]
    optimizer: Callable[..., Any]
    options: dict[str, Any]
    rows: str  # the attribute that shows all rows of a model's switcher

    def switchers(self, optimizer, model, name, num_rows=WORDS, dim=DIM):
        variable = self.model(model.get_submodule(name), total_classes=num_rows, embed_dimension=dim, **self.options)
        return variable, self.optimizer(optimizer, num_rows, dim, model, name, **self.options)


def _kind(prefix, suffix, rows, **options):
    names = (f"{prefix}ModelFactory{suffix}", f"{prefix}OptimizerFactory{suffix}")
    return Kind(*(getattr(SpeedTorch, name) for name in names), options, rows)


KINDS = {
    "device": _kind("", "", "CUPYcorpus"),
    "pinned": _kind("", "", "CUPYcorpus", CPUPinn=True),
    "mmap": _kind("", "MM", "CUPYmemmap"),
    "torch-gpu": _kind("GPUPytorch", "", "pytorchGPUVar"),
    "torch-cpu": _kind("CPUPytorch", "", "pytorchCPUVar"),
    "torch-cuda": _kind("Pytorch", "", "pytorchGPUVar"),
    "torch-pageable": _kind("Pytorch", "", "pytorchGPUVar", deviceType="cpu"),
    "torch-pinned": _kind("Pytorch", "", "pytorchGPUVar", deviceType="cpu", pinType=True),
}


@contextlib.contextmanager
def batch(switchers, optimizer, *indexes, set_to_none=True):
    """A step on the rows of a batch: they come, and go back when the block has brought gradients."""
    for switcher in switchers:
        switcher.beforeForwardPass(*indexes)
    yield
    optimizer.step()
    optimizer.zero_grad(set_to_none)
    for switcher in switchers:
        switcher.afterOptimizerStep(*indexes)


class SkipGram(nn.Module):
    """Of a batch's rows only: the variables are as small as their users made them."""

    def __init__(self):
        super().__init__()
        self.u_embeddings = nn.Embedding(BATCH, DIM)
        self.v_embeddings = nn.Embedding(BATCH * (1 + NEGATIVES), DIM)

    def forward(self, pos_u, pos_v, neg_v):
        u, v, negative = self.u_embeddings(pos_u), self.v_embeddings(pos_v), self.v_embeddings(neg_v)
        positive = F.logsigmoid((u * v).sum(-1))
        return -(positive.sum() + F.logsigmoid(-(negative @ u.mT)).sum()) / len(pos_u)


def train(kind, device):
    """Train as the example of SpeedTorch's README does; return the losses and the two switchers of the variables."""
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    model = SkipGram().to(device)
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.4)
    u, u_state = kind.switchers(optimizer, model, "u_embeddings")
    v, v_state = kind.switchers(optimizer, model, "v_embeddings")
    u.normalDistributionInit(0.0, 0.3)
    v.zerosInit()
    u_state.optInit()
    v_state.optInit()
    pos_u = torch.from_numpy(u.variableTransformer(BATCH, 1)).to(device)
    pos_v, neg_v = (torch.from_numpy(x).to(device) for x in v.variableTransformer(BATCH, 1, NEGATIVES))
    losses = []
    for _ in range(40):
        chosen = draw.choice(WORDS // 4, BATCH, replace=False)
        targets = chosen[:, None] + WORDS // 4
        others = (draw.choice(WORDS // 2, BATCH * NEGATIVES, replace=False) + WORDS // 2).reshape(BATCH, NEGATIVES)
        u.beforeForwardPass(retrievedPosIndexes=chosen)
        v.beforeForwardPass(retrievedPosIndexes=targets, retrievedNegIndexes=others)
        u_state.beforeForwardPass(chosen)
        v_state.beforeForwardPass(targets, others)
        optimizer.zero_grad()
        loss = model(pos_u, pos_v, neg_v)
        loss.backward()
        optimizer.step()
        u.afterOptimizerStep(retrievedPosIndexes=chosen)
        v.afterOptimizerStep(retrievedPosIndexes=targets, retrievedNegIndexes=others)
        u_state.afterOptimizerStep(chosen)
        v_state.afterOptimizerStep(targets, others)
        losses.append(loss.item())
    return losses, u, v
