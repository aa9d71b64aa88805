"""Hash the n-grams that end at each token to rows of one table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.ngrams import schemes
from speedtransfer.ngrams.constants import HashConstants, checked_map, listed
from speedtransfer.ngrams.statistics import NgramStatistics, count_rows
from speedtransfer.ngrams.windows import as_tokens, beyond, can_look_at, ngrams_of
from speedtransfer.tables import refuse_layout


class NgramHash(nn.Module):
    """Hash n-grams of tokens to row numbers, as language models with n-gram tables do.

    For each position and each order n the n-gram that ends there is hashed, and each head has rows of its own, which follow
    one another in one table. The row numbers depend on the tokens alone, so that rows can be read before a model runs.

    ``scheme="xor"`` computes ``(t0 * m0 ^ t1 * m1 ^ ...) % size`` of a head, where t0 is the token itself, t1 the one before,
    and m are odd multipliers; "polynomial" computes ``(t0 + t1 * V + t2 * V**2 + ...) % size`` with V = `vocab_size`. The
    defaults are those of Qwen4-Exp, which its configuration reproduces; :meth:`engram` and :meth:`longcat` are those of
    DeepSeek's Engram and of LongCat-Flash-Lite.

    Parameters
    ----------
    orders : sequence of int
        Lengths of the n-grams, ascending.
    heads : int
        Heads of each order.
    rows : int or sequence of int
        Rows of each head, not of the table, at least, or one number for each order: a head has the next prime that no other
        has, and the table about ``rows * heads * len(orders)`` rows, which `num_rows` says.
    vocab_size : int
        Token ids are below it. The multipliers of "xor" depend on it.
    scheme : {"xor", "polynomial"}
    seed : int
        Of the multipliers.
    layer : int
        Number among the layers of a model that have a table: each has multipliers and primes of its own.
    eos : int or sequence of int, optional
        Tokens that end a document: an n-gram does not reach back beyond one. It belongs to the document that it ends.
    bos : int or sequence of int, optional
        Tokens that begin a document: an n-gram does not reach back beyond one either, which belongs to what follows.
    pad : int, optional
        Token of padding. Its positions have the row number `padding_row`, and n-grams do not reach back across it.
    fill : int, optional
        The token that an n-gram has in the place of those that are missing. By default the first of `eos`, else 0.
    token_map : Tensor, optional
        ``(vocab_size,)`` integers, hashed in the place of the tokens: one for all spellings of a word, for instance.
    multipliers : sequence of int, optional
        Of "xor", one for each place in the longest n-gram, in the place of those of `seed`.
    sizes : sequence of int, optional
        Rows of each head, order by order, in the place of `rows`.
    divisible_by : int
        `num_rows` is a multiple of it; rows beyond those of the heads are never used.

    Attributes
    ----------
    num_rows : int
        Rows of the table.
    num_columns : int
        Row numbers of a position: heads of all orders.
    sizes, offsets : tuple of int
        Rows of each head, and where they begin.
    padding_row : int or None
        The row of padding, after those of the heads.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        An argument breaks a rule; a product would not fit into 63 bits.

    Examples
    --------
    >>> import torch
    >>> ngrams = NgramHash(orders=(2, 3), heads=2, rows=1000, vocab_size=50)
    >>> ngrams.num_rows, ngrams.sizes
    (4050, (1009, 1013, 1019, 1021))
    >>> ngrams(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 4])
    """

    orders: tuple[int, ...]
    heads: int
    vocab_size: int
    scheme: str
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_rows: int
    padding_row: int | None

    def __init__(
        self,
        orders: Sequence[int] = (2, 3),
        heads: int = 8,
        rows: int | Sequence[int] | None = None,
        *,
        vocab_size: int = 1 << 20,
        scheme: Literal["xor", "polynomial"] = "xor",
        seed: int = 0,
        layer: int = 0,
        eos: int | Sequence[int] | None = None,
        bos: int | Sequence[int] | None = None,
        pad: int | None = None,
        fill: int | None = None,
        token_map: Tensor | None = None,
        multipliers: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        divisible_by: int = 1,
    ) -> None:
        super().__init__()
        given = (eos, bos, pad, fill, token_map, multipliers, sizes, divisible_by)
        self.constants = HashConstants(orders, heads, rows, vocab_size, scheme, seed, layer, *given)
        for name in ("orders", "heads", "vocab_size", "scheme", "sizes", "offsets", "num_rows", "padding_row"):
            setattr(self, name, getattr(self.constants, name))
        self.num_columns = len(self.sizes)
        # The constants as tensors, by device.
        self._copies: dict[torch.device, tuple[Tensor, Tensor, Tensor, Tensor | None]] = {}
        self._on(torch.device("cpu"))

    # --- published schemes --------------------------------------------------------------------------------------------

    @classmethod
    def engram(
        cls,
        rows: Sequence[int],
        heads: int = 8,
        *,
        token_map: Tensor,
        layers: Sequence[int],
        layer: int,
        seed: int = 0,
        pad_token: int = 2,
        **options: Any,
    ) -> Self:
        """Hash as DeepSeek's Engram does (arXiv:2601.07372, and its demonstration): orders 2, 3, ... of compressed tokens.

        Parameters
        ----------
        rows : sequence of int
            For each order, the least that its heads have ("engram_vocab_size").
        heads : int
        token_map : Tensor
            ``(vocab_size,)``, the compressed id of each token.
        layers, layer : sequence of int, int
            The layers of the model that have a table, in order, and the one that this is for.
        seed : int
        pad_token : int
            The token before the first.
        **options
            `eos`, `bos`, `pad` and `divisible_by` as for the class.
        """
        layers = listed(layers, "layers")
        if layer not in layers:
            raise InvalidValueError(f"layer is {layer} but layers is {layers}; pass one of them")
        if not isinstance(rows, Sequence) or not rows:
            raise InvalidValueError(f"rows is {rows!r} but must have a number for each order; pass [{10**6}, {10**6}]")
        token_map = checked_map(token_map)
        orders, distinct = tuple(range(2, len(rows) + 2)), int(token_map.max()) + 1
        given: Any = {
            "vocab_size": len(token_map),
            "sizes": schemes.head_sizes(rows, heads, layers.index(layer)),
            "multipliers": schemes.numpy_multipliers(orders[-1], distinct, seed, layer),
            "fill": pad_token,
            "token_map": token_map,
        }
        return cls(orders, heads, **{**given, **options})

    @classmethod
    def longcat(cls, vocab_size: int, ratio: float, neighbors: int = 4, splits: int = 4, **options: Any) -> Self:
        """Hash as LongCat-Flash-Lite does (arXiv:2601.21204): polynomials of orders 2 to `neighbors`.

        Parameters
        ----------
        vocab_size : int
        ratio : float
            Rows of a head for each token ("ngram_vocab_size_ratio"). Sizes are the next odd distances from it, not primes.
        neighbors, splits : int
            The longest n-gram and the heads of each order ("emb_neighbor_num", "emb_split_num").
        **options
            `eos`, `bos`, `pad` and `divisible_by` as for the class.
        """
        if not isinstance(ratio, Real) or not 0 < ratio < math.inf:
            raise InvalidValueError(f"ratio is {ratio!r} but must be a number above 0; pass for instance 80.0")
        neighbors, splits = check_size(neighbors, "neighbors", 2), check_size(splits, "splits", 1)
        orders, least = tuple(range(2, neighbors + 1)), int(ratio * check_size(vocab_size, "vocab_size", 1))
        sizes = [least + 2 * head + 1 for head in range(splits * len(orders))]
        given: Any = {"vocab_size": vocab_size, "scheme": "polynomial", "sizes": sizes, "fill": 0}
        return cls(orders, splits, **{**given, **options})

    # --- row numbers --------------------------------------------------------------------------------------------------

    def forward(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the row numbers of the n-grams that end at each token.

        Parameters
        ----------
        tokens : Tensor
            ``(..., time)`` integers, on any device; the host does not wait for it.
        context : Tensor, optional
            ``(..., k)``, tokens before the first: those of a prompt, while a model generates.

        Returns
        -------
        Tensor
            ``(..., time, num_columns)`` int64, on the device of `tokens`: below `num_rows`, heads of the first order first.

        Raises
        ------
        RowIndexError
            A token on the CPU is not below `vocab_size`. Elsewhere, in a compiled model and in ``torch.func.vmap`` it has the
            row number -1, which a table refuses.
        """
        tokens = as_tokens(tokens, self.vocab_size, "tokens")
        multipliers, sizes, offsets, _ = self._on(tokens.device)
        places = self._places(tokens, context)
        hashed = self._mixed(places) if self.scheme == "xor" else _polynomial(places, multipliers, sizes)
        rows = (hashed % sizes + offsets).flatten(-2)
        if self.padding_row is not None:
            rows = rows.masked_fill(torch.eq(tokens, self.constants.pad or 0).unsqueeze(-1), self.padding_row)
        if not can_look_at(tokens):
            rows = rows.masked_fill(beyond(tokens, self.vocab_size).unsqueeze(-1), -1)
        return rows

    def statistics(self, tokens: Tensor) -> NgramStatistics:
        """Count how the n-grams of `tokens`, ``(..., time)``, share the rows."""
        rows, known = self(tokens), as_tokens(tokens, self.vocab_size, "tokens")
        if known.is_meta:
            refuse_layout(known, "tokens")
        # Positions of padding have a row, and no n-gram.
        real = torch.ones_like(known, dtype=torch.bool) if self.padding_row is None else known != self.constants.pad
        places = [place[real] for place in self._places(known)]
        return count_rows(rows, rows[real], [places[:order] for order in self.orders], self.heads)

    def _places(self, tokens: Tensor, context: Tensor | None = None) -> list[Tensor]:
        """Return what is hashed in each place of the n-grams, the last token first, each ``(..., time)``."""
        if context is not None:
            context = as_tokens(context, self.vocab_size, "context")
        places = ngrams_of(tokens, context, self.constants)
        token_map = self._on(tokens.device)[3]
        return places if token_map is None else [token_map[place.clamp(0, self.vocab_size - 1)] for place in places]

    def _mixed(self, places: list[Tensor]) -> Tensor:
        """Return the hash of the n-grams of each order, ``(..., time, orders, 1)``."""
        parts = [place * multiplier for place, multiplier in zip(places, self.constants.numbers, strict=True)]
        mixed = list(itertools.accumulate(parts, torch.bitwise_xor))
        found = [mixed[order - 1] for order in self.orders]
        return torch.stack(found, -1).unsqueeze(-1)

    # --- nn.Module ---------------------------------------------------------------------------------------------------

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the buffers on a device; tokens may be on another than the module, which reads ahead from a loader's."""
        if device not in self._copies:
            shape, known = (len(self.orders), self.heads), self.constants
            with torch.inference_mode(False):
                numbers = torch.tensor(known.numbers, dtype=torch.int64, device="cpu").to(device)
                sizes = torch.tensor(self.sizes, dtype=torch.int64, device="cpu").view(shape).to(device)
                offsets = torch.tensor(self.offsets, dtype=torch.int64, device="cpu").view(shape).to(device)
                token_map = None if known.token_map is None else known.token_map.to(device)
            self._copies[device] = numbers, sizes, offsets, token_map
        return self._copies[device]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NgramHash:
        super()._apply(fn, recurse)
        moved = fn(torch.empty(0, dtype=torch.int64, device="cpu"))
        if not moved.is_meta:
            # Now, as a model may be compiled, or captured in a CUDA graph, when it runs.
            self._on(moved.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Without tensors of a device that may be missing where this is unpickled.
        return {**super().__getstate__(), "_copies": {}}

    def get_extra_state(self) -> Tensor:
        """Return the constants for a state dict: rows trained with others would be those of other n-grams."""
        return self.constants.as_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Raise `InvalidValueError` unless `state` has the constants of this hash."""
        if not isinstance(state, Tensor) or not torch.equal(state.cpu(), self.constants.as_tensor()):
            raise InvalidValueError(
                f"the rows of this state dict were trained with another hash than {self}; make the NgramHash with the same "
                "arguments (rows, vocab_size, seed, layer, eos and so on)"
            )

    def extra_repr(self) -> str:
        """Describe the hash."""
        return f"orders={self.orders}, heads={self.heads}, num_rows={self.num_rows}, scheme={self.scheme!r}"


def _polynomial(places: list[Tensor], powers: Tensor, sizes: Tensor) -> Tensor:
    """Return the hash of the n-grams for each head, ``(..., time, orders, heads)``.

    Parameters
    ----------
    places : list of Tensor
        What is hashed in each place, each ``(..., time)``.
    powers : Tensor
        ``(orders, heads, places)``.
    sizes : Tensor
        ``(orders, heads)``.
    """
    total = torch.zeros_like(sizes)
    for place, power in zip(places, powers.unbind(-1), strict=True):
        # Each term is reduced, so that the sum stays below 2**63.
        total = total + place[..., None, None] * power % sizes
    return total
