"""Cells of test_cells.py: what is done with a whole table, to which module, who owns its rows, how they are stored.

Each is done with a module of ours and with that of torch.nn, in the middle of training, which goes on after it.
"""

import copy
import functools
import gc
import itertools
import pickle
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import elsewhere, saved, take_step  # noqa: F401 - verbs use them
from in_child import in_child
from ranks.run import Pool, RankError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from weight_world import run_code

import speedtransfer as st
from speedtransfer.errors import SpeedtransferError

# What stands for itself, or what is done in two lines and the name that it has. `i`: a row. `at`: three. `ones(n)`: n rows.
CODE = """
None  # nothing
w.step()  # opt.step()
rows_of(model.state_dict())  # model.state_dict()
rows_of(model.state_dict()) if w.rank == 0 else None  # model.state_dict() in one process
w.kept = nn.Sequential(model) if w.rank == 0 else None; None  # nn.Sequential(model) in one process
model.emb.load_state_dict(w.other().model.emb.state_dict()); None  # load_state_dict(state)
model.load_state_dict(model.state_dict()); None  # load_state_dict(state_dict())
n = w.other().model.emb.state_dict(); model.emb.load_state_dict(n, assign=True); w.use(model)  # load_state_dict(assign=True)
[rows_of(st.full_state_dict(model))] if w.rank == 0 else st.full_state_dict(model) and None  # st.full_state_dict(model)
w.save(); n = w.other(); st.load_checkpoint(w.path, n.model, n.opt); n.step(); n.look()  # st.save_checkpoint
w.other().save(); st.load_checkpoint(w.path, model, opt)  # st.load_checkpoint
w.saved_meanwhile()  # st.save_checkpoint(background=True)
w.followed()  # st.apply_delta(path, copy)
state_of(opt)  # opt.state_dict()
state = opt.state_dict(); w.use(model); w.opt.load_state_dict(state)  # opt.load_state_dict(opt.state_dict())
for each in opt.state.values(): each["exp_avg"].mul_(0.5)  # opt.state[weight]["exp_avg"].mul_(0.5)
w.copied(copy.deepcopy(model))  # copy.deepcopy(model)
w.copied(*copy.deepcopy((model, opt)))  # copy.deepcopy((model, opt))
w.copied(pickle.loads(pickle.dumps(model)))  # pickle.dumps(model)
rows_of(saved(model.state_dict(), weights_only=True))  # torch.save(model.state_dict())
copy.deepcopy(weight).detach()  # copy.deepcopy(weight)
a = torch.optim.swa_utils.AveragedModel(model); w.step(); a.update_parameters(model); w.look(a.module)  # AveragedModel(model)
w.look(st.to_dense(model) if w.ours else model)  # st.to_dense(model)
weight.detach()
[weight[i], weight[at]]  # weight[i]
[] if w.vocabulary else weight[1:3]  # weight[1:3]
weight.norm()
weight.detach().numpy()
F.embedding(at, weight)
repr(model), str(weight), f"{weight.data}"; None  # repr
str(st.summary(model)); None  # st.summary(model)
weight.data.fill_(0.5)
weight.data.mul_(2)
weight.data[i] = 7.0
weight.data[i].mul_(2)
n = weight.data[i]; w.step(); m = n.clone(); n.mul_(2); m  # weight.data[i], kept for a step
n = weight.detach(); w.step(); n.mul_(2); None  # weight.detach(), kept for a step
nn.init.zeros_(weight[i]); None  # nn.init.zeros_(weight[i])
n = weight[i]; w.step(); (n * n).sum().backward(); n.detach().mul_(2); n.clone()  # weight[i], kept for a step
weight.data.div_(weight.data.norm(dim=1, keepdim=True) + 1)  # weight.data.div_(rows)
with torch.no_grad(): weight[i] = 3.0
with torch.no_grad(): torch._foreach_mul_([weight], 0.5)  # torch._foreach_mul_
nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([weight]) * 0.5, [weight])  # vector_to_parameters
emb.reset_parameters()
nn.init.normal_(weight)
None if w.vocabulary else nn.init.xavier_uniform_(weight)  # nn.init.xavier_uniform_(weight)
nn.init.trunc_normal_(weight)
nn.init.orthogonal_(weight)
nn.init.sparse_(weight, 0.5)
weight.data = w.numbers()  # weight.data = rows
n = weight.data; weight.data = w.numbers(); m = w.look(); weight.data = n; m  # weight.data = rows, and back
weight.data = w.numbers(3); w.use(model)  # weight.data = more rows
emb.weight = nn.Parameter(w.numbers()); w.use(model)  # emb.weight = nn.Parameter(rows)
w.trained(model.emb.prefetch(w.ids) if w.ours else w.ids)  # emb(emb.prefetch(ids))
ids = w.ids; ticket = model.emb.prefetch(ids) if w.ours else None; w.trained(ids)  # emb.prefetch(ids), emb(ids)
for ids in st.prefetch([w.ids], w.asks) if w.ours else [w.ids]: w.trained(ids)  # st.prefetch
emb.table.grow(len(weight) + 3) if hasattr(getattr(emb, "table", None), "grow") else None; None  # table.grow
w.backward(); torch.tensor(weight.grad.tolist())  # weight.grad
w.backward(); weight.grad.mul_(0.5); opt.step()  # weight.grad.mul_(0.5)
w.backward(); opt.zero_grad(set_to_none=False); opt.step()  # opt.zero_grad(set_to_none=False)
weight.grad = w.numbers(); opt.step()  # weight.grad = rows
weight.register_hook(lambda grad: grad * 2); w.step()  # weight.register_hook
w.backward(); w.backward(); opt.step()  # loss.backward() twice
w.backward(); n = nn.utils.clip_grad_norm_(model.parameters(), 0.1); opt.step(); n  # clip_grad_norm_
w.backward(); n = st.clip_grad_norm_(model.parameters(), 0.1); opt.step(); n  # st.clip_grad_norm_
s = torch.amp.GradScaler("cpu"); s.scale(w.loss()).backward(); s.unscale_(opt); s.step(opt); s.update()  # GradScaler
(w.loss() + weight.square().sum()).backward(); opt.step()  # weight.square().sum().backward()
n = model.requires_grad_(False)(w.ids); model.requires_grad_(True); n  # model.requires_grad_(False)
model.to(torch.float64); None  # model.to(torch.float64), the optimizer stays
w.use(model.to(torch.float64))  # model.to(torch.float64)
copy.deepcopy(model).to("meta"); None  # model.to("meta")
elsewhere(w.look)  # model(ids) in a thread
forked(w.look)  # model(ids) in a fork
forked(lambda: weight.detach().clone())  # weight.detach() in a fork
torch.func.functional_call(model, {"scale": torch.full((DIM,), 2.0)}, (w.ids,))  # functional_call
torch.func.grad(lambda it: torch.func.functional_call(model, it, (w.ids,)).sum())(dict(model.named_parameters()))  # func.grad
"""
VERBS = {line.split("  # ")[-1]: line.split("  # ")[0] for line in CODE.strip().splitlines()}
REFUSED, FOREIGN, MAKING = "refused: ", "not ours: ", "making it"
# A vocabulary draws by ids and not as torch does: compared with the same module alone, in float32.
DRAWN = [name for name in VERBS if "uniform_" in name or "normal_" in name or "reset" in name or "sparse_" in name]

LIBRARIES = {"copy": copy, "pickle": pickle, "F": F}
DIM, SIZES = 4, [5, 7]
IDS = torch.tensor([-(2**50), -3, 0, 1, 2, 77, 2**20, 2**33, 2**40 + 1, 2**62])
ROWS, COLUMNS, TOKENS = torch.arange(10), torch.arange(7)[:, None] % torch.tensor(SIZES), torch.arange(20)

# --- modules: those of torch.nn that ours stand for -----------------------------------------------------------------------


class Columns(nn.Embedding):
    """A `MultiEmbedding` as one weight."""

    def forward(self, ids):
        return super().forward(ids + torch.tensor([0, SIZES[0]]))

    def reset_parameters(self):
        for part in self.weight.data.split(SIZES):
            nn.init.normal_(part)


class Features(nn.ModuleList):
    """A `MultiEmbedding` as the modules that it takes the place of."""

    def forward(self, ids):
        return torch.stack([module(ids[..., i]) for i, module in enumerate(self)], -2)


class Known(nn.Embedding):
    """An embedding with a vocabulary, as one of all ids that are ever used, with the same initial values."""

    @torch.no_grad()
    def reset_parameters(self):
        self.weight.copy_(vocabulary()(IDS))

    def forward(self, ids):
        return super().forward(torch.searchsorted(IDS, ids))


class Layers(nn.Embedding):
    """A `PerLayerEmbedding`."""

    def forward(self, ids):
        return super().forward(ids).unflatten(-1, (2, DIM))


def vocabulary(**options):
    return st.Embedding(len(IDS), DIM, padding_idx=2, vocabulary=st.Vocabulary(seed=3), **options)


def ngrams(dense=False, **options):
    made = st.NgramEmbedding(st.NgramHash(rows=5, heads=2, vocab_size=20), DIM, combine="sum", std=1.0, **options)
    if dense:
        weight = made.embedding.weight.detach().clone()
        made.embedding = nn.Embedding.from_pretrained(weight, False, made.embedding.padding_idx)
    return made


class Remembering(nn.Module):
    """A memory layer, read with hidden states that stand for ids, and keys that stay."""

    def __init__(self, dense=False, **options):
        super().__init__()
        self.memory = st.MemoryLayer(DIM, 9, heads=2, k=2, key_dim=4, std=1.0, **options)
        for module in self.memory.keys.modules():
            for key, value in [*module.named_parameters(recurse=False)]:
                delattr(module, key)
                module.register_buffer(key, value.detach())
        if dense:
            weight = self.memory.values.weight.detach().clone()
            self.memory.values = nn.EmbeddingBag.from_pretrained(weight, False, mode="sum")

    def forward(self, ids):
        return self.memory(self.hidden(ids))

    def hidden(self, ids):
        return torch.arange(10.0 * DIM).view(10, DIM).sin()[ids].to(self.memory.keys.halves.dtype)

    def asks(self, ids):
        return {self.memory.values: self.memory.keys(self.hidden(ids))[0].flatten(1)}

    def prefetch(self, ids):
        for values, rows in self.asks(ids).items():
            values.prefetch(rows)
        return ids


class Kind(NamedTuple):
    """A module, that of torch.nn, all ids, what batches are drawn from, their shape, who has the weight, who shows rows."""

    ours: Callable[..., nn.Module]
    dense: Callable[[], nn.Module]
    every: Tensor = ROWS
    drawn: Tensor = ROWS
    shape: tuple[int, ...] = (6,)
    part: Callable[[Any], Any] = lambda module: module
    shows: Callable[[Any], Any] = lambda module: module


multi, bag = functools.partial(st.MultiEmbedding, SIZES, DIM), (10, DIM, None, 2.0, False, "mean")
KINDS = {
    "Embedding": Kind(functools.partial(st.Embedding, 10, DIM, 2), lambda: nn.Embedding(10, DIM, 2)),
    "EmbeddingBag": Kind(
        functools.partial(st.EmbeddingBag, *bag), lambda: nn.EmbeddingBag(*bag), ROWS[:, None], ROWS, (2, 3)
    ),
    "MultiEmbedding": Kind(multi, lambda: Columns(sum(SIZES), DIM), COLUMNS, COLUMNS, (6, 2)),
    "MultiEmbeddingBag": Kind(
        functools.partial(st.MultiEmbeddingBag, SIZES, DIM), lambda: Columns(sum(SIZES), DIM), COLUMNS, COLUMNS, (6, 2)
    ),
    "a feature": Kind(
        multi,
        lambda: Features([nn.Embedding(n, DIM) for n in SIZES]),
        COLUMNS,
        COLUMNS,
        (6, 2),
        lambda module: module[1],
    ),
    "vocabulary": Kind(vocabulary, lambda: Known(len(IDS), DIM, 4), IDS, IDS, (len(IDS),)),
    "NgramEmbedding": Kind(
        ngrams, lambda: ngrams(dense=True), ROWS, TOKENS, (2, 3), *[lambda module: module.embedding] * 2
    ),
    "PerLayerEmbedding": Kind(functools.partial(st.PerLayerEmbedding, 10, 2, DIM), lambda: Layers(10, 2 * DIM)),
    "MemoryLayer": Kind(Remembering, lambda: Remembering(dense=True), part=lambda module: module.memory.values),
}
# Processes.
OWNERS = {"alone": 1, "group of 1": 1, "group of 2": 2, "shared": 2, "DDP": 2}
# Options, and how far rows may be from those of torch.nn.
FORMS = {
    "float32": ({}, 2e-5),
    "bfloat16": ({"storage_dtype": torch.bfloat16}, 0.05),
    "int8": ({"storage_dtype": torch.int8}, 0.2),
    "split24": ({"storage_dtype": "split24"}, 2e-3),
    "cache_rows": ({"cache_rows": 3}, 2e-5),
    "mmap": ({"memory": "mmap"}, 2e-5),
    "layout": ({"layout": "rows"}, 2e-5),
}


class Model(nn.Module):
    def __init__(self, emb):
        super().__init__()
        self.emb = emb
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, ids):
        return self.emb(ids) * self.scale


class World:
    """A model that trains, and what verbs use. `options` of our module; None: that of torch.nn."""

    def __init__(self, name, options, owner, path, seed=0, steps=2):
        self.name, self.kind, self.ours, self.vocabulary = name, KINDS[name], options is not None, name == "vocabulary"
        self.owner, self.path, self.steps = owner, path, 0
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.manual_seed(seed)
        model = Model(self.kind.dense() if options is None else self.kind.ours(**options))
        # With the batches of all processes; else each with its own, of which torch.distributed makes the gradient of all.
        self.all = options is None or owner == "other"
        self.use(model)
        for _ in range(steps):
            self.step()

    def use(self, model, opt=None):
        self.model = self.run = model
        self.opt = torch.optim.Adam(model.parameters(), lr=0.1) if opt is None else opt
        if self.ranks > 1 and not self.all:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
                self.run = DistributedDataParallel(model)

    @property
    def at(self):
        """All rows of the weight that there are ids of, in the order of torch's."""
        emb = self.kind.part(self.model.emb)
        return emb.vocabulary.rows(IDS) if self.ours and self.vocabulary else torch.arange(len(emb.weight))

    @property
    def ids(self):
        return self.batches()[self.rank]

    def numbers(self, more=0):
        """Rows for all of the weight, and `more`, where torch.nn has them."""
        rows, dim = self.kind.part(self.model.emb).weight.shape
        values = torch.zeros(rows + more, dim)
        values[self.at] = torch.linspace(-1, 1, self.at.numel() * dim).view(-1, dim)
        return values

    def batches(self):
        draw, drawn, shape = torch.Generator().manual_seed(self.steps), self.kind.drawn, self.kind.shape
        count = torch.Size(shape).numel() // drawn[0].numel()
        # The first batch has all ids that it has room for, which a vocabulary then knows.
        first = self.steps == 0 and count <= len(drawn)
        pick = torch.randperm if first else functools.partial(torch.randint, size=(count,))
        return [drawn[pick(len(drawn), generator=draw)[:count]].view(shape) for _ in range(self.ranks)]

    def asks(self, ids):
        """Return what looks up which ids for these."""
        emb = self.model.emb
        return emb.asks(ids) if isinstance(emb, Remembering) else {emb: ids}

    def loss(self, batches=None):
        rows = [self.run(ids) for ids in batches or (self.batches() if self.all else [self.ids])]
        return sum((it * torch.linspace(0.5, 1.5, it.numel()).view(it.shape)).square().sum() for it in rows) / len(rows)

    def backward(self):
        self.loss().backward()

    def trained(self, *batches):
        take_step(self.opt, self.loss(batches if not self.all else None))
        self.steps += 1

    step = trained

    @torch.no_grad()
    def look(self, model=None):
        return self.kind.shows((model or self.model).emb)(self.kind.every).clone()

    def save(self):
        st.save_checkpoint(self.path, self.model, self.opt)

    def saved_meanwhile(self):
        save = st.save_checkpoint(self.path, self.model, self.opt, background=True)
        self.step()
        assert save is not None
        save.wait()
        other = self.other()
        st.load_checkpoint(self.path, other.model, other.opt)
        other.step()
        return other.look()

    def followed(self):
        """Train, and let a copy follow: one that serves, one that could go on training, and one that loads what is merged."""
        if not self.ours:
            self.step()
            return self.look()
        mark, with_state = st.mark(self.model), st.mark(self.model, self.opt)
        follower, trained, loaded = copy.deepcopy(self.model), *(copy.deepcopy((self.model, self.opt)) for _ in "12")
        # Those of processes that share tables out are the same.
        by_all = self.owner not in ("alone", "DDP")
        rank = "" if by_all else f".{self.rank}"
        base, path, out = (self.path.with_suffix(f"{rank}.{part}") for part in ("base", "delta.safetensors", "out"))
        st.save_checkpoint(base, self.model, self.opt)
        if self.vocabulary:
            # A copy may have its ids in other rows.
            st.load_checkpoint(base, *trained)
        self.step()
        st.save_delta(path, self.model, mark)
        st.apply_delta(path, follower)
        st.save_delta(path, self.model, with_state, self.opt)
        st.apply_delta(path, trained[0], None, trained[1])
        if not by_all or not self.rank:
            st.merge(base, path, out)
        if by_all:
            dist.barrier()
        st.load_checkpoint(out, *loaded)
        for each in (trained, loaded):
            # Of the rows and their state.
            assert st.mark(*each).fingerprints == st.mark(self.model, self.opt).fingerprints
            assert torch.equal(self.look(each[0]), self.look())
        return self.look(follower)

    def other(self):
        """Another model, trained with other numbers, in this process alone."""
        return World(self.name, {} if self.ours else None, "other", self.path, seed=5, steps=1)

    def copied(self, model, opt=None):
        copied = copy.copy(self)
        copied.use(model, opt)
        copied.step()
        return copied.look()


# --- what verbs use -------------------------------------------------------------------------------------------------------


def rows_of(state):
    return torch.cat([value.detach() for name, value in state.items() if name.endswith("weight")])


def state_of(opt):
    return torch.cat([each["exp_avg"] for each in opt.state_dict()["state"].values()][1:])


def forked(function):
    """Return what `function` returns in a fork of this process, or raise what it raises there."""
    return torch.tensor(in_child(lambda: function().tolist()))


# --- cells ----------------------------------------------------------------------------------------------------------------


def flat(value, at, rows):
    """Return copies of the tensors in `value`; of those of all rows of a table the rows `at`."""
    if isinstance(value, list | tuple):
        return [it for part in value for it in flat(part, at, rows)]
    if not isinstance(value, Tensor | np.ndarray):
        return []
    tensor = torch.tensor(value) if isinstance(value, np.ndarray) else value.detach()
    tensor = tensor.double().clone()
    return [tensor[at] if at is not None and tensor.dim() and len(tensor) == rows else tensor]


def done(world, verb):
    """Do `verb`, train on, and return all that is seen; a refusal is an exception."""
    names = {"w": world, "model": world.model, "opt": world.opt, "emb": world.kind.part(world.model.emb)}
    names |= {"weight": names["emb"].weight, "i": int(world.at[1]), "at": world.at[:3], **globals(), **LIBRARIES}
    names["ones"] = lambda rows: torch.ones(rows, names["weight"].shape[1])
    at, rows = world.at if world.ours and world.vocabulary else None, len(names["weight"])
    torch.manual_seed(1)
    result = run_code(verb, VERBS[verb], names)
    # What functions in place return is not read: they write where nobody may read all rows.
    return [] if "_(" in verb and VERBS[verb].count("; ") == 0 else flat(result, at, rows)


def after(world):
    seen = [world.look()]
    world.opt.zero_grad()
    world.step()
    return [it.detach().double() for it in [*seen, world.look()]]


def cells(kind, owner, form, verbs, folder):
    """Return how cells end, in a process of a group: as `cell`; those after an exception that is not ours are left out."""
    if owner == "alone":
        dist.destroy_process_group()
    ends = {}
    # A table takes part in every backward until it is gone, which has to be so in all processes at once.
    gc.disable()
    for number, verb in enumerate(verbs):
        gc.collect()
        gc.freeze()
        ends[verb] = cell(kind, owner, form, verb, folder / f"{number}")
        if ends[verb].startswith(FOREIGN):
            break
    gc.enable()
    return ends


def cell(kind, owner, form, verb, path):
    """Return how a cell ends: "", "refused: ..." or what is wrong."""
    options, tolerance = FORMS[form][0].copy(), FORMS[form][1]
    if form == "mmap":
        options["path"] = path.with_suffix(f".{dist.get_rank()}.npy" if owner == "DDP" else ".npy")
    elif form == "layout" and owner != "shared":
        options |= {"memory": "mmap", "path": path.parent}  # where the weights are in the records, too
    if owner not in ("alone", "DDP"):
        options |= {"process_group": dist.group.WORLD} | ({"memory": "shared"} if owner == "shared" else {})
    doing, refused, stepped = MAKING, "", False
    try:
        try:
            world = World(kind, options, owner, path)
            doing = "doing it"
            seen = done(world, verb)
        except SpeedtransferError as error:
            refused, seen = f"{REFUSED}{doing}: {error}", []
            if doing == MAKING:
                return refused
        doing, stepped = "training on", world.steps > 2
        try:
            seen += after(world)
        except SpeedtransferError as error:
            return f"refused, and then {error}" if refused else f"{REFUSED}{doing}: {error}"
        same = ("opt.step()" if stepped else "nothing") if refused else verb
        world = World(kind, {} if world.vocabulary and verb in DRAWN else None, "other", path.with_suffix(".torch"))
        wanted = [*done(world, same), *after(world)]
    except Exception as error:
        return f"{FOREIGN}{doing}: {type(error).__name__}: {error}"
    shapes = [[list(each.shape) for each in side] for side in (seen, wanted)]
    if shapes[0] != shapes[1]:
        return f"shapes are {shapes[0]} and not {shapes[1]}"
    names = [*["it"] * (len(seen) - 2), "rows after it", "rows after a step"]
    for name, ours, dense in zip(names, seen, wanted, strict=True):
        if not torch.allclose(ours, dense, rtol=tolerance, atol=tolerance):
            return f"{name} differs by {float((ours - dense).abs().max()):.2g} ({refused or 'done'})"
    return refused


def ends_of(pool, kind, owner, form, verbs, folder):
    """Run cells in processes of their own, and return how they end, as `cell`."""
    ends = {}
    while left := [verb for verb in verbs if verb not in ends]:
        given = kind, owner, form, left, Path(tempfile.mkdtemp(dir=folder))
        try:
            found = pool.of(OWNERS[owner]).fails(cells, *given, limit=20 + len(left), timeout=5, fresh=False)
        except RankError as error:
            found = [error]
        failed = [each for each in found if isinstance(each, BaseException)]
        if failed and len(left) > 1:
            # A process has died or hangs: at which of them?
            for verb in left:
                ends |= ends_of(pool, kind, owner, form, [verb], folder)
            continue
        for verb in left:
            said = [str(each) for each in failed] or [each[verb] for each in found if verb in each]
            if said:
                refusing = [one.startswith(REFUSED) for one in said]
                same = all(refusing) or not any(refusing) or verb.endswith("in one process")
                ends[verb] = max(said) if same else f"refused in one process alone: {said}"
    return ends


# --- what refuses, as docs/limits.md lists it: verbs: kinds / owners / forms; ... --------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"
BEGIN, END = "<!-- cells: made by `python tests/cell_verbs.py`; do not edit -->\n", "<!-- end of cells -->\n"
AXES = KINDS, OWNERS, FORMS
Places = set[tuple[str, ...]]
ALL = list(itertools.product(*AXES))


def inside(text):
    """Return what is in `text`, "kinds / owners / forms; ..."."""
    boxes = [[part.split(", ") for part in box.split(" / ")] for box in text.split("; ")]
    parts = [[axis if part == ["all"] else part for part, axis in zip(box, AXES, strict=True)] for box in boxes]
    return {place for box in parts for place in itertools.product(*box)}


def shown(places, free):
    """Return `places` in few boxes, which may have those that are `free` too."""
    left, boxes = set(places), []
    while left:
        found, some = [], []
        for number, axis in enumerate(AXES[:2]):
            there = [name for name in axis if any(name == place[number] for place in left)]
            some.append([c for n in range(1, len(there) + 1) for c in itertools.combinations(there, n)])
        for kinds, owners in itertools.product(*some):
            box = kinds, owners, [f for f in FORMS if places | free >= set(itertools.product(kinds, owners, [f]))]
            found.append((len(left & set(itertools.product(*box))), box))
        box = max(found, key=lambda each: each[0])[1]
        left -= set(itertools.product(*box))
        parts = ["all" if len(part) == len(axis) else ", ".join(part) for part, axis in zip(box, AXES, strict=True)]
        boxes.append(" / ".join(parts))
    return "; ".join(boxes)


def listed():
    """Return what the page says that refuses, by verb."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = re.findall(r"^- (`.*`): (.*)$", text, re.MULTILINE)
    found = {verb: inside(where) for verbs, where in lines for verb in verbs[1:-1].split("`, `")}
    return {verb: found.get(verb, set()) for verb in [MAKING, *VERBS]}


def section(refused):
    """Return what the page has between the marks."""
    unmade, same = refused[MAKING], dict[frozenset[Any], list[str]]()
    for verb in VERBS:
        same.setdefault(frozenset(refused[verb] - unmade), []).append(f"`{verb}`")
    count = sum(len(places) * len(verbs) for places, verbs in same.items()) + len(unmade)
    lines = [f"{count:,} of {(len(ALL) - len(unmade)) * len(VERBS) + len(unmade):,} cells refuse.\n"]
    lines += [f"- `{MAKING}`: {shown(unmade, set())}"] if unmade else []
    lines += [f"- {', '.join(verbs)}: {shown(set(places), unmade)}" for places, verbs in same.items() if places]
    return "\n".join(lines) + "\n"


def write(words):
    """Run the cells of all places with these words, and write to the page which refuse: no more than before without --more."""
    more = "--more" in words
    words = [word for word in words if word != "--more"]
    refused, pool = listed(), Pool()
    for place in (place for place in ALL if set(words) <= set(place)):
        with tempfile.TemporaryDirectory() as folder:
            ends = ends_of(pool, *place, ["nothing"], Path(folder))
            unmade = ends["nothing"].startswith(REFUSED + MAKING)
            ends |= {} if unmade else ends_of(pool, *place, list(VERBS), Path(folder))
        refusing = {MAKING} if unmade else {verb for verb, end in ends.items() if end.startswith(REFUSED)}
        for verb, places in refused.items():
            (places.add if verb in refusing else places.discard)(place)
        for verb, end in ends.items():
            if end and not end.startswith(REFUSED):
                print(*place, verb, end, sep=" | ")
    pool.close()
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, end, after = rest.partition(END)
    new = section(refused)
    counts = [[int(n.replace(",", "")) for n in re.findall(r"[\d,]+", text)[:2]] for text in (old, new)]
    if not more and counts[0][1:] == counts[1][1:] and counts[0] < counts[1]:
        sys.exit(f"{counts[1][0]} cells refuse, and before {counts[0][0]}; have those work that did, or pass --more")
    PAGE.write_text(before + begin + new + end + after, encoding="utf-8")


if __name__ == "__main__":
    import cell_verbs  # which the processes import too

    cell_verbs.write(sys.argv[1:])
