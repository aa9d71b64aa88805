"""Product-key memory: against the published formula, which scores all keys, with dense values."""

import copy
import functools
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import take_step
from refusals import check_refused, refusals
from sweeps import few
from torch import nn
from torch.utils.checkpoint import checkpoint

import speedtransfer as st
from speedtransfer.memory_layers import MemoryUse
from speedtransfer.nn.tracing import ONE_GRAPH

F64 = torch.float64
DIM, VALUES, HEADS, K, KEY = 6, 64, 2, 3, 4
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
# A half-key that all pairs of a head share has a gradient of zero, whose rounding Adam follows where epsilon is small.
ADAM, ADAMW = (functools.partial(kind, lr=0.05, eps=1e-3) for kind in (torch.optim.Adam, torch.optim.AdamW))


def layer(seed=0, **options):
    torch.manual_seed(seed)
    return st.MemoryLayer(DIM, VALUES, HEADS, K, KEY, **{"dtype": F64, **options})


def hidden(*shape, seed=0):
    return torch.randn(*shape, DIM, dtype=F64, generator=torch.Generator().manual_seed(seed))


class Formula(nn.Module):
    """A layer by its formula: each head scores every key, and all values are one dense parameter."""

    def __init__(self, given, norm=None):
        super().__init__()
        self.norm, state = norm, given.state_dict()
        for name, _ in given.named_parameters():
            setattr(self, name.replace(".", "_"), nn.Parameter(state[name].detach().clone()))

    def forward(self, x, trained=None):
        query = x.reshape(-1, DIM) @ self.keys_query_weight.T + self.keys_query_bias
        if self.norm == "batch":
            given = self.keys_query_norm_weight, self.keys_query_norm_bias
            query = F.batch_norm(query, None, None, *given, training=True)
        query = query.view(-1, HEADS, KEY)
        if self.norm == "layer":
            query = F.layer_norm(query, (KEY,), self.keys_query_norm_weight, self.keys_query_norm_bias)
        elif self.norm == "rms":
            query = F.rms_norm(query, (KEY,), self.keys_query_norm_weight)
        values = self.values_weight
        if trained is not None:
            mask = torch.zeros(VALUES, 1, dtype=F64).index_fill(0, trained, 1)
            # As published: the same values, and a gradient where the mask is 1.
            values = values * mask + values.detach() - (values * mask).detach()
        found = torch.zeros(len(query), values.shape[1], dtype=F64)
        for head, (first, second) in enumerate(self.keys_halves):
            every = torch.cat([first.repeat_interleave(len(second), 0), second.repeat(len(first), 1)], 1)
            scores, rows = (query[:, head] @ every.T).topk(K)
            found = found + (scores.softmax(-1)[..., None] * values[rows]).sum(1)
        found = found.view(*x.shape[:-1], values.shape[1])
        if hasattr(self, "gate_weight"):
            found = (found * F.silu(x @ self.gate_weight.T)) @ self.out_weight.T
        return found


def train(model, make=ADAM, steps=6, call=None):
    """Train on few positions, so that most values are idle; return outputs, and all gradients and parameters by name."""
    opt, seen = make(model.parameters()), {}
    for step in range(steps):
        x = hidden(2, 2, seed=step).requires_grad_()
        out = (model if call is None else call)(x)
        out.square().sum().backward()
        seen |= {f"out {step}": out.detach(), f"x {step}": x.grad}
        for name, param in model.named_parameters():
            if param.grad is not None:
                grad = param.grad.detach()
                seen[f"{name.replace('.', '_')} {step}"] = grad.to_dense() if grad.is_sparse else grad.clone()
        opt.step()
        opt.zero_grad()
    return seen | {
        n.replace(".", "_"): v for n, v in model.state_dict().items() if "running" not in n and "batches" not in n
    }


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


KINDS = {
    "bag": {},
    "batch": {"query_norm": "batch", "gate": True},
    "layer": {"query_norm": "layer", "value_dim": 5},
    "rms": {"query_norm": "rms", "value_dim": 5, "gate": True},
    "embedding": {"values": lambda: st.Embedding(VALUES, DIM, dtype=F64)},
    "rows of layers": {"values": lambda: st.PerLayerEmbedding(VALUES, 2, DIM // 2, dtype=F64)},
    "torch bag": {"values": lambda: nn.EmbeddingBag(VALUES, DIM, mode="sum", dtype=F64)},
    "torch": {"values": lambda: nn.Embedding(VALUES, DIM, dtype=F64)},
}


def made(name):
    return layer(**{key: value() if key == "values" else value for key, value in KINDS[name].items()})


@pytest.mark.parametrize("make", [ADAM, ADAMW], ids=["Adam", "AdamW"])
@pytest.mark.parametrize("name", KINDS)
def test_trains_as_the_formula_does(name, make):
    """Outputs, gradients of the input and of every parameter, and what Adam makes of idle rows."""
    memory = made(name)
    formula = Formula(memory, KINDS[name].get("query_norm"))
    assert_close(train(memory, make), train(formula, make))
    memory.eval()
    for shape in ((), (3,), (2, 0), (2, 3)):
        if name != "batch":
            torch.testing.assert_close(memory(hidden(*shape)), formula(hidden(*shape)), **CLOSE)
    with pytest.raises(st.errors.InvalidValueError, match=r"x has shape \(2, 5\) but its last dimension must be dim=6"):
        memory(torch.zeros(2, 5, dtype=F64))


class Two(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.first, self.second = layer(values=values), layer(1, values=values)

    def forward(self, x):
        return self.second(x + self.first(x))


def test_layers_share_values():
    torch.manual_seed(3)
    two = Two(st.EmbeddingBag(VALUES, DIM, mode="sum", dtype=F64))
    dense = copy.deepcopy(two)
    dense.first.values = dense.second.values = nn.EmbeddingBag.from_pretrained(
        two.first.values.weight.detach(), False, mode="sum"
    )
    dense.first.values.weight = nn.Parameter(two.first.values.weight.detach().clone())
    assert_close(train(two, ADAMW), train(dense, ADAMW))
    assert [each.names for each in st.summary(two).tables] == [("first.values", "second.values")]
    use = MemoryUse(VALUES)
    with two.first.counting(use), two.second.counting(use):
        two(hidden(3))
    assert (use.batches, int(use.counts.sum())) == (2, 2 * 3 * HEADS * K)


def test_values_by_id_and_at_first():
    """With a vocabulary there are rows for the values that were read alone, with the numbers of a table of all."""
    values = st.EmbeddingBag(8, DIM, mode="sum", vocabulary=st.Vocabulary(max_capacity=VALUES), dtype=F64)
    memory = layer(values=values)
    formula = Formula(memory)
    formula.values_weight = nn.Parameter(values.eval()(torch.arange(VALUES)[:, None]).detach())
    found, wanted = train(memory.train()), train(formula)
    for name in (name for name in wanted if not name.startswith("values")):
        torch.testing.assert_close(found[name], wanted[name], **CLOSE)
    assert 0 < len(values.vocabulary) < VALUES
    zeros = layer(std=0.0).values
    assert not zeros.weight.any()
    assert not zeros.table.version, "zeros take memory"
    assert layer(value_dim=2500).values.weight.detach().std().item() == pytest.approx(1 / 50, rel=0.05)


@pytest.mark.parametrize("name", ["bag", "embedding", "torch bag", "torch", "rms"])
@pytest.mark.parametrize("frozen", [False, True])
def test_masked_rows_train_as_published(name, frozen):
    memory = made(name)
    formula, rows = Formula(memory, KINDS[name].get("query_norm")), torch.tensor([3, 9, 10, 17, 30, 31, 32, 50, 63])
    before = memory.values.weight.detach().clone()
    memory.train_rows(rows.flip(0))
    for model in (memory, formula) if frozen else ():
        for param_name, param in model.named_parameters():
            param.requires_grad_("values" in param_name)
    assert_close(train(memory), train(formula, call=functools.partial(formula, trained=rows)))
    changed = (memory.values.weight != before).any(1).nonzero()[:, 0]
    assert len(changed) > 0
    assert set(changed.tolist()) <= set(rows.tolist())
    memory.train_rows([])
    before = memory.values.weight.detach().clone()
    train(memory, functools.partial(torch.optim.SGD, lr=0.1))
    assert torch.equal(memory.values.weight, before)
    memory.train_rows(None)
    assert memory.trained_rows is None


def test_lazy_rows_outside_of_the_mask_keep_their_bits():
    """Whatever the optimizer does to rows without a gradient, and whatever it remembers of them."""
    memory = layer(idle="lazy")
    opt = torch.optim.AdamW(memory.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(8):
        if step == 4:
            memory.train_rows(range(20, 50))
            before = memory.values.weight.detach().clone()
        take_step(opt, memory(hidden(8, seed=step)).square().sum())
    changed = (memory.values.weight != before).any(1).nonzero()[:, 0].tolist()
    assert changed
    assert set(changed) <= set(range(20, 50))


def test_counts_and_the_rows_that_matter():
    memory = layer()
    batches, news = [hidden(2, seed=n) for n in range(4)], hidden(3, seed=9)
    with memory.counting() as background:
        for batch in batches:
            memory(batch)
    with memory.counting() as use:
        memory(news)
    memory(news)
    counts = [memory.keys(batch)[0].flatten().tolist() for batch in [*batches, news]]
    assert background.counts.tolist() == [sum(each.count(row) for each in counts[:4]) for row in range(VALUES)]
    assert use.unused == VALUES - len(set(counts[4]))
    assert repr(use) == f"MemoryUse({VALUES - use.unused} of 64 values used in 1 batches)"
    scores = {
        row: counts[4].count(row) / len(counts[4]) * math.log(5 / (sum(row in each for each in counts[:4]) + 1))
        for row in range(VALUES)
    }
    torch.testing.assert_close(use.tf_idf(background), torch.tensor([*scores.values()], dtype=F64), **CLOSE)
    best = sorted(set(counts[4]), key=lambda row: (-scores[row], row))
    assert use.top_rows(background, 5).tolist() == sorted(best[:5])
    assert use.top_rows(background, VALUES).tolist() == sorted(best)


@pytest.mark.skipif(not ONE_GRAPH, reason="older versions of torch break the graph")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("name", "rows"), few(itertools.product(["bag", "embedding", "batch"], [None, range(30)]), ("bag", None))
)
def test_compiled(name, rows):
    """In one graph, but with a mask: what that leaves is known only when it runs."""
    torch.compiler.reset()
    memory = made(name)
    memory.train_rows(rows)
    plain = copy.deepcopy(memory)
    run = torch.compile(memory, backend="aot_eager", fullgraph=rows is None)
    assert_close(train(memory, ADAMW, call=run), train(plain, ADAMW))
    if rows is not None:
        with memory.counting() as use:
            run(hidden(2))
        assert int(use.counts.sum()) == 2 * HEADS * K
    torch.compiler.reset()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rows", [None, range(30)])
def test_checkpointing_and_copies(reentrant, rows):
    memory = layer(gate=True)
    memory.train_rows(rows)
    other = pickle.loads(pickle.dumps(copy.deepcopy(memory)))
    assert_close(train(memory, call=lambda x: checkpoint(memory, x, use_reentrant=reentrant)), train(other))
    with torch.device("meta"):
        empty = st.MemoryLayer(DIM, VALUES, HEADS, K, KEY, gate=True, dtype=F64)
    made_later = empty.to_empty(device="cpu")
    made_later.load_state_dict(memory.state_dict())
    assert torch.equal(made_later(hidden(3)), memory(hidden(3))) or rows is not None


def test_autocast_and_half_precision():
    memory = layer(dtype=torch.float32, gate=True, dropout=0.5)
    dense, x = st.to_dense(memory), hidden(4).float()
    for each in (memory, dense):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            each(x).float().square().sum().backward()
    for (name, ours), theirs in zip(memory.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_dense() if ours.grad.is_sparse else ours.grad, theirs.grad, msg=name)
    memory, dense = memory.bfloat16(), dense.bfloat16()
    for context in (torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
        with context:
            torch.testing.assert_close(memory.eval()(x.bfloat16()), dense.eval()(x.bfloat16()))
    values = st.EmbeddingBag(VALUES, DIM, mode="sum", storage_dtype=torch.int8)
    assert layer(dtype=torch.bfloat16, gate=True, values=values)(x.bfloat16()).dtype == torch.bfloat16


WRONG = """
make(values=st.EmbeddingBag(64, 6)) -> InvalidValueError: values has mode='mean' and .* make it with mode='sum'
make(values=st.EmbeddingBag(64, 5, mode="sum")) -> InvalidValueError: values are 5 wide but value_dim is 6; pass value_dim=5
make(values=st.Embedding(65, 6)) -> InvalidValueError: values has 65 rows but num_values is 64; pass a module of 64 rows
make(values=torch.zeros(64, 6)) -> InvalidTypeError: values is a Tensor but must be an EmbeddingBag or an Embedding
make(values=st.Embedding(64, 6), memory="pageable") -> InvalidValueError: and so are \\['memory'\\]; leave these out
make(values=st.Embedding(64, 6), std=1.0) -> InvalidValueError: and so are \\['std'\\]; leave these out
make(num_values=1000) -> InvalidValueError: num_values is 1000 but must be a square number.* pass 961 or 1024
make(k=9) -> InvalidValueError: k is 9 but 64 values have 8 half-keys to choose from; pass at most 8
make(heads=0) -> InvalidValueError: heads is 0 but must be at least 1
make(dim=2.0) -> InvalidTypeError: dim is 2.0 \\(float\\) but must be an integer
make(key_dim=5) -> InvalidValueError: key_dim is 5 but a key has two halves; pass an even number
make(value_dim=0) -> InvalidValueError: value_dim is 0 but must be at least 1
make(dropout=1.5) -> InvalidValueError: dropout is 1.5 but must be at least 0 and at most 1
make(std=-1) -> InvalidValueError: std is -1 but must be at least 0
make(query_norm="batchnorm") -> InvalidValueError: did you mean 'batch'
make(vocabulary=st.Vocabulary()) -> InvalidTypeError: pass values=st.EmbeddingBag\\(..., vocabulary=...\\)
make(memroy="mmap") -> InvalidTypeError: did you mean 'memory'
make().train_rows("all") -> InvalidTypeError: rows are no row numbers .*pass integers, or None for all
make().train_rows([64]) -> RowIndexError: rows has 64 but there are 64 values; pass row numbers from 0 to 63
make().train_rows(torch.ones(64, dtype=torch.bool)) -> InvalidTypeError: rows are torch.bool but must be integers
make().counting(MemoryUse(10)).__enter__() -> InvalidValueError: use counts 10 values but not 64
MemoryUse(64).top_rows(MemoryUse(65), 3) -> InvalidValueError: background counts 65 values but not 64
MemoryUse(64).tf_idf(torch.zeros(64)) -> InvalidTypeError: background is a Tensor but must be a MemoryUse
MemoryUse(64).top_rows(MemoryUse(64), 0) -> InvalidValueError: most is 0 but must be at least 1
"""


@pytest.mark.parametrize("refusal", refusals(WRONG), ids=str)
def test_wrong_arguments(refusal):
    def make(dim=DIM, num_values=VALUES, heads=HEADS, k=K, key_dim=KEY, **options):
        return st.MemoryLayer(dim, num_values, heads, k, key_dim, **options)

    check_refused(refusal, make=make, st=st, torch=torch, MemoryUse=MemoryUse)
