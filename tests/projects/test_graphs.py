"""Graphs: torch-geometric's Node2Vec and knowledge graph models as in its examples, PyKEEN's models."""

import types

import numpy as np
import pytest
import torch

from projects.data import ITEMS, edges, triples
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


def node2vec(way: str, optimizer: str, sparse: bool) -> Outcome:
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


def knowledge_graph(way: str, name: str) -> Outcome:
    from torch_geometric.nn import kge

    torch.manual_seed(0)
    with classes(way, "torch_geometric"):
        model = getattr(kge, name)(num_nodes=ITEMS, num_relations=5, hidden_channels=8)
    hand_over(model, way)
    head, relation, tail = (torch.tensor(part) for part in triples())
    loader = model.loader(
        head_index=head[:350], rel_type=relation[:350], tail_index=tail[:350], batch_size=50, shuffle=True
    )
    kind = torch.optim.Adagrad if name == "ComplEx" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0 if name in ("TransE", "RotatE") else 1e-6)
    losses = stepped(optimizer, (model.loss(*batch) for _ in range(3) for batch in loader))
    model.eval()
    ranks = model.test(head[350:], relation[350:], tail[350:], batch_size=40, k=10, log=False)
    return Outcome({"losses": losses, "ranks": ranks}, {}, model)


@in_both_ways
@pytest.mark.parametrize("name", ["TransE", "ComplEx", "DistMult", "RotatE"])
def test_knowledge_graph(name, way, double):
    pytest.importorskip("torch_geometric", reason="torch-geometric is not installed: make projects")
    compare(knowledge_graph, way, double, name)


def pykeen(way: str, model: str) -> Outcome:
    """PyKEEN's models, training loop and evaluation: constraints and regularisers on `weight` after each step."""
    from pykeen.evaluation import RankBasedEvaluator
    from pykeen.models import DistMult, TransE
    from pykeen.training import SLCWATrainingLoop
    from pykeen.triples import CoreTriplesFactory

    data = torch.tensor(np.stack(triples(), 1))
    training, testing = (CoreTriplesFactory(part, ITEMS, 5) for part in (data[:320], data[320:]))
    torch.manual_seed(0)
    kind = {"TransE": TransE, "DistMult": DistMult}[model]
    with classes(way, "pykeen"):
        net = kind(triples_factory=training, embedding_dim=8, random_seed=3, loss="softplus")
    hand_over(net, way)
    loop = SLCWATrainingLoop(
        model=net, triples_factory=training, optimizer=torch.optim.Adam(params=net.get_grad_params(), lr=0.02)
    )
    torch.manual_seed(4)
    np.random.seed(4)
    losses = loop.train(triples_factory=training, num_epochs=3, batch_size=64, use_tqdm=False, use_tqdm_batch=False)
    given = {"additional_filter_triples": training.mapped_triples, "batch_size": 16, "use_tqdm": False}
    results = RankBasedEvaluator().evaluate(net, testing.mapped_triples, **given)
    scores = net.score_t(testing.mapped_triples[:5, :2])
    printed = {"losses": losses, "mrr": results.get_metric("mrr"), "hits": results.get_metric("hits@10")}
    return Outcome(printed, {"scores": scores}, net)


@in_both_ways
@pytest.mark.parametrize("model", ["TransE", "DistMult"])
def test_pykeen(model, way, double):
    pytest.importorskip("pykeen", reason="PyKEEN is not installed: make projects")
    compare(pykeen, way, double, model)
