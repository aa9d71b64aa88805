"""``MultiEmbedding`` with a vocabulary, against a table with a vocabulary for each feature, and one for all."""

import copy

import pytest
import torch
from cases import take_step
from optimizer_cases import case_named
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError

SIZES = {"user": 30, "item": 40, "hour": 20}
PADDING = {"user": -4, "item": None, "hour": 0}
# Which features have a gradient in each step.
STEPS = ["ui", "uih", "i", "", "uh", "uih", "h", "ui", "uih", "u", "uih", "ih"]
NAMES = {name[0]: name for name in SIZES}
ADAMW = case_named("adamw").make


def multi(sizes=SIZES, idle="auto", **about):
    words = st.Vocabulary(seed=1, **about)
    return st.MultiEmbedding(sizes, 4, PADDING, vocabulary=words, idle=idle, dtype=torch.float64)


class Each(nn.ModuleDict):
    """A module with a vocabulary for each feature, whose ids are those that the vocabulary of `multi` has."""

    def __init__(self, like, idle="auto"):
        super().__init__()
        self.keys_of = like.vocabulary_ids
        for name, size in SIZES.items():
            padding = None if PADDING[name] is None else self.keys_of(name, PADDING[name])
            known = st.Vocabulary(seed=1)
            self[name] = st.Embedding(size, 4, padding, dtype=torch.float64, vocabulary=known, idle=idle)

    def forward(self, ids):
        return {name: self[name](self.keys_of(name, part)) for name, part in ids.items()}


def ids_of(step):
    """Ids of each feature: new ones come in every step, the same of several features, of any size, and padding."""
    draw = torch.Generator().manual_seed(step)
    ids = {name: torch.randint(-4, 3 + step, (2, 3), generator=draw) for name in SIZES}
    ids["item"] = ids["item"] * (1 << 54)
    return ids


def loss_of(rows, features):
    some = [NAMES[f] for f in features]
    return sum(((rows[n] - 0.3).square() * torch.arange(4)).sum() * len(n) for n in some if n in rows)


def train(embs, opt, steps, together=False, before=lambda embs, step: None):
    for step in steps:
        opt.zero_grad()
        before(embs, step)
        ids, features = ids_of(step), STEPS[step]
        if not together:
            ids = {NAMES[f]: ids[NAMES[f]] for f in features}
        if features:
            loss_of(embs(ids), features).backward()
        opt.step()


def rows_of(embs):
    """All ids of the vocabularies, sorted, and their rows."""
    pairs = [emb.vocabulary.export() for emb in ([embs] if isinstance(embs, st.MultiEmbedding) else embs.values())]
    ids, rows = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return ids.sort()[0], rows[ids.argsort()]


def assert_same(ours, theirs):
    (ids, rows), (wanted, expected) = rows_of(ours), rows_of(theirs)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-12)


# --- as modules with a vocabulary each ------------------------------------------------------------------------------------


def forget(embs, step):
    """Rows of ids that are forgotten become those of other features."""
    if step not in (4, 7, 9):
        return
    for name in ("user", "hour"):
        emb = embs if isinstance(embs, st.MultiEmbedding) else embs[name]
        of = embs.vocabulary_ids if isinstance(embs, st.MultiEmbedding) else embs.keys_of
        emb.vocabulary.forget(of(name, torch.arange(step - 4, step)))


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-weight-decay"])
def test_a_step_leaves_features_out_as_modules_of_their_own(name, idle, together, grows):
    """Also where ids are forgotten, and the table grows."""
    ours = multi(dict.fromkeys(SIZES, 2), idle=idle, max_capacity=1000) if grows else multi(idle=idle)
    theirs = Each(ours, idle)
    for embs in (ours, theirs):
        steps, before = range(len(STEPS)), forget if grows else lambda embs, step: None
        train(embs, case_named(name).make(embs.parameters()), steps, together, before)
    assert len(ours.vocabulary) > 30
    assert_same(ours, theirs)
    ours.eval(), theirs.eval()
    for key, rows in theirs(ids_of(99)).items():
        torch.testing.assert_close(ours[key](ids_of(99)[key]), rows, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", ["state dicts", "checkpoint", "smaller table"])
def test_training_goes_on_from_what_was_saved(way, tmp_path):
    ours = multi(idle="exact")
    opt = ADAMW(ours.parameters())
    theirs = Each(ours, "exact")
    train(theirs, ADAMW(theirs.parameters()), range(len(STEPS)))
    train(ours, opt, range(6))
    # One that has met other ids.
    made = multi({"user": 1, "item": 1, "hour": 30}, max_capacity=1000) if way == "smaller table" else multi()
    fresh = ADAMW(made.parameters())
    train(made, fresh, [8, 2])
    if way == "checkpoint":
        st.save_checkpoint(tmp_path, ours, opt)
        st.load_checkpoint(tmp_path, made, fresh)
    else:
        made.load_state_dict(copy.deepcopy(ours.state_dict()))
        fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(made, fresh, range(6, len(STEPS)))
    assert_same(made, theirs)
    assert made.vocabulary.features == tuple(SIZES)


# --- as one module with the same vocabulary --------------------------------------------------------------------------------

FORMS = {
    "columns": lambda m, ids: m(torch.stack(list(ids.values()), -1)).unbind(-2),
    "list": lambda m, ids: m(list(ids.values())),
    "names": lambda m, ids: m(dict(reversed(ids.items()))).values(),
    "one by one": lambda m, ids: [m[name](part) for name, part in ids.items()],
    "ticket": lambda m, ids: m(m.prefetch(list(ids.values()))),
    "tickets of features": lambda m, ids: [m[name](m[name].prefetch(part)) for name, part in ids.items()],
}
ABOUT = {
    "evict": {"evict": "lru", "max_capacity": 40},
    "admit": {"admit": 2, "unseen": "zeros", "max_capacity": 1000},
    "row": {"admit": 3, "unseen": "row", "max_capacity": 1000},
    "deferred": {"deferred": True, "evict": "lfu", "max_capacity": 1000},
    "int8": {"storage_dtype": torch.int8, "max_capacity": 1000},
    "split24": {"storage_dtype": "split24", "max_capacity": 1000},
    "max_norm": {"max_norm": 1.0, "max_capacity": 1000},
}


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("about", ABOUT)
def test_the_vocabulary_does_what_it_says(about, form):
    """The rows of ids, one after the other, as one table that is looked up by the ids of the vocabulary."""
    settings = dict(ABOUT[about])
    options = {name: settings.pop(name) for name in ("storage_dtype", "max_norm") if name in settings}
    torch.manual_seed(0)
    ours = st.MultiEmbedding(
        dict.fromkeys(SIZES, 10), 4, PADDING, **options, vocabulary=st.Vocabulary(seed=1, **settings)
    )
    torch.manual_seed(0)
    one = st.Embedding(30, 4, 0, **options, vocabulary=st.Vocabulary(seed=1, **settings))
    opts = [ADAMW(emb.parameters()) for emb in (ours, one)]
    by_name = list(reversed(SIZES)) if form == "names" else list(SIZES)
    for step in range(12):
        ids = {name: ids_of(step)[name].reshape(-1) for name in SIZES}
        found = torch.stack(list(FORMS[form](ours, ids)))
        keys = torch.stack([ours.vocabulary_ids(name, ids[name]) for name in by_name])
        if form == "columns":
            wanted = one(keys.T).transpose(0, 1)
        else:
            wanted = one(keys) if form in ("list", "names", "ticket") else torch.stack([*map(one, keys)])
        assert torch.equal(found, wanted)
        for rows, opt in ((found, opts[0]), (wanted, opts[1])):
            take_step(opt, (rows * torch.arange(4)).square().sum())
    assert ours.vocabulary.stats() == one.vocabulary.stats()
    assert all(torch.equal(a, b) for a, b in zip(ours.vocabulary.export(), one.vocabulary.export(), strict=True))
    with torch.no_grad():
        assert torch.equal(ours.eval()["item"](ids["item"]), one.eval()(ours.vocabulary_ids("item", ids["item"])))


# --- ids ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 26])
def test_no_two_ids_share_one_of_the_vocabulary(count):
    emb = st.MultiEmbedding([4] * count, 2, vocabulary=st.Vocabulary())
    bits = 64 - count.bit_length()
    ids = torch.tensor([0, 1, -1, 7, (1 << bits - 1) - 1, -(1 << bits - 1)])
    keys = torch.stack([emb.vocabulary_ids(number, ids) for number in range(count)])
    assert len(keys.unique()) == keys.numel()
    assert not (keys == 0).any()
    numbers, found = emb.feature_ids(keys)
    assert torch.equal(numbers, torch.arange(count)[:, None].expand_as(keys))
    assert torch.equal(found, ids.expand_as(keys))
    for bad in (1 << bits - 1, -(1 << bits - 1) - 1):
        wrong = torch.zeros(3, count, dtype=torch.int64)
        wrong[1, -1] = bad
        for look_up in (emb, lambda ids: emb(list(ids.T)), lambda ids: emb[-1](ids[:, -1]), emb.prefetch, emb.activate):
            with pytest.raises(RowIndexError, match=rf"{bad} but .* {bits} bits .*ids >> {64 - bits}"):
                look_up(wrong)
    assert len(emb.vocabulary) == 0
    assert st.hash_ids(["a", "b"]).bitwise_right_shift(64 - bits).abs().max() < 1 << bits - 1


def test_ids_are_any_integers_and_padding_is_one_row():
    emb = multi(idle="lazy")
    rows = emb({"user": torch.tensor([7], dtype=torch.uint8), "item": [2**64 - 1], "hour": torch.tensor(3)})
    assert torch.equal(rows["item"], emb["item"]([-1]))
    assert torch.equal(rows["hour"], emb["hour"](3))
    with pytest.raises(InvalidTypeError, match="integers"):
        emb({"user": torch.ones(2)})
    opt = ADAMW(emb.parameters())
    for _ in range(2):
        rows = emb({"user": torch.tensor([-4, 3]), "hour": torch.tensor([0, 5]), "item": torch.tensor([-4])})
        assert not rows["user"][0].any()
        assert not rows["hour"][0].any()
        assert rows["item"].any()
        take_step(opt, sum(part.sum() for part in rows.values()))
    assert emb.vocabulary.rows(emb.vocabulary_ids("user", [-4])).tolist() == [1]
    numbers, ids = emb.feature_ids(emb.vocabulary_ids("hour", [0, 5]))
    assert (numbers.tolist(), ids.tolist()) == ([-1, 2], [0, 5])


# --- what is refused ------------------------------------------------------------------------------------------------------


def small(sizes=(3, 4), known=True):
    return st.MultiEmbedding(sizes, 2, vocabulary=st.Vocabulary() if known else None)


REFUSED = {
    "no weight of its own": lambda emb: emb[0].weight,
    "has a vocabulary": st.to_dense,
    "cannot be written as a whole": lambda emb: emb.weight.data.mul_(2),
    "with the same features": lambda emb: emb.load_state_dict(small([3, 4, 5]).state_dict()),
    "belongs to another module": lambda emb: st.MultiEmbedding([3], 2, vocabulary=emb.vocabulary),
    "vocabulary.update": lambda emb: st.MultiEmbedding.from_modules([nn.Embedding(3, 2)], vocabulary=st.Vocabulary()),
    "padding_idx of feature '1'": lambda emb: st.MultiEmbedding([3, 4], 2, [None, 2**62], vocabulary=st.Vocabulary()),
    r"Missing.*0\.weight": lambda emb: small(known=False).load_state_dict(emb.state_dict()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    emb = small()
    emb(torch.tensor([[1, 2], [3, 4]]))
    before = emb.vocabulary.export()
    with pytest.raises((InvalidTypeError, InvalidValueError, RowIndexError, RuntimeError), match=what):
        REFUSED[what](emb)
    assert all(torch.equal(a, b) for a, b in zip(before, emb.vocabulary.export(), strict=True))
