"""Tables for the embeddings of a model that exists."""

from __future__ import annotations

from typing import Any

from torch import nn

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.nn.bag import EmbeddingBag
from speedtransfer.nn.base import TableModule
from speedtransfer.nn.embedding import Embedding


def replace_embeddings(model: nn.Module, min_rows: int = 0, **options: Any) -> list[str]:
    """Swap the ``nn.Embedding`` and ``nn.EmbeddingBag`` modules inside `model` for ours, weights included.

    Make the optimizer after this: one made before holds the parameters that were swapped out.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    min_rows : int
        Leave embeddings with fewer rows alone: where a batch touches most rows a dense one is faster.
    **options
        Passed on: `memory`, `idle`.

    Returns
    -------
    list of str
        Names of the modules swapped. A module used in several places is swapped once and appears under each name.

    Raises
    ------
    InvalidValueError
        An embedding is the model itself, or shares its weight with another module (tied weights need every row at once).
    """
    check_size(min_rows, "min_rows")
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and not isinstance(module, TableModule)
        and module.num_embeddings >= min_rows
    }
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), set()).add(id(module))
    for name, module in found.items():
        if name == "":
            raise InvalidValueError(
                "the model itself is an embedding and cannot be swapped in place; use Embedding.from_pretrained(model.weight)"
            )
        if len(owners[id(module.weight)]) > 1:
            raise InvalidValueError(
                f"the weight of {name!r} is shared with another module, which needs all its rows at once; "
                "untie it, or raise min_rows to leave it alone"
            )
    swapped: dict[int, nn.Module] = {}
    for name, module in found.items():
        new = (
            swapped.setdefault(id(module), _table_module(module, options))
            if id(module) not in swapped
            else swapped[id(module)]
        )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    return list(found)


def _table_module(module: nn.Embedding | nn.EmbeddingBag, options: dict[str, Any]) -> TableModule:
    shared = {
        "padding_idx": module.padding_idx,
        "max_norm": module.max_norm,
        "norm_type": module.norm_type,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "sparse": module.sparse,
        "freeze": not module.weight.requires_grad,
        **options,
    }
    weight = module.weight.detach()
    new: TableModule
    if isinstance(module, nn.EmbeddingBag):
        new = EmbeddingBag.from_pretrained(
            weight, mode=module.mode, include_last_offset=module.include_last_offset, **shared
        )
    else:
        new = Embedding.from_pretrained(weight, **shared)
    return new.train(module.training)
