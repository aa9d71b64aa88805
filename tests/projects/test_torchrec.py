"""TorchRec's collections, its DLRM and DeepFM, on its own CPU modules and on ours."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import speedtransfer as st
from projects.data import FIELDS, ITEMS, USERS, clicks, interactions
from projects.pairs import Outcome, classes, compare, hand_over, in_both_ways, stepped
from speedtransfer.nn.ticket import open_tickets

torchrec = pytest.importorskip("torchrec", reason="TorchRec is not installed: make projects")

DIM = 8
BATCH = 100


def table(name, rows, features=None, dim=DIM, pooling="SUM"):
    given = {"name": name, "num_embeddings": rows, "embedding_dim": dim, "feature_names": features or [name]}
    return torchrec.EmbeddingBagConfig(**given, pooling=torchrec.PoolingType[pooling])


def batches(epochs=2):
    """Clicks, each with one value of every field, and with some of the values of the first field that came before."""
    from torchrec.datasets.utils import Batch

    fields, numbers, clicked = (torch.tensor(part) for part in clicks())
    found = []
    for epoch in range(epochs):
        order = torch.randperm(len(fields), generator=torch.Generator().manual_seed(epoch))
        for at in order.split(BATCH):
            lengths = (fields[at, 1] % 4).int()
            before = torch.cat(
                [fields[max(i - n, 0) : i, 0] for i, n in zip(at.tolist(), lengths.tolist(), strict=True)]
            )
            lengths = torch.minimum(lengths, at.int())
            keys = ["before", *(f"field{k}" for k in range(len(FIELDS)))]
            values = torch.cat([before, *fields[at].unbind(1)])
            ones = torch.ones(len(at) * len(FIELDS), dtype=torch.int32)
            keyed = torchrec.KeyedJaggedTensor(keys=keys, values=values, lengths=torch.cat([lengths, ones]))
            found.append(Batch(numbers[at].to(torch.get_default_dtype()), keyed, clicked[at]))
    return found


def fields_of(pooling):
    named = [table(f"t{k}", size, [f"field{k}"], pooling=pooling) for k, size in enumerate(FIELDS)]
    named[0].feature_names.append("before")
    return torchrec.EmbeddingBagCollection(tables=named)


def train(model, loss_of, batches, make):
    return Outcome({"loss": stepped(make(model.parameters()), map(loss_of, batches))}, {}, model)


def ready(model, way):
    return hand_over(model.to(torch.get_default_dtype()), way)


def dlrm(way):
    from torchrec.models.dlrm import DLRM, DLRMTrain

    torch.manual_seed(1)
    with classes(way, "torchrec"):
        model = DLRMTrain(DLRM(fields_of("SUM"), 2, [16, DIM], [16, 1]))
    ready(model, way)
    return train(model, lambda batch: model(batch)[0], batches(), lambda params: torch.optim.Adagrad(params, lr=0.1))


def deepfm(way):
    from torchrec.models.deepfm import SimpleDeepFMNN

    torch.manual_seed(1)
    with classes(way, "torchrec"):
        model = SimpleDeepFMNN(2, fields_of("MEAN"), hidden_layer_size=16, deep_fm_dimension=5)
    ready(model, way)

    def loss_of(batch):
        found = model(batch.dense_features, batch.sparse_features).squeeze(1)
        return nn.functional.binary_cross_entropy(found, batch.labels.to(found.dtype))

    return train(model, loss_of, batches(), lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1))


class Sequences(nn.Module):
    """Items from those before, by an ``EmbeddingCollection``."""

    def __init__(self):
        super().__init__()
        named = [torchrec.EmbeddingConfig(**ITEM, feature_names=["past", "next"]), torchrec.EmbeddingConfig(**WHO)]
        self.rows = torchrec.EmbeddingCollection(tables=named, need_indices=True)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, keyed):
        found = self.rows(keyed)
        past = nn.utils.rnn.pad_sequence(found["past"].to_dense(), batch_first=True)
        state = self.gru(past)[1][0] + found["user"].values()
        assert torch.equal(found["next"].weights(), keyed["next"].values())
        return (state * found["next"].values()).sum(1)


ITEM = {"name": "item", "num_embeddings": ITEMS, "embedding_dim": DIM}
WHO = {"name": "user", "num_embeddings": USERS, "embedding_dim": DIM, "feature_names": ["user"]}


def sequences(way):
    torch.manual_seed(1)
    with classes(way, "torchrec"):
        model = Sequences()
    ready(model, way)
    data = interactions()
    starts = np.searchsorted(data.user, np.arange(USERS))

    def loss_of(step):
        lengths = [1 + (user + step) % 5 for user in range(USERS)]
        past = np.concatenate([data.item[s : s + n] for s, n in zip(starts, lengths, strict=True)])
        after = data.item[starts + np.array(lengths)]
        values = torch.tensor(np.concatenate([past, after, np.arange(USERS)]))
        one = torch.tensor([*lengths, *[1] * (2 * USERS)], dtype=torch.int32)
        return -nn.functional.logsigmoid(
            model(torchrec.KeyedJaggedTensor(["past", "next", "user"], values, lengths=one))
        ).mean()

    return train(model, loss_of, [*range(8)], lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))


RUNS = {"DLRM": dlrm, "DeepFM": deepfm, "sequences": sequences}


@pytest.mark.slow
@in_both_ways
@pytest.mark.parametrize("run", RUNS)
def test_torchrec(run, way, double):
    compare(RUNS[run], way, double)


# --- what a collection does -----------------------------------------------------------------------------------------------


def collection(weighted=False, dims=(4, 4)):
    """Tables that serve two features each, of which one is of both."""
    torch.manual_seed(0)
    tables = [table("t1", 10, ["a", "c"], dims[0]), table("t2", 7, ["b", "c"], dims[1], "SUM" if weighted else "MEAN")]
    return torchrec.EmbeddingBagCollection(tables=tables, is_weighted=weighted)


def keyed(weights=None):
    """With another feature too, and in another order."""
    values = torch.tensor([1, 2, 3, 0, 0, 1, 2, 4, 5, 6, 3])
    lengths = torch.tensor([1, 2, 1, 1, 0, 2, 2, 2])
    return torchrec.KeyedJaggedTensor(["b", "other", "a", "c"], values, weights, lengths)


@pytest.mark.parametrize("dims", [(4, 4), (4, 6)], ids=["one table", "tables of their own"])
@pytest.mark.parametrize("weighted", [False, True])
def test_forward_and_copies(weighted, dims):
    ids = keyed(torch.rand(11) if weighted else None)
    theirs, ours = collection(weighted, dims), collection(weighted, dims)
    report = st.replace_embeddings(ours, 0)
    one = dims[0] == dims[1]
    assert report == ([""] if one else ["embedding_bags.t1", "embedding_bags.t2"])
    assert ("of 2 tables, 17 rows" if one else "apart from the others beside it, as embedding_dim of 't2'") in str(
        report
    )
    assert isinstance(ours, torchrec.EmbeddingBagCollection)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    wanted = theirs(ids)
    for made in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), st.to_dense(ours)):
        found = made(ids)
        assert (found.keys(), found.offset_per_key()) == (wanted.keys(), wanted.offset_per_key())
        assert torch.equal(found.values(), wanted.values())
    assert st.replace_embeddings(ours, 0) == []
    ours.load_state_dict(theirs.state_dict())
    torch.manual_seed(1)
    ours.reset_parameters()
    torch.manual_seed(1)
    theirs.reset_parameters()
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("weighted", [False, True])
def test_read_ahead_by_a_loader(weighted):
    """The lookups of both kinds find what was read ahead for them, of a collection among others."""
    bags, given = collection(weighted), [keyed(torch.rand(11)) for _ in range(4)]
    rows = torchrec.EmbeddingCollection(tables=[torchrec.EmbeddingConfig(**ITEM, feature_names=["a", "c"])])
    model = nn.ModuleDict({"bags": bags, "rows": rows})
    plain = copy.deepcopy(model)
    st.replace_embeddings(model, 0)
    for ids in st.prefetch(given, lambda ids: {bags: ids, rows: ids}):
        tables = bags.embedding_bags, rows.embeddings
        waiting = [open_tickets(table._handle) for table in tables]
        assert torch.equal(bags(ids).values(), plain["bags"](ids).values())
        assert all(torch.equal(part.values(), plain["rows"](ids)[name].values()) for name, part in rows(ids).items())
        for table, before in zip(tables, waiting, strict=True):
            assert len(open_tickets(table._handle)) < len(before)


def test_variable_batches_and_inverse_indices():
    strides = [[2], [3]]
    given = {"keys": ["b", "c"], "values": torch.tensor([1, 2, 3, 4, 5, 6]), "lengths": torch.tensor([1, 2, 0, 2, 1])}
    inverse = (["b", "c"], torch.tensor([[0, 1, 0, 1], [2, 1, 0, 0]]))
    ids = torchrec.KeyedJaggedTensor(**given, stride_per_key_per_rank=strides, inverse_indices=inverse)
    made = [torchrec.EmbeddingBagCollection(tables=[table("t2", 7, ["b", "c"])]) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    st.replace_embeddings(made[1], 0)
    assert torch.equal(made[1](ids).values(), made[0](ids).values())


def test_which_are_replaced():
    model = nn.ModuleDict({"one": collection(), "two": collection()})
    assert st.replace_embeddings(model, 18) == []
    assert st.replace_embeddings(model, 0, names="two") == ["two"]
    assert st.replace_embeddings(model, 0, names="*t1") == ["one.embedding_bags.t1"]
    assert st.summary(model).tables[-1].names == ("two.embedding_bags",)


def test_an_optimizer_made_before_raises():
    model = collection()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    st.replace_embeddings(model, 0)
    model(keyed()).values().sum().backward()
    with pytest.raises(TypeError, match=r"t1\.weight is part of one parameter"):
        opt.step()
