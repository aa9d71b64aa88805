"""Graphs: torch-geometric's Node2Vec and knowledge graph models as in its examples, PyKEEN with tables as representations."""

import types

import numpy as np
import pytest
import torch
from torch import nn

import speedtransfer
from projects.data import ITEMS, edges, triples
from projects.pairs import DENSE, WAYS, Outcome, classes, compare, hand_over

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
    losses = []
    for _ in range(3):
        model.train()
        for positive, negative in loader:
            opt.zero_grad()
            loss = model.loss(positive, negative)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        vectors = model()
    label = torch.arange(ITEMS) < ITEMS // 2
    accuracy = model.test(vectors[::2], label[::2], vectors[1::2], label[1::2], max_iter=150)
    return Outcome(
        {"losses": losses, "accuracy": accuracy}, {"vectors": vectors, "some": model(torch.arange(5))}, model
    )


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
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
    optimizer = {
        "TransE": lambda: torch.optim.Adam(model.parameters(), lr=0.01),
        "ComplEx": lambda: torch.optim.Adagrad(model.parameters(), lr=0.01, weight_decay=1e-6),
        "DistMult": lambda: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-6),
        "RotatE": lambda: torch.optim.Adam(model.parameters(), lr=0.01),
    }[name]()
    losses = []
    for _ in range(3):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss = model.loss(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    ranks = model.test(head[350:], relation[350:], tail[350:], batch_size=40, k=10, log=False)
    return Outcome({"losses": losses, "ranks": ranks}, {}, model)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["TransE", "ComplEx", "DistMult", "RotatE"])
def test_knowledge_graph(name, way, double):
    pytest.importorskip("torch_geometric", reason="torch-geometric is not installed: make projects")
    compare(knowledge_graph, way, double, name)


def pykeen_table(way: str) -> type:
    """Return a representation, as PyKEEN's guide to one's own has it, whose rows an embedding module holds."""
    from pykeen.nn.representation import Representation

    class Rows(Representation):
        def __init__(self, max_id, shape, **kwargs) -> None:
            super().__init__(max_id=max_id, shape=shape, **kwargs)
            dim = int(np.prod(self.shape))
            torch.manual_seed(max_id)
            self.rows = nn.Embedding(max_id, dim) if way == DENSE else speedtransfer.Embedding(max_id, dim)

        def _plain_forward(self, indices=None):
            rows = self.rows.weight if indices is None else self.rows(indices)
            return rows.view(*rows.shape[:-1], *self.shape)

    return Rows


def pykeen(way: str, model: str, own: bool) -> Outcome:
    """PyKEEN's training loop and evaluation: of its own models (`own`), or of one with our representations."""
    from pykeen.evaluation import RankBasedEvaluator
    from pykeen.models import DistMult, ERModel, TransE
    from pykeen.nn.modules import DistMultInteraction, TransEInteraction
    from pykeen.training import SLCWATrainingLoop
    from pykeen.triples import CoreTriplesFactory

    data = torch.tensor(np.stack(triples(), 1))
    training, testing = (CoreTriplesFactory(part, ITEMS, 5) for part in (data[:320], data[320:]))
    torch.manual_seed(0)
    if own:
        with classes(way, "pykeen"):
            net = {"TransE": TransE, "DistMult": DistMult}[model](
                triples_factory=training, embedding_dim=8, random_seed=3, loss="softplus"
            )
        hand_over(net, way)
    else:
        rows = pykeen_table(way)
        interaction = {"TransE": TransEInteraction(p=1), "DistMult": DistMultInteraction()}[model]
        net = ERModel(
            triples_factory=training,
            interaction=interaction,
            entity_representations=rows,
            entity_representations_kwargs={"shape": (8,)},
            relation_representations=rows,
            relation_representations_kwargs={"shape": (8,)},
            loss="softplus",
            random_seed=3,
        )
    loop = SLCWATrainingLoop(
        model=net, triples_factory=training, optimizer=torch.optim.Adam(params=net.get_grad_params(), lr=0.02)
    )
    torch.manual_seed(4)
    np.random.seed(4)
    losses = loop.train(triples_factory=training, num_epochs=3, batch_size=64, use_tqdm=False, use_tqdm_batch=False)
    results = RankBasedEvaluator().evaluate(
        model=net,
        mapped_triples=testing.mapped_triples,
        additional_filter_triples=training.mapped_triples,
        batch_size=16,
        use_tqdm=False,
    )
    scores = net.score_t(testing.mapped_triples[:5, :2])
    printed = {"losses": losses, "mrr": results.get_metric("mrr"), "hits": results.get_metric("hits@10")}
    return Outcome(printed, {"scores": scores}, net if own else None)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("model", ["TransE", "DistMult"])
def test_pykeen_representation(model, double):
    pytest.importorskip("pykeen", reason="PyKEEN is not installed: make projects")
    compare(pykeen, "swap", double, model, False)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["TransE", "DistMult"])
def test_pykeen_models(model, way, double):
    """PyKEEN's own models: constraints and regularisers on `weight` after each step."""
    pytest.importorskip("pykeen", reason="PyKEEN is not installed: make projects")
    compare(pykeen, way, double, model, True)
