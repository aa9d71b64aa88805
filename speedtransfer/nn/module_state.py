"""State dicts of table modules: all rows under the name that ``torch.nn`` uses, or placeholders for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.errors import InvalidTypeError
from speedtransfer.optim import Handle, ShardHandle

# Placeholders used in state dicts so far, each with its handle; None: state dicts hold the rows themselves.
_placeholders: ContextVar[list[tuple[Tensor, Handle]] | None] = ContextVar("placeholders", default=None)


@contextmanager
def placeholder_rows() -> Iterator[list[tuple[Tensor, Handle]]]:
    """Save and load state dicts with meta tensors as placeholders for the rows of tables, which are not copied.

    Yields the list of placeholders saved or loaded so far, each with its handle, for the caller to move the rows.
    """
    used: list[tuple[Tensor, Handle]] = []
    token = _placeholders.set(used)
    try:
        yield used
    finally:
        _placeholders.reset(token)


def with_placeholders() -> bool:
    """Tell whether state dicts are to have placeholders for the rows of tables."""
    return _placeholders.get() is not None


class ModuleState(nn.Module):
    """The part of :class:`TableModule` that saves and loads its state dict."""

    num_embeddings: int
    embedding_dim: int
    _handle: Handle

    def _has_rows(self) -> bool:
        """Tell whether the weight is that of the table, and was not replaced by functional_call or a parametrization."""
        weight, handle = self._parameters.get("weight"), self.__dict__.get("_handle")
        return weight is not None and handle is not None and weight is handle.param_ref()

    @contextmanager
    def _replacing_weight(self, other: Tensor | None) -> Iterator[None]:
        """Have methods of torch.nn see `other` as the weight."""
        weight, self._parameters["weight"] = self._parameters["weight"], other  # type: ignore[assignment]
        try:
            yield
        finally:
            self._parameters["weight"] = weight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save all rows under the name that ``torch.nn`` uses: a view of the table, or of int8 and float8 a float32 copy."""
        if not self._has_rows():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        with self._replacing_weight(self._placeholder()):
            super()._save_to_state_dict(destination, prefix, keep_vars)
        self._handle.name = prefix[:-1]
        used = _placeholders.get()
        if used is None and isinstance(self._handle, ShardHandle):
            raise InvalidTypeError(
                f"{self._handle} is owned by {self._handle.reducer.exchange.ranks} processes, so state_dict() of one has not "
                "all rows; call st.save_checkpoint in all, or st.full_state_dict(model), which gives them to rank 0"
            )
        if used is None:
            self._handle.recover()
            whole = self._parameters["weight"] if keep_vars else self._handle.rows.whole("weight")
        else:
            whole = self._placeholder()
            used.append((whole, self._handle))
        destination[prefix + "weight"] = whole

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Load all rows as ``torch.nn`` loads a weight; ``assign=True`` copies too: the table keeps its memory.

        Rows that are read in place are compared: to load others raises.
        """
        if not self._has_rows():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
            return
        used, rows = _placeholders.get(), self._handle.rows
        self._handle.recover()
        sharded, writable = isinstance(self._handle, ShardHandle), self._handle.table.writable
        whole: Any = self._placeholder()
        if used is None:
            whole = self._handle.table.torch() if writable and not sharded else self._handle.placeholder()
        whole = nn.Parameter(whole, requires_grad=False)
        if used is None and (sharded or not rows.plain or not writable):
            # torch.nn calls this once it has checked names and shapes.
            vars(whole)["copy_"] = self._handle.store if writable else self._handle.check_equal
        with self._replacing_weight(whole):
            super()._load_from_state_dict(
                state_dict, prefix, {**local_metadata, "assign_to_params_buffers": False}, *rest
            )
        if used is not None and prefix + "weight" in state_dict:
            used.append((state_dict[prefix + "weight"], self._handle))

    def _placeholder(self) -> Tensor:
        return torch.empty(self.num_embeddings, self.embedding_dim, dtype=self._handle.rows.dtype, device="meta")
