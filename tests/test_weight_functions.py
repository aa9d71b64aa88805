"""Every method of a tensor that takes simple arguments, on the weight of a table and on a parameter of torch; and single rows.

Rows that are named are read and written with the same numbers, and no other row is caught up.
"""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import take_step
from torch import Tensor, nn
from weight_world import assert_equal

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, OptimizerError
from speedtransfer.rows import LAST_STEP

VALUES = (torch.arange(24.0).reshape(6, 4) - 9) / 8  # bfloat16 holds them
IDS, ROWS = torch.tensor([1, 4]), torch.full((2, 4), 0.75)
HALVES, MASK = torch.full((6, 4), 0.5), torch.arange(24).reshape(6, 4) % 3 == 0
FIRST = torch.zeros(6, 4, dtype=torch.int64)
ARGUMENTS = [
    (),
    *[(2,), (0,), (0, 1), (-1,), (0.5,), (0.5, 1.5), (0, 1, 2), (0, 2, 1), (2, 0), (2, 0, 1.0), (0, 1.0), (True,)],
    *[(HALVES,), (HALVES, HALVES), (torch.ones(4, 2),), (torch.ones(4),), (torch.ones(6, 2), torch.ones(2, 4))],
    *[(0, IDS), (0, IDS, ROWS), (0, IDS, 2.0), (IDS,), ((IDS,), ROWS), (torch.tensor([0, 5]), ROWS)],
    *[(MASK,), (MASK, 1.0), (MASK, HALVES), (MASK, torch.ones(24)), (0, FIRST), (0, FIRST, HALVES), (0, FIRST, 2.0)],
    *[((4, 6),), (4, 6), ([2, 2],), ([3, 3], 0), ((2, 3),), ((0, 1),), (torch.float64,), ("cpu",), (lambda x: x + 1,)],
]
# What is of another kind: how an object is made and what it is to Python, memory as such, other devices.
_ASIDE = """
    __class__ __init__ __new__ __init_subclass__ __subclasshook__ __dir__ __getattribute__ __setattr__
    __delattr__ __sizeof__ __reduce_ex__ __reduce__ __getstate__ __setstate__ __dlpack__ __dlpack_device__
    __torch_function__ __torch_dispatch__ __repr__ __str__ __format__ __hash__ __deepcopy__ _make_subclass
    _make_wrapper_subclass _dtensor__new__ _fix_weakref _reduce_ex_internal _use_count _view_func
    _view_func_unsafe _rev_view_func_unsafe _lazy_clone data_ptr const_data_ptr storage untyped_storage _typed_storage
    module_load backward cuda pin_memory ipu xpu hpu mtia new new_empty
"""
# They raise, and say what to do instead.
_REFUSED = "set_ share_memory_ t_ transpose_ swapaxes_ swapdims_ unsqueeze_ squeeze_ as_strided_ resize_ resize_as_"
ASIDE, REFUSED = _ASIDE.split(), _REFUSED.split()
NAMES = [name for name in dir(Tensor) if callable(getattr(Tensor, name, None)) and name not in ASIDE]
KINDS = {"over the memory": {}, "copied": {"storage_dtype": torch.bfloat16}}


def snapshot(value, weight):
    """Return what can be compared after the weight has changed."""
    if value is weight:
        return "the weight"
    if isinstance(value, Tensor):
        dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
        dense = dense.dequantize() if dense.is_quantized else dense.clone()
        return [dense.resolve_conj().resolve_neg(), str(value.layout), value.requires_grad and torch.is_grad_enabled()]
    if isinstance(value, tuple | list):
        return [type(value).__name__, *(snapshot(item, weight) for item in value)]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    plain = int | float | str | bool | torch.dtype | torch.device | torch.layout | None
    return value if isinstance(value, plain) else type(value).__name__


def call(weight, name, arguments, grad):
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cloned = [item.clone() if isinstance(item, Tensor) else item for item in arguments]
        return snapshot(getattr(weight, name)(*cloned), weight)


def check(name, options, most):
    """Call a method with up to `most` of the arguments that a parameter of torch takes; return how many those were."""
    found = 0
    for arguments in ARGUMENTS:
        for grad in (True, False):
            theirs = nn.Parameter(VALUES.clone())
            try:
                expected = call(theirs, name, arguments, grad)
            except Exception:
                continue
            found += 1
            emb = st.Embedding.from_pretrained(VALUES.clone(), freeze=False, **options)
            tolerance = 2e-2 if options else 1e-6
            try:
                ours = call(emb.weight, name, arguments, grad)
            except (InvalidTypeError, InvalidValueError):
                assert name in REFUSED
                continue
            assert_equal(ours, expected, tolerance, name)
            assert_equal(emb.weight.detach().clone(), theirs.detach(), tolerance, name)
        if found >= most:
            break
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("most", [1, pytest.param(len(ARGUMENTS), marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("letter", sorted({name[0] for name in NAMES}))
def test_arguments(letter, kind, most):
    found = {name: check(name, KINDS[kind], most) for name in NAMES if name[0] == letter}
    assert any(found.values())  # else this test checks nothing


def test_data_is_no_memory_and_keeps_its_values():
    """``other.data = weight.data`` takes the memory itself, of which there is none: NaN, and not zeros."""
    emb = st.Embedding.from_pretrained(VALUES.clone(), freeze=False, storage_dtype=torch.bfloat16)
    other, data = nn.Parameter(torch.zeros(6, 4)), emb.weight.data
    other.data = data
    assert other.isnan().all()
    # Where the table gets others.
    emb.weight.data = torch.ones(8, 4)
    assert torch.equal(data.clone(), VALUES)
    assert torch.equal(emb.weight, torch.ones(8, 4))
    assert torch.equal(copy.copy(emb.weight), torch.ones(8, 4))
    both = copy.deepcopy([emb, emb.weight])
    assert both[0].weight is both[1]


# --- rows that are named ------------------------------------------------------------------------------------------------

NUM, DIM = 60, 4
BATCH = torch.tensor([1, 2, 3])
FEW = torch.arange(NUM) % 40 == 7
GIVEN = {"torch": torch, "np": np, "index": torch.tensor([7, 9, -1]), "mask": FEW, "rows": torch.ones(3, DIM)}
GIVEN |= {"two": torch.tensor([[7, 8], [7, 0]]), "row": torch.tensor(7), "column": torch.tensor([0, 2, 1])}
READS = """
w[7], w[-1], w[7, 2], w[7, 1:3], w[7, ...], w[7, None], w[7][2]
w[7:9], w[-2:], w[4:20:5], w[7:9, 1], w[7:9, :2], w[7:9][1]
w[index], w[two], w[[7, 8]], w[index, 1:], w[index, column], w[two, 1], w[mask], w[mask, 1]
w[row], w[np.int64(7)], w[np.array([7, 8])]
w.select(0, 7), w.select(-2, -3), w.select(dim=0, index=7), torch.select(w, 0, 7)
w.narrow(0, 7, 2), torch.narrow(w, 0, 7, 2)
w.index_select(0, index.abs()), torch.index_select(w, dim=0, index=index.abs())
""".strip().splitlines()
WRITES = """
w[7] = 0
w[-1] = rows[0]
w[7, 2] = 1.5
w[7].zero_()
w[7:9] = 2
w[7:9].mul_(2)
w[4:20:5] += 1
w[index] = rows
w[index, 1:] = 3
w[index, column] = 3
w[two] = 0
w[mask] = 0
w[mask, 1] = 5
w[row] = 4
w[[7, 8]] *= 2
w[7] = w[8]
w.select(0, 7).add_(1)
w.narrow(0, 7, 2).add_(1)
w[7:9][0].copy_(rows[0])
w.index_fill_(0, index.abs(), 2.0)
w.index_copy_(0, index.abs(), rows)
w.index_add_(0, index.abs(), rows, alpha=2)
""".strip().splitlines()
BEYOND = ["w[60]", "w[-61]", "w[torch.tensor([3, 60])]", "w.narrow(0, 59, 2)", "w.select(0, 60)", "w[7] = rows"]


def trained(make, **options):
    torch.manual_seed(0)
    emb = make(NUM, DIM, **options)
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.1, momentum=0.9)
    for ids in (torch.arange(NUM), BATCH, BATCH):
        step(emb, optimizer, ids)
    return emb, optimizer


def step(emb, optimizer, ids, loss=0.0):
    take_step(optimizer, emb(ids).pow(2).sum() + loss)


def caught_up(emb):
    last, lag = emb.table.stored(LAST_STEP), emb._handle.rows.lag
    now = lag.last_steps(len(last), last.device, None, torch.arange(len(last)))
    return (last == now).flatten().nonzero().flatten().tolist() if lag else []


@pytest.mark.parametrize("options", [{}, {"cache_rows": 8}], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_rows_that_are_named(grad, options):
    pairs = [trained(nn.Embedding), trained(st.Embedding, **options)]
    for text in READS if grad else [*READS, *WRITES]:
        found = []
        for emb, optimizer in pairs:
            with torch.set_grad_enabled(grad):
                run = eval if text in READS else exec
                parts = run(text, {**GIVEN, "w": emb.weight}) or []
            assert not grad or all(part.requires_grad for part in parts)
            if isinstance(emb, st.Embedding) and not options:
                assert len(caught_up(emb)) <= len(BATCH) + 10, text
            found.append([part.detach().clone() for part in parts])
            step(emb, optimizer, BATCH, sum(part.pow(2).sum() for part in parts) if grad else 0.0)
        found += [emb.state_dict()["weight"] for emb, _ in pairs]
        torch.testing.assert_close(found[1::2], found[::2], rtol=1e-5, atol=1e-5, msg=lambda why, t=text: f"{t}: {why}")
        for emb, optimizer in pairs:
            step(emb, optimizer, BATCH)
    for text in BEYOND:
        for emb, _ in pairs:
            with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
                exec(text, {**GIVEN, "w": emb.weight})


def test_rows_in_other_memory_are_written_back_alone():
    """Where no tensor is over the table's memory: no copy of all rows is made. Nor is a row of the batch read twice."""
    emb, _ = trained(st.Embedding, cache_rows=8)
    emb.table.reset_stats()
    with torch.no_grad():
        emb.weight[9:11] = 3
        row = emb.weight[7]
        row.fill_(5.0)
    assert emb.table.stats().gathered_rows < 10
    assert emb.table[[7, 9, 10]].tolist() == [[5.0] * DIM, [3.0] * DIM, [3.0] * DIM]
    for text in ("w[7]", "w[7] = 0", "w[7:9] = 0"):
        emb, optimizer = trained(st.Embedding)
        emb(BATCH).pow(2).sum().backward()
        emb.table.reset_stats()
        with torch.no_grad():
            exec(text, {"w": emb.weight})
        optimizer.step()
        assert emb.table.stats().gathered_rows <= 2


def test_all_rows_in_inference_mode():
    emb, query = st.Embedding(NUM, DIM, storage_dtype=torch.int8), torch.rand(3, DIM)
    expected = F.linear(query, emb.weight).detach()
    with torch.inference_mode():
        assert torch.equal(F.linear(query, emb.weight), expected)


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float64}, {"storage_dtype": torch.bfloat16}], ids=["rows", "copies"]
)
def test_rows_taken_with_gradients_are_views(options):
    """They go on showing and writing the rows of now; hooks and gradients are those of the tensor that was taken."""

    def seen(made):
        found = []
        # Numbers that bfloat16 holds, and steps of a power of two.
        rows = torch.randint(-8, 8, (40, 6), generator=torch.Generator().manual_seed(1)) / 4
        with torch.no_grad():
            made.weight.copy_(rows)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.25)
        row, some = made.weight[3], made.weight[3:6]
        row.register_hook(found.append)
        row.retain_grad()
        (row * 2).sum().backward()
        found += [row.grad, made.weight.grad.to_dense()]
        found += torch.autograd.grad((some * some).sum(), some)
        with pytest.raises(RuntimeError, match="view of a leaf"):
            some.mul_(2)
        optimizer.step()
        optimizer.zero_grad()
        found += [row.clone(), some.clone()]
        (row * made.weight[3] + some[1]).sum().backward()
        with torch.no_grad():
            assert some[1].mul_(2).requires_grad
            row[2] = 1
        optimizer.step()
        optimizer.zero_grad()
        found += [row.tolist(), some.clone(), made.weight.clone(), row.requires_grad, row.is_leaf, len(some)]
        torch.autograd.backward([made.weight[6].sum(), made.weight[2, 2]])
        torch.autograd.backward(made.weight[-1], torch.ones(6, dtype=made.weight.dtype))
        return [*found, made.weight.grad.to_dense()]

    for ours, theirs in zip(seen(st.Embedding(40, 6, **options)), seen(nn.Embedding(40, 6).double()), strict=True):
        assert (ours.tolist() == theirs.tolist()) if isinstance(theirs, Tensor) else ours == theirs


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
class TestOtherTensors:
    """What is made of the weight of a table, or shares its memory."""

    def test_a_tensor_of_its_shape_can_be_written(self, options):
        emb = st.Embedding(40, 6, **options)
        mask = torch.full_like(emb.weight, 1.0)
        mask[3] = 0
        mask.numpy()[4, 1] = 0
        assert mask.sum() == 40 * 6 - 7

    def test_another_weight_cannot_follow(self, options):
        online, target = (st.Embedding(40, 6, **options) for _ in range(2))
        before = target.weight.detach().clone()
        for given in (online.weight.data, online.weight):
            with pytest.raises(InvalidValueError, match=r"share the weight itself \(module\.weight = other\.weight\)"):
                target.weight.data = given
        target.weight.data = target.weight.data
        assert torch.equal(target.weight, before)

    def test_a_table_of_it(self, options):
        emb = st.Embedding(40, 6, **options)
        for given in (emb.weight, emb.weight.data, emb.weight[3:9]):
            made = st.Embedding.from_pretrained(given, freeze=False, **options)
            assert torch.equal(made.weight, given)

    def test_functionalize_is_refused(self, options):
        with pytest.raises(InvalidTypeError, match="functionalize"):
            torch.func.functionalize(lambda weight: weight * 2)(st.Embedding(4, 2, **options).weight)


def test_a_parameter_beside_the_rows_in_one_memory():
    flat = torch.ones(6, 2)
    emb, other = st.Embedding.from_pretrained(flat[:4], freeze=False), nn.Parameter(flat[4:])
    optimizer = torch.optim.SGD([*emb.parameters(), other], lr=1.0)
    (emb(torch.tensor([1])).sum() + other.sum()).backward()
    optimizer.step()
    assert flat[:, 0].tolist() == [1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("by_data", [True, False])
def test_a_head_over_the_memory_of_a_table_in_one_step(by_data):
    emb, head = st.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    if by_data:
        head.weight.data = emb.weight.data
    else:
        head.weight = nn.Parameter(emb.weight.data)
    before = emb.weight.detach().clone()
    optimizer = torch.optim.SGD([*emb.parameters(), *head.parameters()], lr=1.0)
    (emb(torch.tensor([1])).sum() + head.weight.sum()).backward()
    with pytest.raises(OptimizerError, match=r"share the parameter itself \(head\.weight = emb\.weight\)"):
        optimizer.step()
    assert torch.equal(emb.weight, before)
    # By an optimizer of its own the head steps as in torch.
    torch.optim.SGD(head.parameters(), lr=1.0).step()
    torch.optim.SGD(emb.parameters(), lr=1.0).step()
    assert torch.equal(emb.weight, before - 1 - (torch.arange(4) == 1)[:, None].float())
