"""Another thread (a checkpoint, a monitor) saves or reads a model that is training: it sees whole tables, and changes none."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from midway import elsewhere, midway
from torch import nn

import speedtransfer as st

ROWS = 30


class Noting(nn.Module):
    """Looks a row up in another thread while torch saves or loads this module, or converts it."""

    def lookup(self) -> None:
        self.seen.append(elsewhere(lambda: self.look(torch.tensor([2])).requires_grad))

    def get_extra_state(self) -> float:
        self.lookup()
        return float(self.weight.detach().sum())

    def set_extra_state(self, state: float) -> None:
        self.lookup()
        self.extra = state


class NotingEmbedding(st.Embedding, Noting):
    def __init__(self, **options: Any) -> None:
        super().__init__(ROWS, 3, **options)
        self.seen = []

    def look(self, ids: Any) -> Any:
        return self(ids)


class NotingMulti(st.MultiEmbedding, Noting):
    def __init__(self) -> None:
        super().__init__({"a": ROWS}, 3)
        self.seen = []

    def look(self, ids: Any) -> Any:
        return self({"a": ids})["a"]


@pytest.mark.parametrize(
    "make",
    [
        NotingEmbedding,
        NotingMulti,
        lambda: NotingEmbedding(cache_rows=4),
        lambda: NotingEmbedding(vocabulary=st.Vocabulary()),
    ],
)
def test_the_weight_stays_while_a_state_dict_is_made_and_loaded(make: Callable[[], Any]) -> None:
    module = make()
    if module.vocabulary is not None:
        module(torch.arange(ROWS))
    weights = [id(param) for param in module.parameters()]
    state = copy.deepcopy(module.state_dict())
    module.load_state_dict(state)
    assert module.seen == [True, True]
    assert module.extra == float(module.weight.detach().sum()) != 0
    assert [id(param) for param in module.parameters()] == weights


def test_the_weight_stays_while_a_module_is_converted() -> None:
    module, seen = st.Embedding(ROWS, 3), []
    module.scale = nn.Parameter(torch.ones(1))

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 1:
            seen.append(elsewhere(lambda: module(torch.tensor([2])).requires_grad))
        return tensor.double()

    module._apply(convert)
    assert seen[0]
    assert module.weight.dtype == module.scale.dtype == torch.float64


def save(path: Any, model: Any, optimizer: Any) -> Any:
    st.save_checkpoint(path, model, optimizer)
    again = type(model)([type(model[0])(ROWS, 3)])
    other = type(optimizer)(again.parameters())
    st.load_checkpoint(path, again, other)
    return again.state_dict()["0.weight"], [state["exp_avg"] for state in other.state_dict()["state"].values()]


USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "state_dict": lambda model, optimizer, path: model.state_dict()["0.weight"].clone(),
    "detach": lambda model, optimizer, path: model[0].weight.detach().clone(),
    "data": lambda model, optimizer, path: model[0].weight.data[:].clone(),
    "F.embedding": lambda model, optimizer, path: F.embedding(torch.arange(ROWS), model[0].weight).detach(),
    "full_state_dict": lambda model, optimizer, path: st.full_state_dict(model)["0.weight"].clone(),
    "deepcopy": lambda model, optimizer, path: copy.deepcopy(model)[0].weight.detach(),
    "pickle": lambda model, optimizer, path: pickle.loads(pickle.dumps(model))[0].weight.detach(),
    "to_dense": lambda model, optimizer, path: st.to_dense(model)[0].weight.detach(),
    "state": lambda model, optimizer, path: optimizer.state_dict()["state"],
    "checkpoint": lambda model, optimizer, path: save(path, model, optimizer),
}


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"cache_rows": 4}, {"idle": "lazy"}], ids=["exact", "cache", "lazy"])
@pytest.mark.parametrize("name", USES)
def test_in_the_middle_of_a_step(name: str, options: dict[str, Any], tmp_path: Any) -> None:
    """What is seen is what was there before it; and the step is made as without."""
    ends = []
    for use in (lambda *_: None, USES[name]):
        torch.manual_seed(0)
        model = nn.ModuleList([st.Embedding(ROWS, 3, **options)])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for number in range(3):
            model[0](torch.arange(number, number + 5)).pow(2).sum().backward()
            before = {key: USES[key](model, optimizer, tmp_path / "before") for key in ("state_dict", "state")}
            before = copy.deepcopy(before)
            seen = midway(optimizer, lambda: elsewhere(lambda: use(model, optimizer, tmp_path / "saved")))  # noqa: B023
            optimizer.zero_grad()
            if use is not USES[name]:
                continue
            weight, states = before["state_dict"], [state["exp_avg"] for state in before["state"].values()]
            if name == "state":
                seen = [state["exp_avg"] for state in seen.values()]
                assert [part.shape for part in seen] == [part.shape for part in states]
            elif name == "checkpoint":
                assert torch.equal(seen[0], weight)
                assert all(torch.equal(*pair) for pair in zip(seen[1], states, strict=True))
            else:
                assert torch.equal(seen, weight)
        ends.append(model.state_dict()["0.weight"].clone())
    assert torch.equal(*ends)


def test_a_state_dict_that_is_kept_stays_that_of_all_rows() -> None:
    """What another thread writes to a file during the next step."""
    emb = st.Embedding(ROWS, 3)
    optimizer = torch.optim.Adam(emb.parameters())
    kept: list[Any] = []
    for _ in range(2):
        emb(torch.tensor([4])).sum().backward()
        shapes = midway(optimizer, lambda: elsewhere(lambda: [state["exp_avg"].shape for state in kept]))
        kept.append(optimizer.state_dict()["state"][0])
    assert shapes == [(ROWS, 3)]
