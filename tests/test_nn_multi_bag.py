"""``MultiEmbeddingBag`` against ``nn.EmbeddingBag`` modules, feature by feature: forms of ids, training, bad input."""

from types import SimpleNamespace

import pytest
import torch
from cases import take_step
from torch import Tensor, nn

import speedtransfer as st

SIZES, DIM = {"item": 30, "user": 11, "hour": 5}, 6
FEATURES = {"seen": "item", "who": "user", "bought": "item", "when": "hour"}
MODES = {"seen": "sum", "who": "mean", "bought": "max", "when": "sum"}
PADDING = {"item": 3, "user": None, "hour": -1}
LENGTHS = {"seen": [3, 0, 9, 1], "who": [1, 1, 1, 1], "bought": [0, 4, 2, 0], "when": [2, 0, 0, 5]}
MAKE = {"features": FEATURES, "mode": MODES, "padding_idx": PADDING}
ADAMW = lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)  # noqa: E731
Lists = dict[str, list[Tensor]]


def multi(seed=0, **options):
    torch.manual_seed(seed)
    return st.MultiEmbeddingBag(SIZES, DIM, **{**MAKE, **options})


class Dense(nn.ModuleDict):
    """The tables as ``nn.EmbeddingBag``; one that serves features of several modes takes each in turn."""

    def __init__(self, seed=0, padding_idx=PADDING, **options):
        torch.manual_seed(seed)
        super().__init__(
            {name: nn.EmbeddingBag(n, DIM, padding_idx=padding_idx[name], **options) for name, n in SIZES.items()}
        )

    def forward(self, bags, weights=None, modes=MODES):
        found = {}
        for name, table in FEATURES.items():
            self[table].mode = modes[name]
            found[name] = self[table](torch.cat(bags[name]), offsets_of(bags[name])[:-1], (weights or {}).get(name))
        return found


def offsets_of(bags):
    return torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)


def batch(seed=1, lengths=LENGTHS):
    draw = torch.Generator().manual_seed(seed)
    return {
        name: [torch.randint(SIZES[FEATURES[name]], (n,), generator=draw) for n in each]
        for name, each in lengths.items()
    }


def of_torchrec(values, offsets, keys=None, weights=None):
    """Return what has the methods of TorchRec's JaggedTensor, or with keys of its KeyedJaggedTensor."""
    parts = {"values": values, "offsets": offsets, "weights_or_none": weights, "lengths": offsets.diff()}
    parts |= {} if keys is None else {"keys": keys}
    return SimpleNamespace(**{name: lambda part=part: part for name, part in parts.items()})


def keyed(bags, weights=None, names=None):
    flat = [bag for name in names or bags for bag in bags[name]]
    return of_torchrec(torch.cat(flat), offsets_of(flat), [*(names or bags)], weights)


FORMS = {
    "pairs": lambda bags: {name: (torch.cat(each), offsets_of(each)[:-1]) for name, each in bags.items()},
    "int32": lambda bags: {n: (torch.cat(b).int(), offsets_of(b)[:-1].int()) for n, b in bags.items()},
    "a list": lambda bags: [(torch.cat(bags[name]), offsets_of(bags[name])[:-1].tolist()) for name in FEATURES],
    "nested": lambda bags: {n: torch.nested.nested_tensor(each, layout=torch.jagged) for n, each in bags.items()},
    "like JaggedTensor": lambda bags: {name: of_torchrec(torch.cat(b), offsets_of(b)) for name, b in bags.items()},
    "like KeyedJaggedTensor": keyed,
    "in another order": lambda bags: keyed(bags, names=[*reversed(FEATURES)]),
    "with ids after the last": lambda bags: of_torchrec(
        torch.cat([keyed(bags).values(), torch.tensor([1])]), keyed(bags).offsets(), [*bags]
    ),
}


def loss_of(found):
    parts = found.values() if isinstance(found, dict) else found
    return sum((part * torch.linspace(0.1, 1.5, part.numel()).view(part.shape)).square().sum() for part in parts)


def named(found):
    return found if isinstance(found, dict) else dict(zip(FEATURES, found, strict=True))


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("concatenate", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_as_torch(form, concatenate):
    ours, dense, bags = multi(dtype=torch.float64, concatenate=concatenate), Dense(dtype=torch.float64), batch()
    assert [*ours.state_dict()] == [*dense.state_dict()]
    found, wanted = ours(FORMS[form](bags)), dense(bags)
    found = named(found.split(DIM, 1) if concatenate else found)
    assert [*found] == [*FEATURES]
    assert_same(found, wanted)
    loss_of(found).backward()
    loss_of(wanted).backward()
    expected = torch.cat([module.weight.grad for module in dense.values()])
    torch.testing.assert_close(ours.weight.grad.to_dense(), expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        again = ours(FORMS[form](bags))
        assert_same(named(again.split(DIM, 1) if concatenate else again), wanted)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("modes", ["sum", "mean", "max", {**MODES, "bought": "mean"}], ids=str)
def test_many_ids(modes, dtype, weighed):
    """So many that their order is known, by which gradients are summed."""
    modes = modes if isinstance(modes, dict) else dict.fromkeys(FEATURES, modes)
    bags, dense = batch(3, {name: [100 * n for n in each] for name, each in LENGTHS.items()}), Dense(dtype=dtype)
    ours, weights = multi(dtype=dtype, mode=modes), {}
    for name, each in bags.items() if weighed else ():
        if modes[name] == "sum":
            weights[name] = torch.rand(sum(map(len, each)), dtype=dtype)
    found, wanted = ours(keyed(bags), weights), dense(bags, weights, modes)
    close = {torch.float64: 1e-14, torch.bfloat16: 0.05}[dtype]
    for name, part in wanted.items():
        torch.testing.assert_close(found[name], part, rtol=close, atol=close * float(part.detach().abs().max()))
    for each in (found, wanted):
        loss_of(each).backward(retain_graph=True)
    expected, grad = torch.cat([table.weight.grad for table in dense.values()]), ours.weight.grad.to_dense()
    torch.testing.assert_close(grad, expected, rtol=close, atol=close * float(expected.abs().max()))
    rows = ours.weight.detach()
    if dtype == torch.float64 and modes["bought"] != "max":
        # The gradient of the gradient, of what is linear in the rows and in what comes to the bags.
        some = torch.ones_like(found["seen"]).requires_grad_()
        (grad,) = torch.autograd.grad(found["seen"], ours.weight, some, create_graph=True)
        (back,) = torch.autograd.grad((grad * rows).sum(), some)
        torch.testing.assert_close(back, found["seen"])
        many = torch.autograd.grad(found["seen"], ours.weight, torch.stack([some, 2 * some]), is_grads_batched=True)
        torch.testing.assert_close(many[0][1], 2 * grad.detach())


@pytest.mark.parametrize("last", [False, True])
def test_dense_ids_and_columns(last):
    """Two-dimensional ids; pairs with the end of the last bag; no bags; no ids."""
    ours, dense = multi(include_last_offset=last), Dense()
    bags = batch(2, {name: [3, 3] for name in FEATURES})
    assert_same(ours({name: torch.stack(each) for name, each in bags.items()}), dense(bags))
    assert_same(ours({n: (torch.cat(b), offsets_of(b)[: None if last else -1]) for n, b in bags.items()}), dense(bags))
    none = batch(2, {name: [0, 0] for name in FEATURES})
    assert_same(ours({name: torch.empty(2, 0).long() for name in FEATURES}), dense(none))
    assert all(part.shape == (0, DIM) for part in ours({name: torch.empty(0, 2).long() for name in FEATURES}).values())
    columns = torch.stack([torch.stack(bags[name]) for name in FEATURES], 1) % 5
    by_column = ours(dict(zip(FEATURES, columns.unbind(1), strict=True)))
    assert torch.equal(ours(columns), torch.stack(list(by_column.values()), 1))
    assert torch.equal(ours(columns[..., 0]), ours(columns[..., :1]))
    weighed = multi(mode="sum")
    assert torch.equal(weighed(columns, torch.full(columns.shape, 2.0)), weighed(columns) * 2)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("make", [multi, lambda: st.MultiEmbedding(SIZES, DIM, padding_idx=PADDING)])
def test_vmap(make):
    ours = make()
    ids = {
        name: torch.arange(24).view(4, 2, 3) % SIZES[FEATURES.get(name, name)] for name in ours._feature_ids._features
    }
    each = [ours({name: part[i] for name, part in ids.items()}) for i in range(4)]
    for name, part in torch.func.vmap(ours)(ids).items():
        torch.testing.assert_close(part, torch.stack([found[name] for found in each]))


@pytest.mark.parametrize("given", ["with the ids", "beside", "of some", "a list", "with a ticket"])
def test_weights(given):
    bags, dense = batch(), Dense(dtype=torch.float64)
    ours = multi(dtype=torch.float64, mode={**MODES, "who": "sum", "bought": "sum"} if given != "of some" else MODES)
    draw = torch.Generator().manual_seed(3)
    weights = {
        name: torch.rand(sum(map(len, each)), generator=draw, dtype=torch.float64).requires_grad_()
        for name, each in bags.items()
        if given != "of some" or MODES[name] == "sum"
    }
    if given == "with the ids":
        found = ours(keyed(bags, torch.cat([weights[name] for name in bags])))
    elif given == "with a ticket":
        found = ours(ours.prefetch(keyed(bags)), weights)
    else:
        found = ours(FORMS["pairs"](bags), weights if given != "a list" else [weights[name] for name in FEATURES])
    found, wanted = named(found), dense(bags, weights, ours.modes)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    some = [*weights.values()]
    grads = [torch.autograd.grad(loss_of(each), some) for each in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"cache_rows": 4}, {"max_norm": 1.0}, {"mode": "sum"}], ids=str)
def test_trains_as_torch(options):
    """Exact idle rows, a table that has no gradient in some steps, and reading ahead in others."""
    both = {"dtype": torch.float64} | {name: value for name, value in options.items() if name != "cache_rows"}
    ours, dense = multi(**{**options, **both}), Dense(**both)
    opts = [ADAMW(module.parameters()) for module in (ours, dense)]
    for step in range(12):
        bags, ticket = batch(step), None
        if step % 3 == 1:
            ticket = ours.prefetch(keyed(bags))
        outs = ours(ticket or FORMS["nested"](bags)), dense(bags, modes=ours.modes)
        for found, opt in zip(outs, opts, strict=True):
            take_step(opt, loss_of([part for name, part in found.items() if step % 4 != 2 or FEATURES[name] != "user"]))
    for name, module in dense.items():
        torch.testing.assert_close(ours[name].weight.detach(), module.weight.detach(), rtol=0, atol=1e-12)


def test_training_under_another_default_device():
    lengths, found = {name: [100 * n for n in each] for name, each in LENGTHS.items()}, []
    given, weights = FORMS["pairs"](batch(lengths=lengths)), {"seen": torch.ones(sum(lengths["seen"]))}
    for device in ("meta", "cpu"):
        module = multi(mode={**MODES, "bought": "mean"})
        with torch.device(device):
            sum(part.sum() for part in module(given, weights).values()).backward()
            module({**given, "who": [[1, 2], [3, 4]]})
        found.append(module.weight.grad.to_dense())
    assert torch.equal(*found)


def test_from_modules_and_state_dicts():
    tables = nn.ModuleDict({"a": nn.EmbeddingBag(9, 4, mode="sum", padding_idx=2), "b": nn.EmbeddingBag(7, 4)})
    ours = st.MultiEmbeddingBag.from_modules(tables, features={"x": "a", "y": "b", "z": "a"})
    assert ours.modes == {"x": "sum", "y": "mean", "z": "sum"}
    assert ours["a"].padding_idx == 2
    ids = {name: torch.tensor([[1, 2, 5], [2, 2, 3]]) for name in "xyz"}
    for name, table in ours.features.items():
        assert torch.equal(ours(ids)[name], tables[table](ids[name]))
    assert str(ours.load_state_dict(tables.state_dict())) == "<All keys matched successfully>"
    tables.load_state_dict(ours.state_dict())


def test_compiled():
    ours, bags = multi(), FORMS["pairs"](batch())
    assert_same(torch.compile(ours, backend="eager")(bags), ours(bags))


def test_a_vocabulary():
    """Ids of any kind: what they had on the CPU as row numbers, once all are known."""
    ours = multi(padding_idx=None, vocabulary=st.Vocabulary())
    bags = batch()
    far = {name: [bag * 10**9 for bag in each] for name, each in bags.items()}
    opt = ADAMW(ours.parameters())
    for _ in range(3):
        take_step(opt, loss_of(ours(keyed(far))))
    dense = Dense(padding_idx=dict.fromkeys(SIZES))
    for name, table in dense.items():
        known = torch.arange(SIZES[name])
        table.weight.data.copy_(ours.eval()[name](known * 10**9))
    for name, part in dense(bags).items():
        torch.testing.assert_close(ours(keyed(far))[name], part)


PAIR = (torch.tensor([1, 2, 3]), torch.tensor([0, 1]))
JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)


def but(**parts):
    return {**dict.fromkeys(FEATURES, PAIR), **parts}


def keyed_at(*offsets, weights=None):
    return of_torchrec(PAIR[0], torch.tensor(offsets), [*FEATURES], weights)


REFUSED = [
    (lambda m: m(but(who=(PAIR[0], torch.tensor([0, 3, 1])))), r"offsets\[2\] of feature 'who' is 1 after 3"),
    (lambda m: m(but(who=(PAIR[0], torch.tensor([0, 4])))), "offsets of feature 'who' go to 4 but there are 3 ids"),
    (lambda m: m(but(who=(PAIR[0], torch.tensor([1, 2])))), r"offsets of feature 'who' begin with \[1\]"),
    (lambda m: m(but(who=torch.tensor([1, 2]))), r"the ids of feature 'who' are of shape \(2,\)"),
    (lambda m: m(but(seen=torch.tensor([[1, 30]]))), r"index\[1\] of feature 'seen of table item' is 30"),
    (lambda m: m(but(whose=PAIR)), "ids has 'whose', which is not a feature; did you mean 'who'"),
    (lambda m: m({"who": PAIR}), "ids has no 'seen', a feature of table 'item'"),
    (lambda m: m(PAIR[0]), r"ids has shape \(3,\) but must be \(bags, 4\)"),
    (lambda m: m(keyed_at(0, 1, 2, 3)), "ids has 4 offsets"),
    (lambda m: m(keyed_at(0, 1, 2, 3, 9)), "offsets of feature 'when' go to 9"),
    (lambda m: m(keyed_at(0, 2, 1, 3, 3)), r"offsets\[2\] of feature 'who' is 1 after 2"),
    (lambda m: m(keyed_at(0, 1, 2, 3, 3, weights=torch.ones(3))), "feature 'who' has weights but"),
    (lambda m: m(but(), {"seen": torch.ones(2)}), "feature 'seen' has 2 weights but 3 ids"),
    (lambda m: m(but(), {"seen": torch.ones(3).half()}), r"weights have dtype torch.float16 but .* torch.float32"),
    (lambda m: m(but(who=PAIR[0][None].T), {"who": torch.ones(1, 3)}), "weights of feature 'who' are in other bags"),
    (lambda m: m(but(), {"seen": JAGGED}), "weights of feature 'seen' are in other bags"),
    (lambda m: m(but(), {"seen": "half"}), "weights of feature 'seen' are a str that is no tensor"),
    (lambda m: m(but(who=torch.ones(2, 3).bool())), "the ids of feature 'who' are torch.bool"),
    (lambda m: m(but(), torch.ones(3)), r"per_sample_weights has shape \(3,\) but must be \(bags, 4\)"),
    (lambda m: m(but(who=PAIR[0][None].to_sparse())), "no tensor .its layout is torch.sparse_coo"),
    (lambda m: m(keyed_at(0, 1, 2, 3, 3, weights=torch.ones(2))), "ids has 2 weights but 3 values"),
    (lambda m: multi(features=["item"]), "but must be a mapping; pass the table of each"),
    (lambda m: multi(features={"x": "items"}), "feature 'x' is of 'items', which is not a table; did you mean 'item'"),
    (lambda m: multi(features={"x": "item", "y": "user"}), "table 'hour' serves no feature"),
    (lambda m: multi(mode={"who": "sum"}), "mode of feature 'seen' is None"),
    (lambda m: multi(concatenate=True)(but(when=(PAIR[0], [0]))), "feature 'when' has 1 bags but 'seen' has 2"),
]


@pytest.mark.parametrize(("use", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(use, message):
    ours = multi(max_norm=0.1)
    before = ours.table.torch().clone()
    with pytest.raises(st.errors.SpeedtransferError, match=message) as error:
        use(ours)
    assert "\n" not in str(error.value)
    assert torch.equal(ours.table.torch(), before)
