"""A memory of trained keys and values: read the values whose keys fit a hidden state best."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError, check_number, check_size
from speedtransfer.memory_layers.memory_use import MemoryUse, check_use, count_rows_in
from speedtransfer.memory_layers.memory_values import MemoryValues, check_values, masked_sum, weighted_sum
from speedtransfer.memory_layers.product_keys import ProductKeys
from speedtransfer.nn import TableOptions, refuse_vocabulary, takes_options


class MemoryLayer(nn.Module):
    """Look a hidden state up in a memory of trained keys and values (product-key memory, arXiv:1907.05242).

    Each head makes a query of the hidden state and has a key for each value, made of two half-keys: with n = sqrt(num_values),
    key i * n + j is the pair of a_i and b_j. With q1, q2 the halves of its query, a head reads the `k` values with the largest
    scores, and the output is the sum over the heads h and these values::

        y = sum_h sum_(i, j) softmax(<q1_h, a_hi> + <q2_h, b_hj>) * values[i * n + j]

    and with `gate` (Memory+ of arXiv:2412.09764) ``out(y * silu(gate(x)))``. Keys and projections are ordinary parameters; the
    values are a module of their own, of which a position reads `heads * k` rows, and trains these.

    Parameters
    ----------
    dim : int
        Width of the hidden state.
    num_values : int
        A square number, such as ``1000 * 1000``.
    heads : int
        Each with keys of its own; all read the same values.
    k : int
        Values that each head reads, sqrt(num_values) at most.
    key_dim : int
        Width of a query and of a key, even.
    value_dim : int, optional
        Width of the values, and without `gate` of the output; by default `dim`.
    query_norm : {None, "batch", "layer", "rms"}
        What normalises queries: over the batch (``nn.BatchNorm1d``), with which more of the values are used, or each query.
    gate : bool
        Multiply what was read by a projection of the hidden state, and project it to `dim`.
    dropout : float
        Probability that a number of y is set to zero in training.
    std : float, optional
        Standard deviation of the values at first, ``value_dim ** -0.5`` by default; 0: zeros, which take no memory until they
        are trained.
    values : EmbeddingBag or Embedding, optional
        A module that exists, ``(num_values, value_dim)``, ours or that of ``torch.nn``: a bag adds rows as it reads them (with
        ``mode="sum"``), an embedding gives them to the layer to add. Layers that are given the same one share the values. One
        with a vocabulary has rows for the values that were read alone.
    device, dtype
        Of the parameters, as for any module.
    memory, path, idle, storage_dtype, state_dtype, scale_block, layout, cache_rows, cache_counts, process_group,
    comm_dtype
        Where there are no `values`, as in :class:`~speedtransfer.EmbeddingBag`.

    Attributes
    ----------
    keys : ProductKeys
    values : EmbeddingBag or Embedding
    trained_rows : Tensor, optional
        What :meth:`train_rows` was given; None: all.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        Arguments that do not go together, and as :class:`~speedtransfer.EmbeddingBag`.

    Examples
    --------
    >>> memory = MemoryLayer(32, num_values=10_000, heads=2, k=8, key_dim=16)
    >>> memory(torch.randn(4, 10, 32)).shape
    torch.Size([4, 10, 32])
    """

    trained_rows: Tensor | None

    @takes_options
    def __init__(
        self,
        dim: int,
        num_values: int,
        heads: int = 4,
        k: int = 32,
        key_dim: int = 256,
        value_dim: int | None = None,
        query_norm: Literal["batch", "layer", "rms"] | None = None,
        gate: bool = False,
        dropout: float = 0.0,
        std: float | None = None,
        values: nn.Embedding | nn.EmbeddingBag | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        refuse_vocabulary(options, "the values of a memory layer", "pass values=st.EmbeddingBag(..., vocabulary=...)")
        super().__init__()
        place: Any = {"device": device, "dtype": dtype}
        self.keys = ProductKeys(dim, num_values, heads, k, key_dim, query_norm, **place)
        self.dim, self.num_values = self.keys.dim, check_size(num_values, "num_values", 1)
        self.value_dim = self.dim if value_dim is None else check_size(value_dim, "value_dim", 1)
        self.dropout = check_number(dropout, "dropout", maximum=1)
        if values is None:
            std = self.value_dim**-0.5 if std is None else check_number(std, "std")
            values = MemoryValues(self.num_values, self.value_dim, std, **place, **options)
        elif options or std is not None:
            raise InvalidValueError(
                f"values is given, which has its rows already, and so are {sorted(options) or ['std']}; leave these out"
            )
        check_values(values, self.num_values, self.value_dim)
        self.values = values
        self.gate = nn.Linear(self.dim, self.value_dim, bias=False, **place) if gate else None
        self.out = nn.Linear(self.value_dim, self.dim, bias=False, **place) if gate else None
        self.register_buffer("trained_rows", None, persistent=False)
        self._uses: list[MemoryUse] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return what the memory has for `x`, ``(..., dim)``: ``(..., value_dim)``, and with `gate` ``(..., dim)``.

        Raises
        ------
        InvalidValueError
            `x` has another width.
        """
        rows, weights = self.keys(x)
        if self._uses:
            count_rows_in(self._uses, rows)
        each = (-1, rows.shape[-2] * rows.shape[-1])
        rows, weights = rows.reshape(each), weights.reshape(each)
        if self.trained_rows is None or not torch.is_grad_enabled():
            found = weighted_sum(self.values, rows, weights)
        else:
            found = masked_sum(self.values, rows, weights, self.trained_rows)
        found = F.dropout(found, self.dropout, self.training).view(*x.shape[:-1], self.value_dim)
        if self.gate is None or self.out is None:
            return found
        opened = F.silu(self.gate(x))
        # Values may be stored in another dtype, which is computed in float32.
        gated: Tensor = self.out((found * opened).to(opened.dtype))
        return gated

    def train_rows(self, rows: Any) -> None:
        """Let `rows` of the values alone be trained from now on (sparse memory fine-tuning, arXiv:2510.15103).

        The layer gives no gradient to other rows, and reads these as in evaluation. What else is to stay, the caller freezes
        (``requires_grad_(False)``). An optimizer that moves rows without a gradient, by weight decay or by the momentum of
        earlier steps, moves idle rows that are exact here too, as in dense training; ``idle="lazy"`` leaves them alone.

        Parameters
        ----------
        rows : Tensor, array or sequence of int, or None
            Row numbers, for instance of :meth:`~speedtransfer.memory_layers.MemoryUse.top_rows`; None: all. No state dict has
            them.

        Raises
        ------
        InvalidTypeError, RowIndexError
            They are no integers, or the values have no such row.
        """
        if rows is None:
            self.trained_rows = None
            return
        try:
            found = torch.as_tensor(rows, device=self.keys.halves.device).flatten()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidTypeError(f"rows are no row numbers ({error}); pass integers, or None for all") from error
        if found.numel() and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
            raise InvalidTypeError(
                f"rows are {found.dtype} but must be integers; pass row numbers (mask.nonzero() of a mask)"
            )
        found = found.long().unique()
        wrong = found[(found < 0) | (found >= self.num_values)]
        if len(wrong):
            raise RowIndexError(
                f"rows has {int(wrong[0])} but there are {self.num_values} values; pass row numbers from 0 to "
                f"{self.num_values - 1}"
            )
        self.trained_rows = found

    @contextlib.contextmanager
    def counting(self, use: MemoryUse | None = None) -> Iterator[MemoryUse]:
        """Count the rows that forward calls read within a ``with`` block; each call is one batch.

        A forward that activation checkpointing repeats is counted again.

        Parameters
        ----------
        use : MemoryUse, optional
            To add to, for instance that of another layer with the same values; by default a new one.

        Raises
        ------
        InvalidTypeError, InvalidValueError
            `use` does not count as many values.
        """
        if use is None:
            use = MemoryUse(self.num_values)
        check_use(use, self.num_values, "use")
        self._uses.append(use)
        try:
            yield use
        finally:
            self._uses.remove(use)

    def extra_repr(self) -> str:
        """Describe the memory."""
        return f"{self.dim}, num_values={self.num_values}, value_dim={self.value_dim}"
