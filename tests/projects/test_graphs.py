"""Torch-geometric's knowledge graph models, as in its examples."""

import pytest
import torch

from projects.data import ITEMS, triples
from projects.pairs import WAYS, Outcome, classes, compare, hand_over

pytestmark = pytest.mark.slow


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
