"""Batches whose rows are read ahead: the same batches, the same numbers, the same state, the same errors."""

import itertools
import traceback

import pytest
import torch
from cases import take_step
from torch.utils.data import DataLoader, TensorDataset

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn import ticket as tickets

ROWS = 40
IDS = torch.randint(ROWS, (30, 3), generator=torch.Generator().manual_seed(0))
BATCHES = list(IDS.split(5))


@pytest.fixture
def emb():
    torch.manual_seed(0)
    return st.Embedding(ROWS, 4, memory="pageable", device="cpu")


class Stateful:
    """Counts its batches, as loaders do that can be resumed."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        begin, self.at = self.at, 0
        for at in range(begin, 6):
            self.at = at + 1
            yield BATCHES[at]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("depth", [1, 2, 20])
def test_batches_are_the_same_and_their_rows_are_there(emb, depth):
    for found, expected in zip(st.prefetch(BATCHES, lambda ids: {emb: ids}, depth), BATCHES, strict=True):
        assert torch.equal(found, expected)
        waiting = len(tickets._open[emb._handle])
        assert torch.equal(emb(found), emb.table.torch()[found])
        assert len(tickets._open[emb._handle]) == waiting - 1
    assert not tickets._open[emb._handle]


def drawing(shuffle, each):
    """A loader that draws from torch's default generator: an order before its first batch, or for each batch and its end."""
    order = torch.randperm(len(IDS)) if shuffle else torch.arange(len(IDS))
    for part in order.split(5):
        yield (IDS[part] + torch.randint(ROWS, (1,)) if each else IDS[part]) % ROWS
    if each:
        torch.rand(1)


def trained(ahead, make, drops):
    torch.manual_seed(0)
    emb = st.Embedding(ROWS, 4, memory="pageable", device="cpu")
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.1)
    for epoch in range(3):
        loader = make()
        for number, ids in enumerate(st.prefetch(loader, lambda ids: {emb: ids}) if ahead else loader):
            rate = 0.5 if drops(epoch, number) else 0.0
            take_step(optimizer, torch.nn.functional.dropout(emb(ids), rate).sum())
            if epoch == 1 and number == 2:
                break
    return torch.cat([emb.weight.detach().flatten(), torch.rand(1)])


LOADERS = {
    "in order": lambda: drawing(False, False),
    "a seed": lambda: drawing(True, False),
    "for each batch": lambda: drawing(True, True),
    # A seed for its workers, and one for its sampler.
    "DataLoader": lambda: DataLoader(IDS, batch_size=4, shuffle=True),
}


@pytest.mark.parametrize(
    ("name", "dropout"), [(name, False) for name in LOADERS] + [(n, True) for n in LOADERS if "each" not in n]
)
def test_a_loader_that_draws(name, dropout):
    ahead, plain = (trained(early, LOADERS[name], lambda epoch, number: dropout) for early in (True, False))
    assert torch.equal(ahead, plain)


def test_a_loader_and_a_model_that_draw_in_turn():
    always = LOADERS["for each batch"], lambda epoch, number: True
    with pytest.warns(UserWarning, match="draws from torch's default generator .* so batches are no longer read ahead"):
        ahead = trained(True, *always)
    assert torch.equal(ahead, trained(False, *always))
    with pytest.warns(UserWarning, match="the 2 that were drawn before the loop began to draw have other numbers"):
        trained(True, LOADERS["for each batch"], lambda epoch, number: epoch == 0 and number == 2)


@pytest.mark.parametrize("taken", [0, 3, 6])
def test_the_state_is_that_after_the_batches_taken(emb, taken):
    plain, ahead = Stateful(), st.prefetch(Stateful(), lambda ids: {emb: ids})
    assert ahead.state_dict() == plain.state_dict()
    sources = iter(plain), iter(ahead)
    for _ in range(taken):
        for source in sources:
            next(source)
    assert ahead.state_dict() == plain.state_dict()
    again = st.prefetch(Stateful(), lambda ids: {emb: ids})
    again.load_state_dict(ahead.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again, BATCHES[taken:], strict=True))


def test_loaders_without_state_stay_without(emb):
    """Trainers ask for the state of every loader that has a `state_dict`, whatever that raises."""
    plain = st.prefetch(DataLoader(TensorDataset(IDS)), lambda batch: {emb: batch[0]})
    assert (len(plain), plain.batch_size) == (30, 1)
    assert not hasattr(plain, "state_dict")


def failing():
    yield from BATCHES[:2]
    raise OSError("no more")


def test_an_error_comes_where_its_batch_would_with_its_traceback(emb):
    source = iter(st.prefetch(failing(), lambda ids: {emb: ids}, depth=5))
    assert [len(next(source)) for _ in range(2)] == [5, 5]
    with pytest.raises(OSError, match="no more") as caught:
        next(source)
    assert "failing" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_wrong_arguments_are_refused(emb):
    with pytest.raises(InvalidTypeError, match="ids_of is 3"):
        st.prefetch([], 3)
    with pytest.raises(InvalidValueError, match="depth"):
        st.prefetch([], lambda ids: {}, depth=0)
    with pytest.raises(InvalidTypeError, match=r"loader is 3 \(int\) but must be an iterable of batches"):
        st.prefetch(3, lambda ids: {emb: ids})
    for pairs in ((emb, torch.tensor([1])), "ids"):
        with pytest.raises(InvalidTypeError, match="must return pairs of a module and its ids"):
            list(st.prefetch([1], lambda batch, pairs=pairs: pairs))
    with pytest.raises(InvalidTypeError, match="no rows to read ahead"):
        list(st.prefetch([1], lambda batch: {torch.nn.Embedding(3, 3): batch}))


def test_rows_that_no_lookup_uses(emb):
    single = [torch.tensor([number]) for number in range(9)]
    with pytest.warns(UserWarning, match="the rows of 8 batches were read ahead and no lookup has used them"):
        assert len(list(st.prefetch(single, lambda ids: {emb: ids}))) == 9
    for number, ids in enumerate(st.prefetch(single * 2, lambda ids: {emb: ids})):
        if number == 3:
            emb(ids)


@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("view", [torch.Tensor.detach, torch.Tensor.numpy])
def test_a_loader_that_fills_one_buffer_anew(emb, view, hashes):
    module = st.NgramEmbedding(st.NgramHash(rows=50, vocab_size=20), 4) if hashes else emb

    def loader(change):
        buffer = torch.zeros(1, 3, dtype=torch.int64)
        for _ in range(5):
            buffer = change(buffer)
            yield view(buffer)

    assert len(list(st.prefetch(loader(lambda buffer: buffer + 1), lambda ids: {module: ids}))) == 5
    with pytest.raises(InvalidValueError, match="one buffer anew"):
        next(iter(st.prefetch(loader(lambda buffer: buffer.add_(1)), lambda ids: {module: ids})))


@pytest.mark.parametrize("wrap", [iter, lambda given: st.equal_steps(iter(given))])
def test_an_iterator_may_be_taken_in_parts(emb, wrap):
    seen, loader = [], st.prefetch(wrap([torch.tensor([n]) for n in range(10)]), lambda ids: {emb: ids})
    for _ in range(4):
        for number, ids in enumerate(loader):
            seen += ids.tolist()
            emb(ids)
            if number == 2:
                break
    assert seen == list(range(10))
    loader = st.prefetch(failing(), lambda ids: {emb: ids})
    assert [len([*itertools.islice(loader, 1)]) for _ in range(2)] == [1, 1]
    with pytest.raises(OSError, match="no more"):
        next(iter(loader))


class Walk:
    """An iterator with one state, which it returns itself."""

    def __init__(self):
        self.state, self.step = {"at": 0}, 1

    def __iter__(self):
        return self

    def __next__(self):
        at = self.state["at"]
        if at >= len(BATCHES):
            raise StopIteration
        self.state["at"] = at + self.step
        return BATCHES[at]

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


def test_an_iterator_of_its_own_goes_where_it_is_told(emb):
    loader = st.prefetch(Walk(), lambda ids: {emb: ids})
    batches = iter(loader)
    assert [next(batches) is batch for batch in BATCHES[:3]] == [True] * 3
    assert loader.state_dict() == {"at": 3}
    loader.load_state_dict({"at": 1})
    assert next(iter(loader)) is BATCHES[1]
    loader.load_state_dict({"at": 0})
    loader.step = 2
    assert [batch is wanted for batch, wanted in zip(loader, BATCHES[::2], strict=True)] == [True] * 3


def test_iter_alone_begins_nothing(emb):
    """Frameworks call it to see whether a loader can be iterated over; one with workers would draw its order."""
    loader = DataLoader(IDS, 5, shuffle=True, generator=torch.Generator().manual_seed(0))
    before = loader.generator.get_state()
    iter(st.prefetch(loader, lambda ids: {emb: ids}))
    assert torch.equal(loader.generator.get_state(), before)
