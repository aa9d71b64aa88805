"""Embed n-grams of tokens: hash them, look their rows up in one table, and combine the heads."""

from __future__ import annotations

import math
import weakref
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, suggest
from speedtransfer.ngrams.gate import EngramGate
from speedtransfer.ngrams.hashing import NgramHash
from speedtransfer.ngrams.per_layer import PerLayerEmbedding
from speedtransfer.nn import DrawnRows, Embedding, TableOptions, Ticket, refuse_vocabulary, takes_options
from speedtransfer.nn.ticket import FoundRows, known_again

COMBINE = ("concat", "sum", "mean")
# Tickets of `prefetch`, which are forgotten where nobody has them; not in the module, which is copied and pickled.
_kept: weakref.WeakKeyDictionary[nn.Module, list[Ticket]] = weakref.WeakKeyDictionary()
_MOST_KEPT = 8


class NgramRows(DrawnRows, Embedding):
    """The table of an `NgramEmbedding`."""

    def __init__(self, num_rows: int, dim: int, std: float, **options: Any) -> None:
        self.std = std
        super().__init__(num_rows, dim, **options)


class NgramEmbedding(nn.Module):
    """Embed the n-grams that end at each token, by rows of one table in host memory.

    Each head has a row of `dim` values. Their sum, mean or concatenation is the output, to be added to a hidden state; or a
    projection of it; or, with `gate`, as much of that as fits the hidden state, by an
    :class:`~speedtransfer.ngrams.gate.EngramGate`. It starts as zeros, as the table does, unless `std` is given.

    Parameters
    ----------
    ngrams : NgramHash
    dim : int
        Values of a row.
    out_dim : int, optional
        Width of a projection; by default there is none.
    combine : {"concat", "sum", "mean"}
        What becomes of the rows of the heads: ``num_columns * dim`` values, or `dim`.
    head_scale : bool
        Multiply the row of each head by a factor that is learned, 1 at first.
    gate : bool
        With `out_dim`, the width of the hidden state.
    conv : int
        With `gate`: add a causal depthwise convolution over so many positions, each the longest order apart, after the gate,
        as Engram does; it starts as zeros. 0: none.
    layers : int, optional
        Have one row for each head serve so many layers: `dim` values for each, in one lookup, for layers to project.
    std : float
        Standard deviation of the rows at first; 0: zeros, which take no memory until they are trained.
    embedding : Embedding, optional
        A table that exists, ``(ngrams.num_rows, dim * layers)``, for instance one opened in place; without `dim`'s options.
    device, dtype
        Of the parameters, as for any module; rows are computed in `dtype`.
    memory, path, idle, storage_dtype, state_dtype, scale_block, layout, cache_rows, cache_counts, process_group,
    comm_dtype
        As in :class:`~speedtransfer.Embedding`.

    Attributes
    ----------
    embedding : Embedding
        The table.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        Arguments that do not go together, and as :class:`~speedtransfer.Embedding`.

    Examples
    --------
    >>> ngrams = NgramHash(rows=1000, heads=2, vocab_size=50)
    >>> embedding = NgramEmbedding(ngrams, dim=8, out_dim=16)
    >>> embedding(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 16])
    """

    @takes_options
    def __init__(
        self,
        ngrams: NgramHash,
        dim: int,
        out_dim: int | None = None,
        combine: Literal["concat", "sum", "mean"] = "concat",
        head_scale: bool = False,
        gate: bool = False,
        conv: int = 0,
        layers: int | None = None,
        std: float = 0.0,
        embedding: Embedding | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        refuse_vocabulary(options, "a table of n-grams", "its hash gives the rows; leave it out")
        super().__init__()
        if not isinstance(ngrams, NgramHash):
            raise InvalidTypeError(
                f"ngrams is a {type(ngrams).__name__} but must be an NgramHash; pass NgramHash(rows=...)"
            )
        if combine not in COMBINE:
            raise InvalidValueError(f"combine is {combine!r}, not one of its values{suggest(str(combine), COMBINE)}")
        if gate and out_dim is None:
            raise InvalidValueError("gate needs out_dim, the width of the hidden state; pass it")
        if conv and not gate:
            raise InvalidValueError(f"conv is {conv} but follows the gate; pass gate=True too, or leave it out")
        if layers is not None and out_dim is not None:
            raise InvalidValueError(
                f"layers is {layers} and out_dim is {out_dim}, but each layer projects its own part; leave out_dim out"
            )
        self.ngrams, self.combine, self.layers = ngrams, combine, layers
        self.dim, conv = check_size(dim, "dim", 1), check_size(conv, "conv")
        width = self.dim * (1 if layers is None else check_size(layers, "layers", 1))
        if not isinstance(std, int | float) or not 0 <= std < math.inf:
            raise InvalidValueError(f"std is {std!r} but must be a finite number, 0 or more; pass for instance 0.02")
        place: Any = {"device": device, "dtype": dtype}
        if embedding is None:
            padding: Any = {"padding_idx": ngrams.padding_row}
            embedding = NgramRows(ngrams.num_rows, width, std, **padding, **place, **options)
        elif not isinstance(embedding, Embedding) or isinstance(embedding, PerLayerEmbedding):
            raise InvalidTypeError(
                f"embedding is a {type(embedding).__name__} but must be a speedtransfer.Embedding, whose lookup gives a row; "
                "pass one (Embedding.from_pretrained takes tensors and tables)"
            )
        elif options or std:
            raise InvalidValueError(
                f"embedding is given, which has its table already, and so are {sorted(options) or ['std']}; leave these out"
            )
        elif (embedding.num_embeddings, embedding.embedding_dim) != (ngrams.num_rows, width):
            raise InvalidValueError(
                f"embedding is {embedding.num_embeddings} x {embedding.embedding_dim} but the hash has {ngrams.num_rows} rows "
                f"and dim and layers make {width} values; pass a table of that shape"
            )
        elif embedding.padding_idx != ngrams.padding_row:
            raise InvalidValueError(
                f"padding_idx of embedding is {embedding.padding_idx} but the row of padding is {ngrams.padding_row}; make it "
                f"with padding_idx={ngrams.padding_row}"
            )
        self.embedding = embedding
        self.head_scale = nn.Parameter(torch.ones(ngrams.num_columns, 1, **place)) if head_scale else None
        joined = self.dim * (ngrams.num_columns if combine == "concat" else 1)
        self.out_dim = joined if out_dim is None else check_size(out_dim, "out_dim", 1)
        self.value = None if out_dim is None else nn.Linear(joined, self.out_dim, bias=False, **place)
        self.gate = EngramGate(joined, self.out_dim, conv, ngrams.orders[-1], **place) if gate else None

    def reset_parameters(self) -> None:
        """Set `head_scale` to ones; the modules within have parameters of their own to reset."""
        if self.head_scale is not None:
            nn.init.ones_(self.head_scale)

    def forward(self, tokens: Tensor | Ticket, hidden: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Return what is to be added to a hidden state.

        Parameters
        ----------
        tokens : Tensor or Ticket
            ``(..., time)`` integers; or what `prefetch` has returned for them and their context.
        hidden : Tensor, optional
            ``(..., time, out_dim)``, for the gate.
        context : Tensor, optional
            ``(..., k)``, the tokens before these; see :class:`~speedtransfer.NgramHash`. A convolution does not see them.

        Returns
        -------
        Tensor
            ``(..., time, out_dim)``; with `layers` ``(..., time, layers, out_dim)``.

        Raises
        ------
        InvalidValueError
            There is a gate and no `hidden`, or the reverse.
        RowIndexError
            As :class:`~speedtransfer.NgramHash`.
        """
        if self.gate is not None and hidden is None:
            raise InvalidValueError("hidden is missing, with which the gate compares; pass hidden")
        if self.gate is None and hidden is not None:
            raise InvalidValueError("hidden is given but this module has no gate; leave it out, or pass gate=True")
        if not isinstance(tokens, Ticket):
            found, handle = self._found(tokens, context), vars(self.embedding).get("_handle")
            tokens = found.rows if torch.compiler.is_compiling() else known_again(handle, found)
        rows = self.embedding(tokens)
        if self.layers is not None:
            rows = rows.unflatten(-1, (self.layers, self.dim)).transpose(-2, -3)
        if self.head_scale is not None:
            rows = rows * self.head_scale
        joined = (
            rows.flatten(-2) if self.combine == "concat" else rows.sum(-2) if self.combine == "sum" else rows.mean(-2)
        )
        value = joined if self.value is None else self.value(joined)
        if self.gate is None or hidden is None:
            return value
        if hidden.shape != value.shape:
            raise InvalidValueError(
                f"hidden has shape {tuple(hidden.shape)} but what is looked up {tuple(value.shape)}; pass the hidden state of "
                "the same positions"
            )
        weighed: Tensor = self.gate(joined, value, hidden)
        return weighed

    def prefetch(self, tokens: Tensor, context: Tensor | None = None) -> Ticket:
        """Begin to read the rows of `tokens`; the forward with the same tokens finds them.

        See :meth:`speedtransfer.Embedding.prefetch`. On a CUDA device the tokens must be the same tensor. The ticket need not
        be kept: the module keeps the last eight whose rows no lookup has used.
        """
        ticket = self.embedding.prefetch(self._found(tokens, context))
        _kept[self] = [*(one for one in _kept.get(self, ()) if one.is_waiting), ticket][-_MOST_KEPT:]
        return ticket

    def lookup_ahead(self, tokens: Any, context: Tensor | None = None) -> tuple[Embedding, FoundRows]:
        """Return the table and the row numbers of `tokens`, which :func:`speedtransfer.prefetch` reads ahead."""
        return self.embedding, self._found(tokens, context)

    def _found(self, tokens: Tensor, context: Tensor | None) -> FoundRows:
        given = (tokens,) if context is None else (tokens, context)
        return FoundRows(self.ngrams(tokens, context), source=(id(self.ngrams), given))

    def extra_repr(self) -> str:
        """Describe how rows become the output."""
        layers = "" if self.layers is None else f", layers={self.layers}"
        return f"dim={self.dim}, combine={self.combine!r}{layers}"
