"""Modules with a vocabulary in the ways that people use nn.Embedding and nn.EmbeddingBag: right, or refused by name."""

import threading
from unittest import mock

import numpy as np
import pytest
import torch
from cases import raising, take_step
from refusals import Refusal, check_refused, refusals
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import speedtransfer as st
from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError
from speedtransfer.rows import Rows
from speedtransfer.tables import unique_rows
from speedtransfer.vocabulary import room
from speedtransfer.vocabulary.policies import most_rows

DIM = 3


def made(capacity=4, kind=st.Embedding, module=None, **about):
    vocabulary = st.Vocabulary(**about)
    return kind(capacity, DIM, vocabulary=vocabulary, **(module or {})), vocabulary


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def trained(module, optimizer, *values):
    take_step(optimizer, module(ids(*values)).sum())


# --- arguments --------------------------------------------------------------------------------------------------------

# `module` has a vocabulary, and gets no ids by any of these; `meta` has one and no rows; `other` has none.
REFUSED = r"""
Vocabulary(capacity=0) -> InvalidValueError: capacity is 0 but must be at least 1
Vocabulary(max_capacity=0) -> InvalidValueError: max_capacity is 0 but must be at least 1
Vocabulary(capacity=5, max_capacity=4) -> InvalidValueError: max_capacity is 4 but capacity is 5
Vocabulary(max_capacity="48") -> InvalidValueError: max_capacity is .* such as '48 GB'
Vocabulary(max_capacity="0.5 B") -> InvalidValueError: max_capacity is .* such as
Vocabulary(max_capacity=1e6) -> InvalidTypeError: max_capacity is .* or math\.inf
Vocabulary(admit="alwys") -> InvalidValueError: admit is .* did you mean 'always'
Vocabulary(admit=0) -> InvalidValueError: admit is 0 but must be at least 1
Vocabulary(admit=2**32) -> InvalidValueError: below 2
Vocabulary(admit=0.5) -> InvalidTypeError: admit is 0\.5 but must be 'always'
Vocabulary(evict="LRU") -> InvalidValueError: evict is .* did you mean 'lru'
Vocabulary(evict=0) -> InvalidValueError: evict is 0 but must be at least 1
Vocabulary(evict=1.5) -> InvalidTypeError: evict is 1\.5 .* or a callable
Vocabulary(unseen="zero") -> InvalidValueError: unseen is .* did you mean 'zeros'
Vocabulary(seed=1.5) -> InvalidTypeError: seed is 1\.5 but must be an int
Vocabulary(half_life=0) -> InvalidValueError: half_life is 0 but must be above 0
Vocabulary(on_evict=3) -> InvalidTypeError: on_evict is 3 .* pass a function
Vocabulary(deferred=1) -> InvalidTypeError: deferred is 1 but must be True or False
Vocabulary(initial="normal") -> InvalidTypeError: initial is .normal. but must be \(\"normal\", mean, std\)
Vocabulary(initial=("gauss", 0, 1)) -> InvalidValueError: initial is .'gauss', 0, 1.
Vocabulary(initial=("normal", 0, "1")) -> InvalidTypeError: is '1' .str. but must be a number
Vocabulary(initial=("uniform", 0, float("nan"))) -> InvalidValueError: nan but must be finite
Vocabulary(initial=("uniform", -1e308, 1e308)) -> InvalidValueError: beyond float64
Vocabulary().update([1], torch.zeros(1, 2)) -> InvalidValueError: has no rows yet
Embedding(4, 3, vocabulary="x") -> InvalidTypeError: must be a speedtransfer\.Vocabulary
Embedding(4, 3, vocabulary=Vocabulary(max_capacity=3), device="meta") -> InvalidValueError: capacity .* is 4;
Embedding(4, 3, vocabulary=Vocabulary(), padding_idx=1.5) -> InvalidTypeError: integers of 64 bits
Embedding(4, 3, vocabulary=Vocabulary(), padding_idx=2**65) -> InvalidValueError: ids have 64 bits
Embedding(4, 3, vocabulary=Vocabulary(initial=1e6), dtype=torch.float16) -> InvalidValueError: ends at 65504
Embedding(4, 3, vocabulary=Vocabulary(max_capacity=3)) -> InvalidValueError: capacity .* is 4;
Embedding(4, 3, vocabulary=Vocabulary(), cache_rows=2, cache_counts=torch.ones(4)) -> InvalidValueError: leave cache_counts
Embedding(4, 3, vocabulary=module.vocabulary) -> InvalidValueError: belongs to another module
module([True]) -> InvalidTypeError: ids
module(torch.tensor([1.0])) -> InvalidTypeError: ids
module(torch.tensor([True])) -> InvalidTypeError: ids
module(["a"]) -> InvalidTypeError: ids
module([2**64]) -> InvalidValueError: ids
module([[1], [2, 3]]) -> InvalidValueError: ids
[1, 2] in module.vocabulary -> InvalidValueError: shape \(2,\) but `in` asks for one id
[] in module.vocabulary -> InvalidValueError: shape \(0,\) but `in` asks for one id
module.vocabulary.update([1], torch.ones(1, 3, device="meta")) -> InvalidTypeError: rows is on the meta device
module.vocabulary.update([1], torch.ones(1, 3).to_sparse()) -> InvalidTypeError: rows has layout
module.activate(unique_rows(ids(1, 2), 4, ids(1, 2))) -> InvalidTypeError: UniqueRows, which are numbers of rows
module(other.prefetch(ids(1))) -> InvalidValueError: this ticket was made for
setattr(module, "weight", other.weight) -> InvalidTypeError: weight of another table, whose ids are the numbers of its rows
setattr(module, "weight", nn.Linear(3, 4).weight) -> InvalidValueError: replaced by another parameter
setattr(other, "weight", module.weight) -> InvalidValueError: padding_idx is 1 but
setattr(module, "padding_idx", 1) -> InvalidValueError: padding_idx of weight becomes 1 but its vocabulary has None
module.weight.data.__isub__(1) -> InvalidValueError: cannot be written as a whole
torch._foreach_mul_([other.weight.data, module.weight.data], 0.5) -> InvalidValueError: cannot be written as a whole
nn.init.trunc_normal_(module.weight) -> InvalidTypeError: trunc_normal_ would cut them off at -2
module.table.uniform_(-0.05, 0.05) -> InvalidValueError: cannot be filled by its table; .* torch\.nn\.init\.normal_
meta.load_state_dict(module.state_dict()) -> InvalidValueError: assign=True
meta.load_state_dict({}, assign=True) -> RuntimeError: Missing
meta.activate(ids(1)) -> InvalidValueError: no rows yet
meta.vocabulary.export() -> InvalidValueError: no rows yet, or those
setattr(meta, "weight", other.weight) -> InvalidTypeError: this module has a vocabulary
hash_ids(["a", None]) -> InvalidTypeError: value 1 is None \(NoneType\) .* replace missing values
hash_ids([["a", "b"], ["c", 3]]) -> InvalidTypeError: value 3 is 3 \(int\) .* pass them to the module directly
hash_ids(7) -> InvalidTypeError: value 0 is 7 \(int\) .* pass them to the module directly
hash_ids([("a", 1)]) -> InvalidTypeError: value 0 is \('a', 1\)
hash_ids(numpy.array([["a", 2]], dtype=object)) -> InvalidTypeError: value 1 is 2
hash_ids(torch.arange(3)) -> InvalidTypeError: value 0 is 0 \(int\) .* pass them to the module directly
hash_ids([["a"], ["b", "c"]]) -> InvalidValueError: lists of different lengths
"""


@pytest.mark.parametrize("refusal", refusals(REFUSED), ids=str)
def test_refused(refusal):
    module, vocabulary = made()
    names = {
        "torch": torch,
        "nn": nn,
        "numpy": np,
        "hash_ids": st.hash_ids,
        "meta": st.Embedding(4, 3, vocabulary=st.Vocabulary(), device="meta"),
        "ids": ids,
        "unique_rows": unique_rows,
        "other": st.Embedding(4, 3, padding_idx=1),
    }
    before = names["other"].weight.detach().clone()
    # What torch says has several lines.
    check_refused(
        refusal,
        refusal.error == "RuntimeError",
        module=module,
        Vocabulary=st.Vocabulary,
        Embedding=st.Embedding,
        **names,
    )
    assert torch.equal(names["other"].weight, before)
    assert names["meta"].weight.is_meta
    assert not vocabulary.ids().tolist()
    assert vocabulary.initial == ("normal", 0.0, 1.0)


# --- ids --------------------------------------------------------------------------------------------------------------

FORMS = [
    ((1, 2), [1, 2]),
    (7, [7]),
    ([], []),
    (np.array([]), []),
    (np.array([2**63, 5], dtype=object), [-(2**63), 5]),
    ([2**63, -1], [-(2**63), -1]),
    (torch.tensor([255], dtype=torch.uint8), [255]),
    (np.array([2**64 - 1], dtype=np.uint64), [-1]),
    (torch.tensor([2**63 - 1], dtype=torch.uint64), [2**63 - 1]),
    (np.array([4, 3, 2, 1])[::-2], [1, 3]),
    *((np.array([1, 5], dtype=kind), [1, 5]) for kind in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4")),
]


@pytest.mark.parametrize(("given", "expected"), FORMS, ids=repr)
def test_ids_of_every_form(given, expected):
    module, vocabulary = made()
    out = module(given)
    assert out.shape == (*torch.Size(np.shape(given)), DIM)
    assert vocabulary.ids().tolist() == expected
    assert torch.equal(out.view(-1, DIM), module(expected))


# --- gradients that come late -----------------------------------------------------------------------------------------


def test_a_gradient_that_was_kept_while_rows_changed():
    module, _ = made(2, evict="lru")
    kept = []
    for each in (1, 2, 3):
        module.zero_grad()
        module(ids(each)).sum().backward()
        kept.append(module.weight.grad.clone())
    module.weight.grad = kept[1] + kept[2]
    for use in (
        lambda: setattr(module.weight, "grad", kept[0]),
        lambda: kept[0] + kept[2],
        lambda: kept[2].maximum(kept[0]),
    ):
        with pytest.raises(InvalidValueError, match="a gradient that was kept"):
            use()


@pytest.mark.parametrize("known", [True, False])
def test_a_gradient_by_hand_after_rows_changed(known):
    """Without the time of the lookup its rows may be those of other ids."""
    module, _ = made(2, evict="lru")
    trained(module, sgd(module), 1, 2)
    with torch.no_grad():
        active = module.activate(ids(1))
    if known:
        module(ids(3, 4))
    else:
        active.ids = active.ids.clone()
    with pytest.raises(InvalidValueError, match="activate" if known else "lookup is not known"):
        active.add_grad(torch.ones(1, DIM))
    assert module.weight.grad is None


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("unseen", ["initial", "zeros", "row"])
def test_active_rows_of_unseen_ids_are_the_row_that_the_table_has_for_them(unseen, is_training):
    module, vocabulary = made(4, admit=2, unseen=unseen)
    module(ids(1, 1))
    module.train(is_training)
    active = module.activate(ids(2, 1, 3))
    assert active.ids.tolist() == [0, *vocabulary.rows([1]).tolist()]
    assert torch.equal(active.rows.detach(), module.table.gather(active.ids))
    assert torch.equal(active.rows[active.inverse[1]], module(ids(1))[0])
    # What forward reads with unseen="initial" is in no row.
    found = module.eval()(ids(2, 3)).detach()
    assert torch.equal(active.rows.detach()[active.inverse[[0, 2]]], found) == (unseen != "initial")


def test_gradients_of_all_rows_go_to_the_ids_of_then():
    module, vocabulary = made(3, max_capacity=50, evict="lru")
    optimizer = sgd(module)
    module(ids(1, 2))
    loss = module.weight.sum()
    # Another use, of other values, keeps the rows after the first has got its gradient.
    vocabulary.update([1], torch.ones(1, DIM))
    later = (2 * module.weight).sum()
    take_step(optimizer, loss)
    module(torch.arange(10, 30))
    assert {1, 2} <= set(vocabulary.ids().tolist())
    later.backward()
    grad, rows = module.weight.grad.to_dense(), vocabulary.rows([1, 2])
    assert grad[rows[0]].tolist() == [2] * DIM
    # Rows that were free then, and the row of unseen ids, get none.
    others = [row for row in range(len(grad)) if row not in rows.tolist()]
    assert not grad[others].any()


@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("way", ["assigned", "hook", "in place"])
def test_gradients_given_for_all_rows(way, idle):
    """They train the rows of ids, and not what unseen ids read; before the table grows, or after."""
    module, _ = made(2, module={"idle": idle}, max_capacity=40, unseen="zeros")
    optimizer = sgd(module)
    if way == "hook":
        module.weight.register_hook(lambda grad: grad.to_dense() + 1)
    out = module(ids(1, 2))
    before = out.detach().clone()
    if way == "assigned":
        module.weight.grad = torch.ones_like(module.weight)
    else:
        (0 * out).sum().backward()
    if way == "in place":
        module.weight.grad.add_(1)
    new = module(ids(3, 4, 5)).detach().clone()
    optimizer.step()
    assert torch.allclose(module(ids(1, 2)), before - 0.1)
    assert torch.equal(module(ids(3, 4, 5)), new)
    assert not module.eval()(ids(99)).any()


# --- training that admits nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["evaluation", "by hand"])
def test_steps_of_ids_that_nothing_admits_warn_once(way):
    module, vocabulary = made(module={"idle": "lazy"})
    optimizer = sgd(module)

    def step(*values):
        optimizer.zero_grad()
        if way == "evaluation":
            module.eval()(ids(*values)).sum().backward()
        else:
            with torch.no_grad():
                active = module.activate(ids(*values))
                active.add_grad(torch.ones_like(active.rows))
        optimizer.step()

    with pytest.warns(UserWarning, match="1 ids without rows"):
        step(1)
    # Once; and of known ids never. Warnings are errors here.
    step(1)
    assert not len(vocabulary)


# --- forwards within steps and backwards ------------------------------------------------------------------------------


@pytest.mark.parametrize("unseen", ["initial", "zeros", "row"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_that_are_computed_again(reentrant, unseen):
    """Checkpointed, each id is counted once, and reads the same values both times."""
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        module, vocabulary = made(8, unseen=unseen, admit=2, seed=1)
        linear, here = nn.Linear(DIM, DIM), torch.zeros(1, requires_grad=True)

        def forward(batch, here, module=module, linear=linear):
            return torch.tanh(linear(module(batch) + here))

        # One that is admitted, and one that is not.
        batch = ids(5, 6, 6)
        out = checkpoint(forward, batch, here, use_reentrant=reentrant) if again else forward(batch, here)
        if again and reentrant and unseen != "initial":
            with pytest.raises(InvalidTypeError, match="pass use_reentrant=False"):
                out.sum().backward()
            return
        out.sum().backward()
        after = vocabulary.ids().tolist()
        # The second sighting of these, and of no other.
        module(ids(5, 7))
        results.append((out, linear.weight.grad, module.weight.grad.to_dense()[:3], after, vocabulary.ids().tolist()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_that_evaluate_read_no_row_of_another_id():
    """A row changes hands between the look-up of an id and the read."""
    module, vocabulary = made(2, initial=0.0, evict="lru")
    vocabulary.update([1], torch.ones(1, DIM))
    found, calls = Rows.lookup, []

    def late(rows, index):
        calls.append(index)
        if len(calls) == 1:
            vocabulary.forget([1])
            vocabulary.update([2], torch.full((1, DIM), 2.0))
        return found(rows, index)

    with mock.patch.object(Rows, "lookup", late), torch.no_grad():
        assert not module(ids(1)).any()
    assert len(calls) == 2


def test_a_lookup_in_training_waits_for_none():
    """Between the look-up of ids and the leaf of autograd no other thread takes their rows."""
    module, vocabulary = made(2, evict="lru")
    trained(module, sgd(module), 1, 2)
    read, others = Rows.read, []

    def late(rows, *args, **options):
        if not others:
            others.append(threading.Thread(target=lambda: vocabulary.forget([1])))
            others[0].start()
            others[0].join(0.05)
            assert others[0].is_alive()
        return read(rows, *args, **options)

    with mock.patch.object(Rows, "read", late):
        out = module(ids(2))
    others[0].join()
    assert vocabulary.ids().tolist() == [2]
    assert out.requires_grad


# --- functions of the user, and what fails ----------------------------------------------------------------------------


refuse = raising(RuntimeError("no"))
NO_SCORES = [lambda *_: None, lambda *_: [1], lambda i, *_: np.array(["x"] * len(i))]


@pytest.mark.parametrize(
    "about", [{"evict": "lru", "on_evict": refuse}, *({"evict": it} for it in (refuse, *NO_SCORES))]
)
def test_functions_that_fail_change_nothing(about):
    module, vocabulary = made(3, **about)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    trained(module, optimizer, 1, 2)
    trained(module, optimizer, 1)
    before = vocabulary.export(), vocabulary.stats()
    with pytest.raises((RuntimeError, InvalidValueError), match=r"^no$|return a bool or a number for each"):
        module(ids(3, 4))
    assert vocabulary.stats() == before[1]
    assert all(torch.equal(*pair) for pair in zip(vocabulary.export(), before[0], strict=True))
    # And it goes on.
    trained(module, optimizer, 1, 2)


def test_a_function_that_raises_after_a_step_leaves_the_step_made():
    """Also that of other tables of the same optimizer."""
    vocabulary = st.Vocabulary(capacity=20, evict=1, on_evict=refuse)
    assert vocabulary.clock == 0
    first, second = st.Embedding(4, DIM, vocabulary=vocabulary), st.Embedding(4, DIM)
    optimizer = sgd(nn.ModuleList([first, second]))
    before = second.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        (first(ids(step)) + second(ids(0))).sum().backward()
        if step:
            with pytest.raises(RuntimeError, match="no"):
                optimizer.step()
        else:
            optimizer.step()
    assert torch.allclose(second.weight.detach()[0], before[0] - 0.4)
    assert vocabulary.clock == 4
    assert len(vocabulary) == 4


def test_functions_that_change_the_vocabulary_are_refused():
    module, vocabulary = made(2, evict="lru", on_evict=lambda *_: vocabulary.forget([0]))
    optimizer = sgd(module)
    trained(module, optimizer, 0, 1)
    with pytest.raises(InvalidValueError, match="within on_evict or evict"):
        module(ids(7))
    assert vocabulary.ids().tolist() == [0, 1]


@pytest.mark.parametrize("evict", [None, "lru"])
def test_a_table_that_cannot_grow(evict):
    module, vocabulary = made(2, max_capacity=100, evict=evict)
    trained(module, sgd(module), 1, 2)
    before = vocabulary.export()
    with mock.patch.object(Rows, "grow", side_effect=HostMemoryError("no room")):
        if evict is None:
            with pytest.raises(HostMemoryError, match="no room"):
                module(ids(3))
            assert all(torch.equal(*pair) for pair in zip(vocabulary.export(), before, strict=True))
        else:
            with pytest.warns(UserWarning, match="cannot grow"):
                module(ids(3))
            assert len(vocabulary) == 2
            # It is not tried again, which would warn.
            module(ids(4))
            assert vocabulary.max_capacity == 2


def test_bytes_are_those_of_rows_without_the_one_of_unseen_ids():
    module, vocabulary = made(max_capacity="160 B")
    row_bytes = module.table.nbytes // 5
    for num_bytes, most in ((10 * row_bytes, 9), (11 * row_bytes - 1, 9), (11 * row_bytes, 10), (3, 4)):
        vocabulary.max_capacity = f"{num_bytes} B"
        assert vocabulary.stats().max_capacity == most
    # Of two processes each may have half of them.
    assert most_rows("2000 B", 2, 1, 1, 100) == 10


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fill", "initial"),
    [
        (lambda w: nn.init.normal_(w, 1, 2), ("normal", 1.0, 2.0)),
        (lambda w: nn.init.uniform_(w, -1, 2), ("uniform", -1.0, 2.0)),
        (lambda w: nn.init.constant_(w, 3), 3.0),
        (nn.init.zeros_, 0.0),
        (nn.init.ones_, 1.0),
        (lambda w: w.data.normal_(0, 0.02), ("normal", 0.0, 0.02)),
        (lambda w: w.data.uniform_(-0.5, 0.5), ("uniform", -0.5, 0.5)),
        (lambda w: nn.init.xavier_uniform_(w), ("uniform", -(0.75**0.5), 0.75**0.5)),
        (lambda w: nn.init.trunc_normal_(w, std=0.02), ("normal", 0.0, 0.02)),
    ],
)
def test_functions_that_fill_the_weight_say_what_rows_begin_with(fill, initial):
    module, vocabulary = made()
    module(ids(5, 6))
    fill(module.weight)
    assert vocabulary.initial == (
        pytest.approx(initial) if not isinstance(initial, tuple) else (initial[0], *map(pytest.approx, initial[1:]))
    )
    known, rows = vocabulary.export()
    assert torch.equal(rows, vocabulary.initial_values(known.numpy(), DIM, torch.float32))


def test_a_conversion_to_a_dtype_without_the_values_that_rows_begin_with():
    module, _ = made(initial=1e6)
    module(ids(5, 6))
    with pytest.raises(InvalidValueError, match="ends at 65504"):
        module.half()
    assert module(ids(5)).dtype == torch.float32


# --- modules that share a weight --------------------------------------------------------------------------------------


def test_two_modules_of_one_weight():
    (first, vocabulary), (second, _) = made(module={"padding_idx": 9}), made(module={"padding_idx": 9})
    second.weight = first.weight
    second(ids(10, 9))
    assert second.vocabulary is vocabulary
    assert vocabulary.ids().tolist() == [10]
    assert torch.equal(first(ids(10)), second(ids(10)))
    dense = nn.Embedding(4, DIM)
    dense.weight = first.weight
    for call in ("dense(ids(1))", "dense.weight[1]", "dense.weight[np.int64(1)]", "dense.weight[ids(1)[0]]"):
        refusal = Refusal(call, "InvalidTypeError", "in the order in which ids came")
        check_refused(refusal, dense=dense, ids=ids, np=np)


# --- ids that are admitted after the step that follows their lookup: as if they were looked up again then -----------------


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:a step of:UserWarning")
@pytest.mark.parametrize("unseen", ["initial", "zeros", "row"])
@pytest.mark.parametrize(("admit", "capacity"), [(1, 300), (3, 300), (1, 6)])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("lookups_a_step", [1, 3])
def test_deferred(unseen, admit, capacity, idle, lookups_a_step):
    """With few rows those of the ids used longest ago are taken."""
    about = {"max_capacity": capacity, "admit": admit, "unseen": unseen, "evict": "lru", "seed": 1}
    ours, other = (made(4, module={"idle": idle}, deferred=deferred, **about)[0] for deferred in (True, False))
    opts = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (ours, other)]
    draw, unknown = torch.Generator().manual_seed(2), 0
    for step in range(25):
        batches = [(torch.rand(9, generator=draw) ** 2 * 60 + step).long() * -(2**57) for _ in range(lookups_a_step)]
        if capacity == 6:
            # Each three follow each other, so that nobody has to be chosen among equals.
            batches = [torch.arange(3 * (step // 2), 3 * (step // 2) + 3)] * lookups_a_step
        for batch in batches:
            outs = ours(batch), other.eval()(batch)
            assert torch.equal(*outs)
            for out in outs:
                (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
            unknown += int((other.vocabulary.rows(batch) < 0).sum())
        for opt in opts:
            opt.step()
            opt.zero_grad()
        for batch in batches:
            other.train()(batch)
        found, wanted = (dict(zip(*map(Tensor.tolist, it.vocabulary.export()), strict=True)) for it in (ours, other))
        rows = ours.vocabulary.rows(torch.cat(batches))
        assert (ours.vocabulary.state_dict()["last_use"][rows[rows >= 0]] == step).all()
        # A step of the other one takes rows for ids that may come next.
        assert found | wanted == found, step
        assert len(found) == len(wanted) or capacity == len(found) == 6
    stats, wanted = ours.vocabulary.stats(), other.vocabulary.stats()
    assert (stats.admitted, stats.lookups, stats.unseen) == (wanted.admitted, wanted.lookups / 2, unknown)
    assert (stats.evicted > 0) == (capacity == 6)


def test_rows_of_deferred_lookups_whose_gradient_is_to_come_stay():
    module, vocabulary = made(evict="lru", deferred=True)
    opt = sgd(module)
    vocabulary.update(torch.arange(4), torch.zeros(4, DIM))
    held = module(torch.arange(3))
    module(ids(7)).sum().backward()
    opt.step()
    assert sorted(vocabulary.ids().tolist()) == [0, 1, 2, 7]
    module(ids(8, 9)).sum().backward()
    with pytest.raises(HostMemoryError, match="2 new ids need rows"):
        opt.step()
    # The step was made, and those go as soon as they can.
    opt.zero_grad()
    take_step(opt, held.sum())
    assert vocabulary.clock == 3
    assert sorted(vocabulary.ids().tolist()) == [0, 1, 2, 7]


def test_ids_wait_for_a_number_of_lookups_at_most(monkeypatch):
    monkeypatch.setattr(room, "_MOST_WAITING", 3)
    module, vocabulary = made(20, deferred=True)
    batch = torch.zeros(1, dtype=torch.int64)
    for id in range(8):
        # The memory of a batch may be filled anew.
        module(batch.fill_(id))
        assert vocabulary.ids().tolist() == [*range(id - id % 3)]


def test_what_was_looked_up_is_settled_before_ids_are_forgotten_or_set():
    module, vocabulary = made(20, deferred=True)
    module(ids(3, 4))
    assert vocabulary.forget(ids(3)) == 1
    assert vocabulary.ids().tolist() == [4]
    module(ids(5, 6))
    vocabulary.update(ids(6), torch.ones(1, DIM))
    assert sorted(vocabulary.ids().tolist()) == [4, 5, 6]
