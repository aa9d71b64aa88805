"""Functions of torch that take a parameter for a tensor of its own: each raises by the name of the table, or works."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError

IDS = torch.tensor([[1, 5], [3, 3]])


def model_of(lib: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(lib.Embedding(20, 4), nn.Linear(4, 2)).double()
    st.summary(model)
    return model


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "parameter": lambda model: nn.Parameter(model[0].weight),
    "parameter by name": lambda model: nn.Parameter(data=model[0].weight, requires_grad=False),
    "weight_norm": lambda model: parametrizations.weight_norm(model[0]),
    "swap": lambda model: torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(20, 4))),
    "swapped": lambda model: torch.utils.swap_tensors(nn.Parameter(torch.ones(20, 4)), model[0].weight),
}


@pytest.mark.parametrize("how", REFUSED)
def test_raises_by_name(how: str) -> None:
    REFUSED[how](model_of(nn))
    model = model_of(st)
    names, before = model[0].table, model[0].weight.detach().clone()
    with pytest.raises(InvalidTypeError, match=r"weight is the weight of a table, .* \("):
        REFUSED[how](model)
    assert model[0].table is names
    assert torch.equal(model[0].weight, before)


def test_a_weight_emptied_as_zero_3_does() -> None:
    model = model_of(st)
    with pytest.raises(InvalidValueError, match=r"\(20, 4\) but the values assigned are \(0,\).*st.table_parameters"):
        model[0].weight.data = torch.empty(0)
    with pytest.raises(InvalidValueError, match="pass rows of 4 values"):
        model[0].weight.data = torch.empty(20, 3)


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def removed(model: nn.Module) -> None:
    register_parametrization(model[0], "weight", Twice())
    model(IDS).sum().backward()
    remove_parametrizations(model[0], "weight", leave_parametrized=True)


def pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model[0], "weight", 0.3)
    model(IDS).sum().backward()
    prune.remove(model[0], "weight")


WORKS: dict[str, Callable[[nn.Module], Any]] = {
    "orthogonal": lambda model: parametrizations.orthogonal(model[0]),
    "removed": removed,
    "old spectral_norm": lambda model: nn.utils.spectral_norm(model[0]),
    "pruned": pruned,
    "parameter of data": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.data)),
}


@pytest.mark.parametrize("how", WORKS)
def test_works_as_in_torch(how: str) -> None:
    results = []
    for lib in (nn, st):
        model = model_of(lib)
        torch.manual_seed(1)
        WORKS[how](model)
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            opt.zero_grad()
            model(IDS).square().sum().backward()
            opt.step()
        results.append(model(IDS).detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-9)


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("options", [{}, {"cache_rows": 5}, {"storage_dtype": torch.bfloat16}], ids=str)
def test_conversion_and_loading_where_torch_swaps_tensors(options: dict[str, Any], swapping) -> None:
    model = nn.Sequential(st.Embedding(20, 4, **options), st.MultiEmbedding([20, 3], 4, **options))
    state = {name: value.float().to(torch.bfloat16).float() for name, value in model.state_dict().items()}
    for other in (copy.deepcopy(model), copy.deepcopy(model).to(torch.float64)):
        for module in other:
            nn.init.zeros_(module.weight)
        other.load_state_dict(state)
        assert all(torch.equal(value.float(), state[name]) for name, value in other.state_dict().items())
    emb = model[0].to("meta")
    emb.load_state_dict({"weight": state["0.weight"]}, assign=True)
    assert torch.equal(emb.table.gather(torch.arange(20)).float(), state["0.weight"])


def test_a_vocabulary_loads_where_torch_swaps_tensors(swapping) -> None:
    one, other = (st.Embedding(9, 4, vocabulary=st.Vocabulary()) for _ in range(2))
    ids = torch.tensor([3, 9])
    rows = one(ids).detach()
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(ids), rows)


# --- DataParallel: one device calls the model, several are refused ----------------------------------------------------


def test_with_several_gpus_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataParallel takes models as if there were two GPUs; it could not run them."""
    # In torch.nn.parallel the name is that of a function.
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(data_parallel, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(data_parallel, "_check_balance", lambda devices: None)
    message = r"DataParallel was given .*0\.weight, the weight of a table, and 2 GPUs: .*use DistributedDataParallel"
    with pytest.raises(InvalidValueError, match=message):
        nn.DataParallel(model_of(st), device_ids=[0, 1])
    wrapped = nn.DataParallel(model_of(nn), device_ids=[0, 1])
    st.replace_embeddings(wrapped.module, min_rows=1)
    with pytest.raises(InvalidValueError, match=message):
        wrapped.replicate(wrapped.module, wrapped.device_ids)
