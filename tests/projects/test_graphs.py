"""Graphs: torch-geometric's Node2Vec as in its examples; knowledge graphs by PyKEEN: test_knowledge_graph.py."""

import types

import pytest
import torch

from projects.data import ITEMS, edges
from projects.pairs import Outcome, classes, compare, hand_over, in_both_ways, stepped

pytestmark = pytest.mark.slow


@pytest.fixture
def walks(monkeypatch):
    """Node2Vec takes its walks from pyg-lib: plain ones of our own where that is not installed."""
    node2vec = pytest.importorskip(
        "torch_geometric.nn.models.node2vec", reason="torch-geometric is not installed: make projects"
    )
    if not node2vec.WITH_PYG_LIB:
        monkeypatch.setattr(node2vec, "WITH_PYG_LIB", True)
        monkeypatch.setattr(torch.ops, "pyg", types.SimpleNamespace(random_walk=random_walk), raising=False)


def random_walk(rowptr, col, start, length, p, q):
    path = [start]
    for _ in range(length):
        first, last = rowptr[path[-1]], rowptr[path[-1] + 1]
        path.append(col[first + (torch.rand(len(start)) * (last - first)).long()])
    return torch.stack(path, 1)


def node2vec(way, optimizer, sparse):
    from torch_geometric.nn import Node2Vec

    torch.manual_seed(0)
    with classes(way, "torch_geometric"):
        model = Node2Vec(
            torch.tensor(edges()), embedding_dim=8, walk_length=6, context_size=4, walks_per_node=2, sparse=sparse
        )
    hand_over(model, way)
    opt = getattr(torch.optim, optimizer)(list(model.parameters()), lr=0.02)
    loader = model.loader(batch_size=30, shuffle=True)
    losses = stepped(opt, (model.loss(*batch) for _ in range(3) for batch in loader))
    model.eval()
    with torch.no_grad():
        vectors = model()
    label = torch.arange(ITEMS) < ITEMS // 2
    accuracy = model.test(vectors[::2], label[::2], vectors[1::2], label[1::2], max_iter=150)
    return Outcome(
        {"losses": losses, "accuracy": accuracy}, {"vectors": vectors, "some": model(torch.arange(5))}, model
    )


@in_both_ways
@pytest.mark.parametrize(("optimizer", "sparse"), [("Adam", False), ("SparseAdam", True)], ids=["dense", "sparse"])
def test_node2vec(walks, optimizer, sparse, way, double):
    compare(node2vec, way, double, optimizer, sparse)
