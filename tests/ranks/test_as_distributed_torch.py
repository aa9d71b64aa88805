"""What people do by hand with ``torch.distributed``, on ``nn.Embedding`` and on ours: the same rows in each process."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from weight_cases import parse
from weight_world import run_code

import speedtransfer as st
from ranks import pair
from ranks.pair import DIM, ROWS, Net, ids, squares, told, wrap
from ranks.run import on

OPTIONS = {"": {}, "cached": {"cache_rows": 8}, "encoded": {"storage_dtype": torch.bfloat16, "dtype": torch.float32}}
# Each is run on a net of torch and on ours; `wrapped` makes its wrapper.
PROGRAMS = parse(
    "distributed",
    """
# gradients averaged by hand
backward(net)
for param in net.parameters():
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()
opt.step()
backward(net, 1)
works = [dist.all_reduce(param.grad, async_op=True) for param in net.parameters()]
for work in works:
    work.wait()
opt.step()

# gradients of rank 0
backward(net)
for param in net.parameters():
    dist.broadcast(param.grad.data, 0)
opt.step()

# averaged by a hook
def mean(grad):
    total = grad.clone()
    dist.all_reduce(total)
    return total / 2
net.emb.weight.register_hook(mean)
backward(net)
opt.step()

# gathered
backward(net)
found = [torch.zeros_like(net.emb.weight.grad.to_dense()) for _ in range(2)]
dist.all_gather(found, net.emb.weight.grad)
net.emb.weight.grad.copy_(found[0] - 2 * found[1])
opt.step()

# zero_grad after no_sync, or after a step in it; a gradient that is kept goes on being the gradient
for steps in (False, True):
    ddp = wrapped()
    with ddp.no_sync():
        backward(ddp)
        net.emb.weight.grad.mul_(0.5)
    opt.step() if steps else None
    opt.zero_grad()
    backward(ddp, 1)
    opt.step()

# scaled in no_sync
ddp = wrapped()
with ddp.no_sync():
    backward(ddp)
    grad = net.emb.weight.grad
    nn.utils.clip_grad_norm_(net.parameters(), 0.1 * (1 + dist.get_rank()))
backward(ddp, 1)
assert grad is net.emb.weight.grad
grad.mul_(2)
opt.step()

# without the wrapper
ddp = wrapped()
backward(ddp)
backward(ddp.module, 1)
opt.step()
opt.zero_grad()
if dist.get_rank() == 0:
    backward(ddp.module, 2)
backward(ddp, 3)
opt.step()

# two backwards of a forward
ddp = wrapped()
loss = squares(ddp, ids())
loss.backward(retain_graph=True)
loss.backward()
opt.step()

# unused after no_sync: whether the first and the last batch use the table, in each process
for first, last, unused in ("11", "01", 1), ("11", "00", 1), ("10", "00", 1), ("11", "01", type(net.emb) is nn.Embedding):
    ddp = wrapped(find_unused_parameters=bool(unused))
    with ddp.no_sync():
        ddp(ids(), int(first[dist.get_rank()])).square().sum().backward()
    ddp(ids(1), int(last[dist.get_rank()])).square().sum().backward()
    opt.step()
    opt.zero_grad()

# a forward in no_sync after one that syncs
ddp = wrapped()
for both in (True, False):
    queries = squares(ddp, ids())
    with ddp.no_sync():
        keys = squares(ddp, ids(1))
    (queries * keys / 64 if both else queries).backward()
    opt.step()
    opt.zero_grad()

# replicate, which makes the wrapper with the first forward
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
    replicate(net)
    for step in range(2):
        backward(net, step)
        opt.step()
        opt.zero_grad()

# a group after another
group = dist.new_group()
backward(wrapped(process_group=group))
opt.step()
opt.zero_grad()
dist.destroy_process_group(group)
backward(wrapped(), 1)
opt.step()

# rows of rank 1
with torch.no_grad():
    net.emb.weight.add_(dist.get_rank())
    for param in net.parameters():
        dist.broadcast(param.data, 1)

# rows averaged
backward(net)
opt.step()
for param in net.parameters():
    dist.all_reduce(param.data, async_op=True).wait()
    param.data /= 2
""",
)


def backward(model, step=0):
    squares(model, ids(step)).backward()


def rows(make, program, **options):
    torch.manual_seed(3)
    net = Net(make(ROWS, DIM, **options))
    with torch.no_grad():
        net.emb.weight.copy_(torch.arange(ROWS * DIM).view(ROWS, DIM) / 256)
    names = {"backward": backward, "replicate": replicate, "net": net, "wrapped": functools.partial(wrap, net)}
    names["opt"] = torch.optim.SGD(net.parameters(), lr=0.125)
    run_code(program.id, program.code, vars(pair) | names)
    return net.emb.weight.detach().clone()


def distances(options):
    found = {}
    with torch.autograd.set_multithreading_enabled(False):
        for program in PROGRAMS:
            ours, theirs = rows(st.Embedding, program, **options), rows(nn.Embedding, program, dtype=options["dtype"])
            found[program.title] = float((ours - theirs).abs().max())
    return found


@pytest.mark.parametrize("options", list(OPTIONS))
def test_as_torch(two, options):
    most = 0.05 if options == "encoded" else 1e-12
    for found in two(distances, {"dtype": torch.float64, **OPTIONS[options]}):
        assert {name: far for name, far in found.items() if not far < most} == {}


@on(2)
def test_rows_are_sent_both_ways_at_once():
    """Neither waits for the other's receipt, and rows of which there is a copy are not received in passing."""
    other, got = 1 - dist.get_rank(), torch.empty(ROWS, DIM)
    theirs = torch.full((ROWS, DIM), float(other))
    emb = st.Embedding.from_pretrained(1 - theirs, cache_rows=8)
    works = [dist.isend(emb.weight.data, other), dist.irecv(got, other)]
    for work in works:
        work.wait()
    assert torch.equal(got, theirs)
    assert "receive into a tensor, and copy it" in told(lambda: dist.irecv(emb.weight.data, other))


# --- what the processes have to share ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sharded", "shared", "vocabulary"])
@on(2)
def test_rows_that_are_given_are_those_of_rank_0(kind):
    values = torch.arange(ROWS * DIM).view(ROWS, DIM) * 2.0 ** dist.get_rank()
    options = {"memory": "shared"} if kind == "shared" else {}
    if kind == "vocabulary":
        options["vocabulary"] = st.Vocabulary()
    made = st.Embedding.from_pretrained(values, process_group="world", **options)
    assert torch.equal(made(ids()), torch.arange(ROWS * DIM).view(ROWS, DIM)[ids()].to(made.weight.dtype))
