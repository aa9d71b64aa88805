"""What a state dict has of a module whose rows belong to ids: a view, to be read and saved, and not to be written to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from speedtransfer.errors import InvalidTypeError
from speedtransfer.optim.copied_rows import writes_to


class ShownRows(Tensor):
    """A view of rows, or of their ids: two modules have them in another order, so that an average of both would mix them.

    Whatever is made of it by a copy is an ordinary tensor, pickles too.
    """

    @staticmethod
    def __new__(cls, values: Tensor) -> ShownRows:  # noqa: D102
        return Tensor._make_subclass(cls, values)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, kwargs = list[ShownRows](), kwargs or {}
        tree_map_only(ShownRows, given.append, (args, kwargs))
        if any(writes_to(each, func, args, kwargs) for each in given):
            raise InvalidTypeError(
                f"{func.__name__} would write to the state dict of a module with a vocabulary, whose rows are in the order in "
                "which ids came; use vocabulary.update(ids, rows), with what vocabulary.export() of others returns"
            )
        args, kwargs = tree_map_only(ShownRows, lambda each: each.as_subclass(Tensor), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        # Views of a view.
        return cls(found) if type(found) is Tensor and (func is Tensor.detach or found._is_view()) else found
