"""What several processes refuse, as data: all raise, nothing has changed, and they go on together."""

import copy
import dataclasses
import os
import pickle
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import speedtransfer as st
from ranks.checkpoint_job import EXACT, Job
from ranks.pair import DIM, ROWS, Net, ids, rows_of, table, tables, told, wrap
from speedtransfer.optim.shards import KEPT

# What statements use.
NAMES = {"copy": copy, "dist": dist, "nn": nn, "pickle": pickle, "st": st, "torch": torch, "ROWS": ROWS, "DIM": DIM}
NAMES |= {"Net": Net, "Job": Job, "EXACT": EXACT, "dataclasses": dataclasses, "ids": ids, "table": table, "wrap": wrap}

# A statement, and words of what the processes say; after // those of rank 1, where these are others. Without words: that it is
# not for what several processes own, and what to do.
TABLE = """
torch.autograd.grad(emb(ids()).sum(), emb.weight)
setattr(emb.weight, "grad", torch.ones(ROWS, DIM, dtype=torch.float64))
setattr(emb.weight, "grad", torch.ones(ROWS, DIM, dtype=torch.float64).to_sparse(1))
emb(ids()) @ emb.weight.t()
setattr(emb.weight, "data", torch.zeros(ROWS + 1, DIM)) -> ^Invalid
torch.optim.LBFGS(emb.parameters()).step(lambda: emb(ids()).sum()) -> LBFGS
emb.weight == 0
torch.func.vmap(multi["x"])(ids()[None] % 3)
emb.weight.sum()
(emb.weight.grad == 0).sum()
(emb.weight.grad == 0).any()
emb.weight.grad[torch.tensor([1])]
emb.weight.grad[1:3]
emb.weight.grad[0]
emb.weight.grad.max()
emb.weight.grad.mean()
emb.weight.grad.all()
emb.weight.grad.norm(dim=1)
(emb.weight.grad + 1).norm()
torch._foreach_norm([emb.weight.grad + 1])
emb.weight.grad.clone().add_(others, alpha=0.5)
emb.weight.grad.maximum(others)
dist.all_reduce(emb.weight.grad)
nn.init.eye_(emb.weight)
emb.weight.data[0].fill_(0)
emb.weight.data.renorm_(2, 0, 1.0)
emb.weight.data.lerp_(torch.ones(ROWS, DIM, dtype=torch.float64), 0.1)
emb.weight.data.mul_(torch.ones(ROWS, 1, dtype=torch.float64))
st.Embedding(ROWS + rank, DIM, **group) -> makes a table
st.Embedding(ROWS, DIM + rank, **group) -> makes a table
st.Embedding(ROWS, DIM, dtype=(torch.float32, torch.float64)[rank], **group) -> makes a table
st.Embedding(ROWS, DIM, idle=("lazy", "exact")[rank], **group) -> makes a table
st.Embedding(ROWS, DIM, storage_dtype=(None, torch.int8)[rank], **group) -> makes a table
st.Embedding(ROWS, DIM, comm_dtype=(None, torch.int8)[rank], **group) -> makes a table
st.Embedding(ROWS, DIM, comm_dtype=(None, torch.float16)[rank], **group)
-> rank 1 failed where it makes a table // comm_dtype is torch.float16
nn.utils.clip_grad_norm_(nan.parameters(), 1.0, error_if_nonfinite=True) -> ^RuntimeError: .*(non-finite|cannot be clipped)
st.clip_grad_norm_(nan.parameters(), 1.0, error_if_nonfinite=True) -> ^RuntimeError: .*(non-finite|cannot be clipped)
""".replace("\n->", " ->")
SHARDED = f"""
emb(torch.tensor([(0, ROWS)[rank]])) -> ^ProcessGroupError: rank 1 refused its ids .its own // ^RowIndexError
emb(torch.tensor([(0, -1)[rank]])) -> ^ProcessGroupError: rank 1 refused its ids // ^RowIndexError
emb((torch.tensor([0.5, 0.0]), torch.ones(2, 2).long().to_sparse())[rank]) -> ^InvalidTypeError
emb(torch.tensor([ROWS])) -> ^RowIndexError
sum(emb(torch.tensor([1])).sum() for _ in range({KEPT + 1})).backward() -> more than {KEPT} lookups
(emb.prefetch(ids()) if rank else emb(ids())) -> rank 0: .* lookups .in training.*; rank 1: .*: ids ahead, of weight
multi(dict(x=(ids() % 3, torch.tensor([[0, 4, 5], [0, 4, 2]][rank])))) -> rank 1 // offsets.2. of feature 'x' is 2 after 4
emb(emb.prefetch(torch.tensor([5, ROWS])[rank:][:1])) -> ^ProcessGroupError: rank 1 refused its ids // ^RowIndexError
(emb.prefetch(ids()), emb(ids() + rank)) -> rank 0: rows ahead.*rank 1: weight after 0 steps, .* lookups .in training
(rank or nan.load_state_dict(dict(weight=torch.zeros(ROWS, DIM))), nan(ids())) -> the processes differ
st.Embedding(ROWS, DIM, memory="mmap", path="none/rows", **group) -> /none/rows' is not a folder that exists
st.Embedding(ROWS, DIM, memory="pageable", cache_rows=9, cache_counts=torch.arange(7), **group) -> but the table has 50 rows
"""
# Lookups send nothing.
SHARED = """
emb(torch.tensor([(0, ROWS)[rank]])) -> ^$ // ^RowIndexError
bag(torch.arange(6), torch.tensor([0, (3, 9)[rank]])) -> ^$ // Error
bag(torch.arange(6), torch.tensor([rank, 3])) -> ^$ // Error
"""
VOCABULARY = """
known(memory="shared") -> leave memory out
st.Embedding(5, DIM, vocabulary=emb.vocabulary, **group) -> vocabulary.copy\\(\\)
st.Embedding(5, DIM, vocabulary=5, **group) -> must be a speedtransfer.Vocabulary
known(dtype=torch.int64) -> begin with drawn values
nn.Sequential(emb).state_dict() -> has only a part; call st.save_checkpoint
st.full_state_dict(nn.Sequential(emb)) -> call vocabulary.export\\(\\) in each
nn.Sequential(emb).load_state_dict({"0.weight": torch.zeros(22, DIM)}) -> call st.save_checkpoint and st.load_checkpoint
emb.vocabulary.update(other.vocabulary.changed_since(0)) -> update\\(\\) with changes is for a vocabulary of one process
emb.vocabulary.forget(ids()) -> an id to be forgotten was looked up
emb.vocabulary.update(ids(), torch.zeros(6, DIM)) -> an id occurs twice
emb.vocabulary.changed_since(0) -> changed_since\\(\\) is for
emb.weight.data.random_() -> drawn anew
emb.weight.data.mul_(2) -> changed as a whole
emb.weight.data.copy_(torch.zeros(1)) -> written as a whole
emb.weight.sum() -> is used as a whole
nn.functional.embedding(ids(), emb.weight) -> is indexed
emb(torch.rand(3) if rank else ids()) -> ^ProcessGroupError: rank 1 // ^Invalid
emb(["a"] if rank else ids()) -> ^ProcessGroupError: rank 1 // ^Invalid
emb([[1, 2], [3]] if rank else ids()) -> ^ProcessGroupError: rank 1 // ^Invalid
emb.train(rank == 0)(ids()) -> the processes differ where one finds ids.*admitting none
torch.set_grad_enabled(rank == 0)(emb.train())(ids()) -> the processes differ where one finds ids.*without gradients
known(admit=("always", 2)[rank]) -> admit=always.*admit=2
known(evict=("lru", None)[rank]) -> evict=lru.*evict=None
known(unseen=("row", "zeros")[rank]) -> unseen=row.*unseen=zeros
known(initial=(0.0, 1.0)[rank]) -> initial=0.0.*initial=1.0
"""
# Of features: one process looks an id up that there cannot be.
FEATURES = """
emb({**some, "b": torch.tensor([0, bad])}) -> ^ProcessGroupError: rank 1 // 4611686018427387904
emb["b"](torch.tensor([bad])) -> ^ProcessGroupError: rank 1 // 4611686018427387904
emb(torch.tensor([[1, bad, 2]])) -> ^ProcessGroupError: rank 1 // 4611686018427387904
emb.activate([torch.tensor([1]), torch.tensor([bad]), torch.tensor([1])])
-> ^ProcessGroupError: rank 1 // 4611686018427387904
torch.no_grad()(emb)(torch.tensor([[1, bad, 2]])) -> ^ProcessGroupError: rank 1 // 4611686018427387904
emb({"z" if bad else "b": torch.tensor([0])}) -> ^ProcessGroupError: rank 1 // not a feature
""".replace("\n->", " ->")
WRAPPED = """
enter(wrapped.join()) -> equal_steps
st.replace_embeddings(wrap(Net(table("one", make=nn.Embedding))), min_rows=0) -> replace the embeddings first
step(fully_shard(hybrid, mesh=square, ignored_params=st.table_parameters(hybrid))) -> copies of its rows would drift apart
ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1) -> owned by 2 processes
wrap(table("sharded")) -> process_group=
wrap(net, process_group=(alone, None)[rank]) if not rank else 1 / 0 -> same process group // ZeroDivisionError
fully_shard(Net(table("sharded")), mesh=mesh) -> emb.weight.*fully_shard|fully_shard.*emb.weight
"""
REPLICAS = """
enter(wrapped.join()) -> equal_steps
Join([wrapped]) -> st.equal_steps
ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1) -> optimizer of its own
wrap(table("one")) -> process_group=
copy.deepcopy(wrapped)(ids()) -> copy.deepcopy
wrap(Net(table("one", max_norm=1.0))) -> process_group=
fully_shard(Net(table("one")), mesh=mesh) -> emb.weight.*fully_shard|fully_shard.*emb.weight
step(fully_shard(plain, mesh=mesh, ignored_params=st.table_parameters(plain))) -> process_group=...
"""
CHECKPOINT = """
Job(dataclasses.replace(EXACT, rows=301)).load(path) -> 'emb.weight' is .300, 8.* but .301, 8
job.load((path, path / "none")[rank]) -> rank 1 failed where it loads // no checkpoint folder
job.load((path, later)[rank])
-> the processes differ where one loads: rank 0: .*point' of SHA-256 .*; rank 1: .*later' of SHA-256
st.load_checkpoint(path, net, other, scheduler=None, generator=None)
-> rank 1 failed where it loads // ^InvalidValueError.*optimizer is Adagrad but the checkpoint holds that of AdamW
st.load_checkpoint(path, job.model) -> the checkpoint has 'bag.weight' and the model 'module.bag.weight': one is wrapped
job.save(path / f"new {rank}")
-> rank 1 failed where it saves .its own message says why., so no other went on // give all processes the same path, on a file
st.save_checkpoint(path / "new", net, extra=(object(), None)[rank])
-> ^InvalidTypeError: extra is a builtins.object // rank 0 failed where it saves
st.save_checkpoint(path / "new", net, scaler=(3, None)[rank])
-> ^InvalidTypeError: scaler is a int without // rank 0 failed where it saves
job.save("memory://run")
-> is not there as it was written; give all processes a store that they share // rank 0 failed where it saves
st.save_delta(path / f"new-{rank}.safetensors", net, mark) -> new-
st.save_delta(path / "new.safetensors", net, (mark, now)[rank]) -> since a mark
st.save_delta(path / "none" / "x" / "new.safetensors", net, mark) -> Error
st.apply_delta(delta, net, (None, now)[rank]) -> rank 1 failed|has been applied
job.optimizer.state_dict() -> are owned by 2 processes; call st.save_checkpoint.path, model, optimizer.
job.optimizer.load_state_dict({"state": {}, "param_groups": []}) -> are owned by 2 processes; call st.save_checkpoint
""".replace("\n->", " ->")


def known(seed=5, capacity=20, **options):
    names = ("admit", "evict", "unseen", "initial", "on_evict")
    given = {name: options.pop(name) for name in names if name in options}
    vocabulary = st.Vocabulary(seed=seed, **given)
    return st.Embedding(capacity, DIM, vocabulary=vocabulary, process_group=dist.group.WORLD, **options)


def enter(context):
    with context:
        pass


def of_tables(kind):
    pair = tables(kind)
    pair.backward()
    bag, before = table(kind, make=st.EmbeddingBag), rows_of(pair.ours)
    multi, nan = table(kind, {"x": 3}, DIM, make=st.MultiEmbeddingBag), table(kind)
    # Of one process alone.
    (nan(torch.tensor([7])).sum() * (float("nan") if dist.get_rank() else 1.0)).backward()

    def check():
        assert torch.equal(rows_of(pair.ours), before)
        pair.end()
        assert pair.train(1, 2) < 1e-12

    group = {"process_group": dist.group.WORLD} | ({"memory": "shared"} if kind == "shared" else {})
    # Of other rows than the gradient, in one process alone.
    grad, first = pair.ours.weight.grad, dist.get_rank()
    others = grad._made(grad.ids[first:].clone(), grad.rows[first:], grad.known)
    return {"emb": pair.ours, "bag": bag, "multi": multi, "nan": nan, "group": group, "others": others}, check


def of_vocabularies():
    emb = known()
    emb(ids()).sum().backward()
    other = st.Embedding(5, DIM, vocabulary=st.Vocabulary())

    def check():
        torch.set_grad_enabled(True)
        emb.train()
        torch.optim.SGD(emb.parameters(), lr=0.1).step()
        assert emb(torch.arange(5) + dist.get_rank()).isfinite().all()

    return {"emb": emb, "other": other, "known": known, "group": {"process_group": dist.group.WORLD}}, check


def of_features(has_ids):
    options = {"vocabulary": st.Vocabulary(seed=3)} if has_ids else {}
    sizes = {"a": 40, "b": 1, "c": 30}
    emb, some = (
        table("sharded", sizes, DIM, make=st.MultiEmbedding, **options),
        dict.fromkeys(sizes, torch.tensor([0, 0])),
    )

    def check():
        sum(rows.sum() for rows in emb(some).values()).backward()
        torch.optim.SGD(emb.parameters(), lr=0.1).step()
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, emb["a"](torch.tensor([0])).detach())
        assert torch.equal(*rows)

    return {"emb": emb, "some": some, "bad": (1 << 62) if dist.get_rank() else 0}, check


def of_wrapped(kind):
    from torch.distributed.algorithms.join import Join
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net, alone = Net(table(kind)), dist.new_group([0])

    def step(model):
        model(ids()).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    wrapped = wrap(net)
    names = {"fully_shard": fully_shard, "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer, "plain": Net(table("one"))}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names |= {"net": net, "wrapped": wrapped, "alone": alone, "mesh": mesh, "step": step, "Join": Join}
    # More processes than those of the table.
    names["square"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))
    names["hybrid"] = Net(table("one", process_group=names["square"]["parts"]))
    return names, lambda: step(wrapped)


def of_checkpoints(path):
    job, later, delta = Job(EXACT).train(1).save(path), path.with_name("later"), path.with_name("delta.safetensors")
    mark = st.mark(job.net)
    before, now = job.train(1).save(later).planes(), st.save_delta(delta, job.net, mark)
    other = (torch.optim.AdamW, torch.optim.Adagrad)[job.rank](job.net.parameters())

    def check():
        dist.barrier()
        assert all(torch.equal(value, before[name]) for name, value in job.planes().items())
        assert not [name for name in os.listdir(path) if "new" in name]
        assert job.train(1).save(path).load(path).done == 3

    names = {"job": job, "net": job.net, "path": path, "later": later, "other": other}
    return names | {"delta": delta, "mark": mark, "now": now}, check


WORLDS = {
    "sharded": (TABLE + SHARDED, of_tables, "sharded"),
    "shared": (TABLE + SHARED, of_tables, "shared"),
    "vocabulary": (VOCABULARY, of_vocabularies),
    "features": (FEATURES, of_features, False),
    "features by id": (FEATURES, of_features, True),
    "wrapped": (WRAPPED, of_wrapped, "sharded"),
    "replicas": (REPLICAS, of_wrapped, "replicas"),
    "checkpoint": (CHECKPOINT, of_checkpoints),
}


def wrong(world, *args):
    """Return the statements whose refusal is not as it should be, and what was said."""
    text, make, *more = WORLDS[world]
    found = {}
    with warnings.catch_warnings():
        # Of torch, which uses what it has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        names, check = make(*more, *args)
        names |= NAMES | {"enter": enter, "rank": dist.get_rank()}
        for line in filter(None, text.splitlines()):
            statement, _, words = line.partition(" -> ")
            said = told(lambda statement=statement: eval(statement, names))
            torch.set_grad_enabled(True)
            # In operators a TypeError would become another message, or False.
            of_all = "processes" in said and ";" in said and ("TypeError" not in said or "state_dict" in statement)
            first, _, second = words.partition(" // ")
            if not (re.search(second if second and dist.get_rank() else first, said) if words else of_all):
                found[statement] = said
    check()
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_refused_in_all(two, world, tmp_path):
    if "fully_shard" in WORLDS[world][0] and torch.__version__ < "2.7":
        pytest.skip("fully_shard takes no ignored_params")
    assert two(wrong, world, *([tmp_path / "point"] if world == "checkpoint" else [])) == [{}, {}]
