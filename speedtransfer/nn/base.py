"""What `Embedding` and `EmbeddingBag` share: a table behind a module of torch.nn."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, suggest
from speedtransfer.nn.active import ActiveRows, activate
from speedtransfer.optim import Handle, install
from speedtransfer.tables import Table
from speedtransfer.tables.fill import row_chunks

IDLE = ("lazy",)


class TableModule(nn.Module):
    """A module whose weight is a table. `weight` is the parameter that optimizers see (`optim.Handle`)."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    idle: str

    def _set_up(
        self,
        weight: Tensor | None,
        freeze: bool,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        memory: str,
        path: str | os.PathLike[str] | None,
        idle: str,
    ) -> None:
        """Make the table and its handle: with the values of `weight`, or fresh ones."""
        if idle not in IDLE:
            raise InvalidValueError(f"idle is {idle!r}, which is no way to treat idle rows{suggest(str(idle), IDLE)}")
        shape = (check_size(self.num_embeddings, "num_embeddings"), check_size(self.embedding_dim, "embedding_dim"))
        if self.padding_idx is not None:
            rows = self.num_embeddings
            # The built-in's type, that of torch.nn, so that code which catches it goes on to work.
            assert -rows <= self.padding_idx < rows, (
                f"padding_idx must be within num_embeddings: it is {self.padding_idx} but there are {rows} rows"
            )
            self.padding_idx %= rows
        self.idle = idle
        device = torch.get_default_device() if device is None else device
        if weight is None:
            dtype = torch.get_default_dtype() if dtype is None else dtype
            table = Table(*shape, dtype=dtype, memory=memory, path=path, device=device)
        else:
            if tuple(weight.shape) != shape:
                raise InvalidValueError(
                    f"the weight given has shape {tuple(weight.shape)} but num_embeddings and embedding_dim say {shape}; "
                    "pass a weight of that shape"
                )
            table = Table.from_array(weight, memory=memory, path=path, device=device, copy=False)
        install()
        self._handle = Handle(table, requires_grad=not freeze)
        self.register_parameter("weight", self._handle.param)
        if weight is None:
            self.reset_parameters()

    @property
    def table(self) -> Table:
        """The table with all the rows."""
        return self._handle.table

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 1), the padding row zero: with one seed the numbers of ``torch.nn``."""
        self.table.normal_()
        if self.padding_idx is not None:
            self.table.torch()[self.padding_idx] = 0

    def activate(self, ids: Any) -> ActiveRows:
        """Return the unique rows of `ids` on the compute device; what forward is built on.

        Parameters
        ----------
        ids : tensor, ndarray or list
            Row numbers, any integer dtype, shape and device.
        """
        active = activate(self._handle, ids, self.max_norm, self.norm_type)
        if torch.is_grad_enabled() and self.weight.requires_grad:
            active.track_grad()
        return active

    def _padding_in(self, active: ActiveRows) -> int:
        """Return the position of the padding row among the active ones, -1 where it is not."""
        if self.padding_idx is None or not len(active.ids):
            return -1
        position = int(torch.searchsorted(active.ids, self.padding_idx))
        found = position < len(active.ids) and int(active.ids[position]) == self.padding_idx
        return position if found else -1

    # --- nn.Module ----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        super()._apply(fn, recurse)
        handle, weight = self._handle, self.weight
        if weight is not handle.param:  # torch.__future__.set_overwrite_module_params_on_conversion
            handle.bind(weight)
        if weight.dtype != handle.table.dtype:
            handle.table = handle.table.astype(weight.dtype)
            handle.clear()
        handle.table.to(weight.device)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "_handle" in self.__dict__ and value is not self._handle.param:
            raise InvalidTypeError(
                f"weight of {type(self).__name__} is a handle on the active rows and cannot be replaced or tied; "
                "write the rows with emb.table[ids] = rows, or the whole with load_state_dict or from_pretrained"
            )
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the whole plane, as a view, under the name that ``torch.nn`` uses."""
        destination[prefix + "weight"] = self.table.torch()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        value = state_dict.get(key)
        if value is None:
            if strict:
                missing_keys.append(key)
        elif tuple(value.shape) != (self.num_embeddings, self.embedding_dim):
            error_msgs.append(
                f"size mismatch for {key}: the state dict holds {tuple(value.shape)} but the table is "
                f"{(self.num_embeddings, self.embedding_dim)}."
            )
        else:
            plane = self.table.torch()
            with torch.no_grad():
                for rows in row_chunks(plane.shape[0], math.prod(plane.shape[1:]) * plane.element_size()):
                    plane[rows].copy_(value[rows])
        if strict:
            unexpected_keys += [
                k for k in state_dict if k.startswith(prefix) and k != key and "." not in k[len(prefix) :]
            ]

    def extra_repr(self) -> str:
        """Say what torch.nn says, and where the rows live."""
        text = super().extra_repr()
        memory = f"memory={self.table.memory!r}"
        return f"{text}, {memory}" if text else memory
