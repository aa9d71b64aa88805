"""Tables for the embeddings of a model that exists."""

from __future__ import annotations

from typing import Any

from torch import nn

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.nn.bag import EmbeddingBag
from speedtransfer.nn.base import TableModule
from speedtransfer.nn.embedding import Embedding

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
        Passed on: `memory`, `idle`, `storage_dtype`, `state_dtype`.

    Returns
    -------
    list of str
        Names of the modules swapped. A module used in several places is swapped once and appears under each name.

    Raises
    ------
    InvalidValueError
        An embedding is the model itself, has code or hooks of its own, or shares its weight with another module (tied
        weights need every row at once). The model is then as it was.
    """
    check_size(min_rows, "min_rows")
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and not isinstance(module, TableModule)
        and module.num_embeddings >= min_rows
    }
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            users.setdefault(id(param), set()).add(id(module))
    for name, module in found.items():
        _check_replaceable(name, module, shared=len(users.get(id(module.weight), ())) > 1)
    # All of them are made, each once, before the first is swapped: an error leaves the model as it was.
    made = {key: _table_module(module, options) for key, module in {id(m): m for m in found.values()}.items()}
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[id(module)])
    return list(found)


def _check_replaceable(name: str, module: nn.Module, shared: bool) -> None:
    if name == "":
        problem = "is the model itself, which cannot be swapped in place; use Embedding.from_pretrained(model.weight)"
    elif type(module) not in (nn.Embedding, nn.EmbeddingBag):
        problem = f"is a {type(module).__name__}, whose own code would be lost; swap it by hand, or raise min_rows"
    elif shared:
        problem = "shares its weight with another module, which needs all rows at once; untie it, or raise min_rows"
    elif any(getattr(module, hooks) for hooks in _HOOKS):
        problem = "has hooks, which would be lost; remove them and register them anew afterwards"
    else:
        return
    raise InvalidValueError(f"embedding {name!r} {problem}" if name else f"the embedding {problem}")


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
