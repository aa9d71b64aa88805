"""The drop-in replacement for ``torch.nn.Embedding``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.active import activate, rows_for_lookup
from speedtransfer.nn.lookup import frozen_lookup, lookup
from speedtransfer.nn.lookup_ops import looks_up
from speedtransfer.nn.options import TableOptions, takes_options
from speedtransfer.nn.shard_rounds import ask
from speedtransfer.nn.table_module import TableModule, shape_of
from speedtransfer.nn.ticket import Ticket
from speedtransfer.nn.tracing import in_transform
from speedtransfer.nn.vocabulary_lookup import refuse_without_rows
from speedtransfer.tables import Table

# This class may be put in its place.
_OF_TORCH = nn.Embedding


class Embedding(TableModule, nn.Embedding):
    """Replace ``torch.nn.Embedding``: the rows live in a :class:`~speedtransfer.Table`, trained by any row-by-row optimizer.

    Only the rows that a batch touches are copied to the compute device. Positional arguments and behaviour are those of
    ``torch.nn.Embedding``, and with the same seed the same numbers.

    Parameters
    ----------
    num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, _weight, _freeze, dtype
        As in ``torch.nn.Embedding``.
    sparse : bool
        Whether optimizers get sparse gradients, as with ``torch.nn``: only where that makes a difference, and dense ones if
        an optimizer refuses sparse ones. Outside of a step ``weight.grad`` reads as a sparse gradient, coalesced.
    device : torch.device, optional
        The compute device, as for any module; ``.to()`` moves it.
    memory : {"auto", "pinned", "pageable", "mmap", "device", "shared"}
        Where the rows live. "shared", with `process_group`: once for all processes, which must be on one host;
        each row is updated by one of them.
    path : path-like, optional
        The new file of a "mmap" table; or a folder that exists, for a file without a name, which vanishes with the table.
    idle : {"auto", "exact", "lazy"}
        What happens to a row that a step does not touch. "exact": what the optimizer does to a row whose gradient is zero
        (momentum, decay), so that training equals that of a dense ``torch.nn.Embedding`` to rounding; the row receives it
        before it is read next. For the optimizers of ``torch.optim`` that are row by row; others raise at their first step.
        "lazy": nothing, as with ``torch.optim.SparseAdam``. "auto": "exact" with those optimizers; with others "lazy" and a
        warning.
    storage_dtype : torch.dtype or "split24", optional
        The dtype that rows are stored in: float32, bfloat16, float16, int8, float8_e4m3fn or float8_e5m2; or "split24", the
        first 24 bits of float32: the nearest bfloat16, and 8 bits in another plane. Lookups, gradients and steps compute in
        float32. int8 rows have a float32 scale each, float8 rows one for each block of columns; scales, and the 8 bits of
        "split24", are not in the file of a "mmap" table, which alone is no copy of the rows.
        A step rounds stochastically, with ``torch.initial_seed()`` as it was when the module was made. Values beyond the range
        of float16 are stored as its largest; if one of the values that share a scale is inf or NaN, all become NaN. A step of
        float8_e4m3fn, which has three bits of significand, is up to an eighth of a value, one of float8_e5m2 up to a quarter.
    state_dtype : {torch.float32, torch.bfloat16, torch.uint8}, optional
        The same for optimizer state as wide as the rows. uint8: 8-bit floats with a float32 scale for up to 128 columns.
    scale_block : int, optional
        The columns, at most, that share a scale of float8 rows, in blocks as even as can be; by default 128.
        `embedding_dim` or more: one scale a row.
    layout : {"planes", "rows"}
        How the planes of optimizer state lie: each in an array of its own, or side by side in one record a row, which makes
        fewer pages of a "mmap" table to read and write; if its file has no name the weights are in the record, too. Results do
        not depend on it. With "rows" ``optimizer.state`` holds strided views, and ``optimizer.state_dict()`` contiguous copies
        of them.
    cache_rows : int or "auto", optional
        Keep so many rows, with their optimizer state, on the compute device: see :class:`~speedtransfer.Table`. Results do not
        depend on it. ``weight.data`` is a copy whose changes are written back, `_weight` is copied, and ``optimizer.state``
        has placeholders, of which ``optimizer.state_dict()`` shows the values.
    cache_counts : Tensor, optional
        ``(num_embeddings,)``, how often each row is used, as far as is known, also with `process_group`: the cache has the
        rows with the largest for good. By default it has those that were used most of late.
    process_group : ProcessGroup, DeviceMesh or "world", optional
        The processes that share the rows out; "world": all, or this one where there is no other. Every process makes the
        module, the same lookups, backwards and steps; gradients are averaged over the processes, as `DistributedDataParallel`
        does. The weight has the shape of the whole table, and what needs values of all rows of it raises; `table` is a
        :class:`~speedtransfer.nn.ShardedTable`. A `path` gets the number of the process.
    comm_dtype : {None, torch.bfloat16, torch.int8}
        What gradients are sent to other processes as, rounded stochastically.
    vocabulary : Vocabulary, optional
        Gives ids of 64 bits rows as they come: `num_embeddings` is then how many ids there is room for at first (unless the
        vocabulary says), and `padding_idx` is an id. `weight` has the rows in the order in which ids came, after one for
        unseen ids and one for padding, if there is any. `_weight` has those of the ids from 0 on.

    Raises
    ------
    InvalidValueError, InvalidTypeError, DeviceError, HostMemoryError, StorageError
        As :class:`~speedtransfer.Table`.
    ProcessGroupError
        With `process_group`: the processes do not make the same table, or one of them could not.
    """

    @takes_options
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | Table | None = None,
        _freeze: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        super(_OF_TORCH, self).__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self._set_up(_weight, _freeze, device, dtype, options)

    @looks_up
    def forward(self, input: Any) -> Tensor:
        """Return the rows of `input`, ``(*input.shape, embedding_dim)``, on the compute device.

        Raises
        ------
        RowIndexError, InvalidTypeError
            An id is out of range (negative ids are), or no integer. Ids on a CUDA device are checked there: a row out of range
            reads as zeros and is written nowhere, and a later call of the table raises.
        """
        if not self._has_rows() or in_transform() or (self._reads_weight and self._reads_another()):
            refuse_without_rows(self.__dict__.get("_handle"))
            return super().forward(input.ids.view(input.shape) if isinstance(input, Ticket) else input)
        handle, padding = self._handle, self.padding_idx
        training = torch.is_grad_enabled() and handle.requires_grad
        if not handle.owners.has_whole:
            input = ask(self, input)
        if handle.id_space.come_and_go:
            return self._look_up_by_id(input, training)
        if not handle.id_space.by_row:
            input, padding = rows_for_lookup(handle, input, padding, training)
        if not training and self.max_norm is None:
            return frozen_lookup(handle, input, padding, self.scale_grad_by_freq)
        active = activate(handle, input, training, self.max_norm, self.norm_type, padding, padded=True)
        return lookup(active, self.scale_grad_by_freq)

    @classmethod
    @takes_options
    def from_pretrained(
        cls,
        embeddings: Tensor | Table,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> Embedding:
        """Make an embedding of the rows of a 2-D tensor or of a table.

        As in ``torch.nn`` a CPU tensor is used in place if `memory` is pageable, `storage_dtype` is None or its dtype (but not
        float8 or "split24"), and there are no `cache_rows`; otherwise it is copied.

        A :class:`~speedtransfer.Table` is used in place if `memory` is "auto" or its own, without `path`, and `storage_dtype`
        is None or its form, which int8 and float8 rows of a file without scales have not; otherwise its rows are copied in
        chunks, decoded if they have scales or 24 bits. Rows that are read in place from files (``Table.open``) cannot be
        trained (``freeze=False``), loaded or shortened (`max_norm`): that raises, and a copy (``memory="pageable"``) can.
        ``load_state_dict`` and ``load_checkpoint`` compare them with what is to be loaded.

        Parameters
        ----------
        embeddings : Tensor or Table
        freeze, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
            As in ``torch.nn``.
        dtype : torch.dtype, optional
            What lookups give where rows of a table have scales or 24 bits; float32 by default. ``module.to(dtype)`` changes
            it. Of rows of 24 bits that are read in place bfloat16 reads 2 of the 3 bytes: the nearest one, and of two as near
            the larger in magnitude.
        """
        rows, dim = check_pretrained(embeddings, dtype)
        # By name, as in torch: a subclass may have others before them.
        given: Any = {"num_embeddings": rows, "embedding_dim": dim, "_weight": embeddings, "_freeze": freeze}
        given |= {"padding_idx": padding_idx, "max_norm": max_norm, "norm_type": norm_type, "sparse": sparse}
        return cls(**given, scale_grad_by_freq=scale_grad_by_freq, **device_and_dtype(embeddings, dtype), **options)


def device_and_dtype(embeddings: Tensor | Table, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the device and dtype that `from_pretrained` passes on, where they are not the usual ones: torch passes none."""
    is_usual = embeddings.device == resolve_device(None) == torch.get_default_device()
    return ({} if is_usual else {"device": embeddings.device}) | ({} if dtype is None else {"dtype": dtype})


def check_pretrained(embeddings: Tensor | Table, dtype: torch.dtype | None = None) -> tuple[int, int]:
    """Return the shape ``(rows, dim)`` of what is given to ``from_pretrained``; raise unless it is 2-D, and of `dtype`."""
    if isinstance(embeddings, str | os.PathLike):
        raise InvalidTypeError(
            f"embeddings is the path {os.fspath(embeddings)!r} but must be a tensor or a table; pass "
            f"st.Table.open({os.fspath(embeddings)!r})"
        )
    if not isinstance(embeddings, Tensor | Table):
        raise InvalidTypeError(f"embeddings is a {type(embeddings).__name__} but must be a tensor or a table; pass one")
    if isinstance(embeddings, Tensor) and dtype not in (None, embeddings.dtype):
        raise InvalidTypeError(f"dtype is {dtype} but embeddings are {embeddings.dtype}; pass embeddings.to({dtype})")
    shape = shape_of(embeddings)
    if len(shape) != 2:
        raise InvalidValueError(f"embeddings has shape {shape} but must be 2-D; reshape it to (rows, dim)")
    return shape[0], shape[1]
