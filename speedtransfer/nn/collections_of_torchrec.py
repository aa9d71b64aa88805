"""TorchRec's unsharded collections of tables with one of ours: their code but for the lookups. Needs no TorchRec."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.nn.bag_modules import Given
from speedtransfer.nn.containers import why_apart
from speedtransfer.nn.multi import MultiEmbedding, by_name
from speedtransfer.nn.multi_bag import MultiEmbeddingBag
from speedtransfer.nn.options import TableOptions
from speedtransfer.nn.subclasses import subclass_of
from speedtransfer.once import once


def _bags_of(self: Any, features: Any) -> tuple[Any, Given]:
    """Return the tables of an ``EmbeddingBagCollection``, and what they are given."""
    features, outs = _torchrec().maybe_td_to_kjt(features, None), self._embedding_names
    if self._is_weighted:
        # It raises if there are none.
        features.weights()
    ids = features
    if list(features.keys()) != outs:
        parts = features.to_dict()
        ids = {out: parts[name] for out, name in zip(outs, _features(self), strict=True)}
    return self.embedding_bags, Given(ids, None if self._is_weighted else {})


def _pooled(self: Any, features: Any) -> Any:
    """Do what the forward of an ``EmbeddingBagCollection`` does."""
    theirs, outs, (tables, given) = _torchrec(), self._embedding_names, _bags_of(self, features)
    features = theirs.maybe_td_to_kjt(features, None)
    inverse = theirs.reorder_inverse_indices(features.inverse_indices_or_none(), _features(self))
    pooled = tables(given.ids, given.weights)
    values = theirs.process_pooled_embeddings([part.float() for part in pooled.values()], inverse)
    return theirs.KeyedTensor(keys=outs, values=values, length_per_key=self._lengths_per_embedding)


def _ids_of(self: Any, features: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the tables of an ``EmbeddingCollection``, and what they are given."""
    parts = _torchrec().maybe_td_to_kjt(features, None).to_dict()
    tables = zip(self.embeddings.keys(), self._feature_names, strict=True)
    return self.embeddings, {table: torch.cat([parts[name].values() for name in names]) for table, names in tables}


def _sequences(self: Any, features: Any) -> Any:
    """Do what the forward of an ``EmbeddingCollection`` does."""
    theirs, found, (tables, ids) = _torchrec(), {}, _ids_of(self, features)
    parts, rows = theirs.maybe_td_to_kjt(features, None).to_dict(), tables(ids)
    for table, names, outs in zip(rows, self._feature_names, self._embedding_names_by_table, strict=True):
        split = torch.unsafe_split_with_sizes(rows[table].float(), [len(parts[name].values()) for name in names])
        for name, out, values in zip(names, outs, split, strict=True):
            beside = parts[name].values() if self._need_indices else None
            found[out] = theirs.JaggedTensor(values=values, lengths=parts[name].lengths(), weights=beside)
    return found


# What torchrec calls it, where its tables are, what they become, its forward then, and what `st.prefetch` asks.
_KINDS: tuple[tuple[str, str, Any, Any, Any], ...] = (
    ("EmbeddingBagCollection", "embedding_bags", MultiEmbeddingBag, _pooled, _bags_of),
    ("EmbeddingCollection", "embeddings", MultiEmbedding, _sequences, _ids_of),
)


def _torchrec() -> Any:
    return sys.modules.get("torchrec.modules.embedding_modules")


def _kind(cls: Any) -> Any:
    """Return what there is of a class in `_KINDS`, without the name; None: it is another, or has its own forward."""
    for name, *kind in _KINDS:
        theirs = getattr(_torchrec(), name, None)
        if theirs is not None and issubclass(cls, theirs) and cls.forward is theirs.forward:
            return kind
    return None


def _features(module: Any) -> list[str]:
    return [name for names in module._feature_names for name in names]


class Collection:
    """One of a model that is to be given a table.

    Parameters
    ----------
    module : nn.Module
        For which `is_collection` is true.
    """

    def __init__(self, module: Any) -> None:
        self.module, (self.attribute, self._ours, *_) = module, _kind(type(module))
        self.tables: dict[str, Any] = by_name(getattr(module, self.attribute))
        self._made: Any = None

    def inside(self, name: str) -> str:
        """Return what the names of its tables begin with."""
        return f"{name}.{self.attribute}." if name else f"{self.attribute}."

    def problem(self, options: TableOptions, users: dict[int, set[str]]) -> str | None:
        """Return why its tables cannot be one; `users`: the modules that have each parameter."""
        return why_apart(self._ours, self.tables, options, users)

    def make(self, options: Any) -> None:
        """Make the table; the module stays as it is."""
        more: dict[str, Any] = {}
        if self._ours is MultiEmbeddingBag:
            served = zip(self.tables, self.module._feature_names, strict=True)
            tables = [table for table, names in served for _ in names]
            more["features"] = dict(zip(self.module._embedding_names, tables, strict=True))
        self._made = self._ours.from_modules(getattr(self.module, self.attribute), **more, **options)

    def replace(self, model: nn.Module, name: str) -> None:
        """Give the table to the module. The weights so far read and write it, and raise in an optimizer."""
        if not is_collection(self.module):
            # It was seen under another name.
            return
        self._made.train(self.module.training)
        for name, table in self.tables.items():
            self._made[name]._rows().weight(table.weight)
        setattr(self.module, self.attribute, self._made)
        self.module.__class__ = _class_of(type(self.module))


def is_collection(module: nn.Module) -> bool:
    """Tell whether `module` is a collection of TorchRec, with its forward."""
    return _kind(type(module)) is not None and bool(getattr(module, _kind(type(module))[0]))


@once
def _class_of(cls: Any) -> Any:
    made = subclass_of(cls, (cls,), empty_collection)
    _, _, made.forward, made.lookup_ahead = _kind(cls)
    return made


def empty_collection(cls: Any) -> Any:
    """Return an object of a collection of TorchRec with our forward, without attributes."""
    return object.__new__(_class_of(cls))
