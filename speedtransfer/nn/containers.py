"""Containers of embeddings that can be one table, a `MultiEmbedding` in their place."""

from __future__ import annotations

from typing import Any

from torch import nn

from speedtransfer.errors import SpeedtransferError
from speedtransfer.nn.multi import MultiEmbedding, by_name
from speedtransfer.nn.options import TableOptions


class Container:
    """A ``nn.ModuleList`` or ``nn.ModuleDict`` of a model that is to be given a table.

    Parameters
    ----------
    module : nn.Module
        For which `is_container` is true.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.tables = module, by_name(module)
        self._made: Any = None

    @staticmethod
    def inside(name: str) -> str:
        """Return what the names of its tables begin with."""
        return f"{name}."

    def problem(self, options: TableOptions, users: dict[int, set[str]]) -> str | None:
        """Return why its tables cannot be one; `users`: the modules that have each parameter."""
        if own := _own(self.module):
            return f"the container has {own}"
        return why_apart(MultiEmbedding, self.tables, options, users)

    def make(self, options: Any) -> None:
        """Make the table; the model stays as it is."""
        self._made = MultiEmbedding.from_modules(self.module, **options)

    def replace(self, model: nn.Module, name: str) -> None:
        """Put the table where `model` has the container, `name`. The weights so far read and write it."""
        made = self._made
        if made.training != self.module.training:
            made.train(self.module.training)
        for feature, table in zip(made.values(), self.tables.values(), strict=True):
            # One that was seen under another name has its rows already.
            if type(table.weight) is nn.Parameter:
                feature._rows().weight(table.weight)
        parent, _, attribute = name.rpartition(".")
        model.get_submodule(parent)._modules[attribute] = made


def is_container(module: nn.Module) -> bool:
    """Tell whether `module` is a list or dict of embeddings of torch, and of nothing else."""
    tables = list(module.children())
    return (
        type(module) in (nn.ModuleList, nn.ModuleDict)
        and bool(tables)
        and all(type(it) is nn.Embedding for it in tables)
    )


def why_apart(ours: Any, tables: dict[str, Any], options: TableOptions, users: dict[int, set[str]]) -> str | None:
    """Return why `tables` cannot be one of the class `ours`; `users`: the modules that have each parameter."""
    if options["vocabulary"] is not None:
        return "each has a vocabulary"
    for name, table in tables.items():
        weight = table._parameters.get("weight")
        if own := _own(table):
            return f"{name!r} has {own}"
        if weight is not None and (weight._backward_hooks or weight._post_accumulate_grad_hooks):
            return f"the weight of {name!r} has hooks"
        if weight is not None and vars(weight):
            return f"the weight of {name!r} has attributes of its own ({', '.join(vars(weight))})"
        if weight is not None and (weight.is_meta or weight.grad is not None or len(users[id(weight)]) > 1):
            return f"the weight of {name!r} is on the meta device, has a gradient, or is shared"
    try:
        ours._alike(tables)
    except SpeedtransferError as error:
        return str(error)
    return None


def _own(module: nn.Module) -> str | None:
    """Return what a module has that others of its class have not, and that one table in its place would lose."""
    if any(value for key, value in vars(module).items() if key.endswith("_hooks")):
        return "hooks"
    if module._buffers or module._parameters.keys() - {"weight"}:
        return "parameters or buffers of its own"
    others = vars(module).keys() - vars(nn.Module()).keys() - set(getattr(module, "__constants__", ()))
    return f"attributes of its own ({', '.join(sorted(others))})" if others else None


def about(tables: dict[str, Any]) -> str:
    """Say what a table is of."""
    rows = sum(table.num_embeddings for table in tables.values())
    return f"of {len(tables)} tables, {rows} rows together"
