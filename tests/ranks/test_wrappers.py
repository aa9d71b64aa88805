"""Models with tables under DistributedDataParallel, torch.compile and fully_shard: the numbers of one process."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import speedtransfer as st
from ranks.pair import DIM, ids, nets, sgd_with_momentum, squares, table, wrap
from ranks.run import on

KINDS = pytest.mark.parametrize("kind", ["sharded", "shared", "replicas"])
needs_ignored_params = pytest.mark.skipif(torch.__version__ < "2.7", reason="fully_shard takes no ignored_params")
Wrap = Callable[[Any], nn.Module]


def trained(kind, way=wrap, **pair):
    return nets(kind, sgd_with_momentum, pair={"wrap": way, **pair}).train(0, 1, 2)


def backend(model):
    return torch.compile(model, backend="aot_eager")


@pytest.mark.slow  # test_modules_ranks has a compiled model always
@KINDS
@on(2, limit=180, timeout=60)
def test_compiled_models(kind):
    # Of torch, for what comes from one graph into the next.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    around = {"inside": lambda net: wrap(backend(net)), "around": lambda net: backend(wrap(net))}
    assert all(trained(kind, way) < 1e-12 for way in around.values())
    pair = nets(kind, pair={"wrap": around["inside"]})
    pair.accumulate(0, 1, no_sync=True)
    pair.end()
    torch.compiler.reset()
    assert pair.distance() < 1e-12


# --- ways to wrap a model ---------------------------------------------------------------------------------------------------


def ignored_by_the_user(net):
    net._ddp_params_and_buffers_to_ignore = ["emb.weight"]
    return wrap(net)


def in_two_models(net):
    wrapped = wrap(net)
    wrap(nn.Sequential(net.emb, nn.Linear(DIM, 1)))
    return wrapped


def more_groups(net):
    """One process has more groups than the other: those of pipelines, or of the processes of a host."""
    dist.new_group([0])
    return wrap(net)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


WAYS = {
    "unused": lambda net: wrap(net, find_unused_parameters=True),
    "static": lambda net: wrap(net, static_graph=True),
    "mesh": lambda net: wrap(net, device_mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
    "bucket view": lambda net: wrap(net, gradient_as_bucket_view=True),
    "nested": lambda net: wrap(Outer(net)),
}
WAYS |= {way.__name__: way for way in (ignored_by_the_user, in_two_models, more_groups)}
if torch.__version__ >= "2.7":
    WAYS["no init_sync"] = lambda net: wrap(net, init_sync=False)


def both(kind, change):
    pair = nets(kind, sgd_with_momentum, pair={"wrap": lambda net: net})
    for net in (pair.ours, pair.one):
        change(net)
    pair.model = wrap(pair.ours)
    return pair.train(0, 1, 2)


def ways(kind):
    found = {name: trained(kind, way) for name, way in WAYS.items()}
    found["frozen"] = both(kind, lambda net: net.emb.requires_grad_(False))
    found["hooked"] = both(kind, lambda net: net.emb.weight.register_hook(lambda grad: grad.clamp(-0.2, 0.2)))
    # Rows that one rank looks up and does not use.
    batch = lambda step, rank: (ids(step, rank), rank == 0 or step == 1)  # noqa: E731
    found["unused by one"] = trained(kind, WAYS["unused"], batch=batch, loss=lambda net, args: net(*args).sum())
    if kind == "replicas":
        # Rank 0 wins.
        different = lambda net: net.emb.weight.data.add_(dist.get_rank())  # noqa: E731
        found["different rows"] = trained(kind, lambda net: different(net) is not None and wrap(net))
        found["whole by one, sparse"] = whole_by_one(kind)
    return found


def whole_by_one(kind):
    """Rows and, in one process, the whole weight: the gradient is dense, as in one process."""
    whole = lambda net: net.emb.weight.square().sum()  # noqa: E731
    pair = nets(kind, sparse=True)
    (squares(pair.model, ids()) + (whole(pair.ours) if dist.get_rank() else 0)).backward()
    pair.one_backward()
    (whole(pair.one) / 2).backward()
    assert pair.ours.emb.weight.grad.layout == pair.one.emb.weight.grad.layout == torch.strided
    pair.end()
    return pair.distance()


@KINDS
def test_distributed_data_parallel(two, kind):
    for found in two(ways, kind):
        assert {name: value for name, value in found.items() if not value < 1e-12} == {}


# --- fully_shard ------------------------------------------------------------------------------------------------------------


def wrap_fsdp(net):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(net, mesh=mesh, ignored_params=st.table_parameters(net))


@needs_ignored_params
@pytest.mark.parametrize("kind", ["sharded", "shared"])
@on(2)
def test_fully_shard(kind):
    # Features are modules, too.
    wrap_fsdp(nn.Sequential(table(kind, [5, 3], DIM, make=st.MultiEmbedding), nn.Linear(DIM, 1)))
    pair = nets(kind, sgd_with_momentum, pair={"wrap": wrap_fsdp})
    assert pair.train(0, 1, 2, clip=0.5, clipped=st.clip_grad_norm_) < 1e-12
    state = st.full_state_dict(pair.ours)
    if dist.get_rank() == 0:
        for name, weight in pair.one.named_parameters():
            assert float((state[name] - weight.detach()).abs().max()) < 1e-12
