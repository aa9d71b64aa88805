"""Classes for subclasses of embeddings: of ``torch.nn.Embedding`` with a table, of ours without one.

They have no name to be imported by, so their objects are pickled by the class that people wrote.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from speedtransfer.nn.bag import EmbeddingBag
from speedtransfer.nn.bag_modules import BagModules
from speedtransfer.nn.embedding import Embedding
from speedtransfer.nn.feature import Feature, FeatureModules
from speedtransfer.nn.module_state import ModuleState
from speedtransfer.nn.multi import MultiEmbedding
from speedtransfer.nn.multi_bag import MultiEmbeddingBag
from speedtransfer.nn.table_module import TableModule
from speedtransfer.once import once

# Any for a class: mypy takes the __hash__ of its objects for that of the class.
_DENSE: dict[Any, Any] = {
    Embedding: nn.Embedding,
    EmbeddingBag: nn.EmbeddingBag,
    MultiEmbedding: FeatureModules,
    MultiEmbeddingBag: BagModules,
    Feature: nn.Embedding,
}
# What every class has of its own.
_OF_A_CLASS = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__"}


@once
def table_class(cls: Any) -> Any:
    """Return the class with a table for a class of embeddings: its own code, before ours, before that of torch."""
    ours = EmbeddingBag if issubclass(cls, nn.EmbeddingBag) else Embedding
    return ours if cls is _DENSE[ours] else subclass_of(cls, (cls, ours), empty_table_module)


@once
def dense_class(cls: Any) -> Any:
    """Return the class without a table for a class of table modules: its own code, before that of torch.

    In it ``super().forward(ids)`` looks up in the weight, whichever way the code of `cls` spells super().
    """
    if cls in _DENSE:
        return _DENSE[cls]
    if "_written" in vars(cls):
        return cls._written
    ours = next(base for base in cls.__mro__ if base in _DENSE)
    theirs = _DENSE[ours]
    replaced = (vars(ModuleState).keys() | vars(TableModule).keys() | vars(ours).keys()) - _OF_A_CLASS
    methods = {name: inspect.getattr_static(theirs, name) for name in replaced if hasattr(theirs, name)}
    # torch.jit reads all properties: those of tables raise, one to say that it cannot record them.
    absent = (
        name for name in replaced - methods.keys() if isinstance(inspect.getattr_static(ours, name, None), property)
    )
    methods |= dict.fromkeys(absent, property(_read_nothing))
    base = type(f"Dense{ours.__name__}", (ours,), {**methods, "__module__": __name__})
    return subclass_of(cls, (cls, base), empty_dense_module)


def _read_nothing(module: Any) -> NoReturn:
    raise AttributeError(f"{type(module).__name__} has no table")


def subclass_of(cls: Any, bases: tuple[Any, ...], empty: Callable[[Any], Any]) -> Any:
    """Return a class named as `cls`, whose objects are unpickled from what ``empty(cls)`` returns."""

    def reduce(module: Any, protocol: Any) -> Any:
        return empty, (cls,), object.__reduce_ex__(module, 2)[2]

    body = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": reduce, "_written": cls}
    return type(cls.__name__, bases, body)


def empty_table_module(cls: Any) -> Any:
    """Return an object of `table_class` without attributes."""
    return object.__new__(table_class(cls))


def empty_dense_module(cls: Any) -> Any:
    """Return an object of `dense_class` without attributes."""
    return object.__new__(dense_class(cls))
