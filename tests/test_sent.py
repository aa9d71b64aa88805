"""What goes to other processes by ``torch.multiprocessing``: tables, as copies to be read; tensors over them do not."""

import copy
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing
from cases import take_step
from torch import nn
from torch.utils.data import DataLoader

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, OptimizerError

IDS = torch.tensor([1, 2])


TABLES = {
    "rows": lambda: st.Embedding(8, 3),
    "bfloat16": lambda: st.Embedding(8, 3, storage_dtype=torch.bfloat16),
    "vocabulary": lambda: st.Embedding(8, 3, vocabulary=st.Vocabulary()),
    "beside others": lambda: nn.Sequential(st.Embedding(8, 4), nn.Linear(4, 8)),
}


@pytest.mark.parametrize("name", TABLES)
def test_workers_that_start_anew_have_the_rows(name):
    torch.manual_seed(0)
    model, ids = TABLES[name]().eval().requires_grad_(False), [IDS, IDS + 1, IDS + 2]
    # The workers of the loader look them up.
    loader = DataLoader(ids, None, num_workers=1, collate_fn=model, multiprocessing_context="spawn")
    for each, rows in zip(ids, loader, strict=True):
        assert torch.equal(rows, model(each))


def arrived(model):
    return ForkingPickler.loads(ForkingPickler.dumps(model))


def test_a_copy_is_not_trained_without_a_word():
    model = arrived(st.Embedding(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    model(IDS).sum().backward()
    with pytest.raises(OptimizerError, match=r"came to this process as a copy, .* copy\.deepcopy\(model\)"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    own = copy.deepcopy(model)
    take_step(torch.optim.SGD(own.parameters(), lr=1.0), own(IDS).sum())
    assert torch.equal(own.weight[IDS], before[IDS] - 1)


def test_modules_that_share_a_table_still_do():
    model = nn.ModuleList([st.Embedding(8, 3), st.Embedding(8, 3)])
    model[1].weight = model[0].weight
    there = arrived(model)
    assert there[0].weight is there[1].weight
    assert torch.equal(there[1].weight, model[0].weight)


def test_a_vocabulary_beside_its_module_still_is_that_of_it():
    emb = st.Embedding(8, 3, vocabulary=st.Vocabulary())
    emb(IDS * 10**12)
    words, there = arrived((emb.vocabulary, emb))
    assert there.vocabulary is words
    assert torch.equal(words.rows(IDS * 10**12), emb.vocabulary.rows(IDS * 10**12))


VIEWS = {
    "state dict": lambda emb, optimizer: emb.state_dict(),
    "state of an optimizer": lambda emb, optimizer: optimizer.state_dict(),
    "detached": lambda emb, optimizer: emb.weight.detach(),
    "table": lambda emb, optimizer: emb.table.torch(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_tensors_over_the_rows_are_refused(name):
    emb = st.Embedding(8, 3)
    optimizer = torch.optim.Adam(emb.parameters())
    take_step(optimizer, emb(IDS).sum())
    with pytest.raises(InvalidTypeError, match=r"a tensor over the rows of weight, .* share a copy \(\.clone\(\)\)"):
        ForkingPickler.dumps(VIEWS[name](emb, optimizer))
    view = emb.weight.detach()
    with pytest.raises(InvalidTypeError, match="memory that processes share"):
        view.share_memory_()
    view[5] = 7
    assert (emb(torch.tensor([5])) == 7).all()
    view.clone().share_memory_()
