"""Check the arguments of an n-gram hash, and compute the constants that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, suggest
from speedtransfer.ngrams import schemes

SCHEMES = ("xor", "polynomial")
_MAX = 2**63


class HashConstants:
    """The constants of :class:`~speedtransfer.NgramHash`, whose arguments these are.

    Attributes
    ----------
    numbers : list
        Of "xor" a multiplier for each place in the longest n-gram, ``(places,)``; of "polynomial" the powers of `vocab_size`
        modulo the size of each head, ``(orders, heads, places)``, zero beyond an order.
    sizes, offsets : tuple of int
        Rows of each head, order by order, and where they begin.
    """

    def __init__(
        self,
        orders: Sequence[int],
        heads: int,
        rows: int | Sequence[int] | None,
        vocab_size: int,
        scheme: str,
        seed: int,
        layer: int,
        eos: int | Sequence[int] | None,
        bos: int | Sequence[int] | None,
        pad: int | None,
        fill: int | None,
        token_map: Tensor | None,
        multipliers: Sequence[int] | None,
        sizes: Sequence[int] | None,
        divisible_by: int,
    ) -> None:
        self.orders = tuple(check_size(order, "orders", 1) for order in listed(orders, "orders"))
        if not self.orders or sorted(set(self.orders)) != list(self.orders):
            raise InvalidValueError(f"orders is {self.orders} but must be ascending numbers; pass for instance (2, 3)")
        self.heads, self.vocab_size = check_size(heads, "heads", 1), check_size(vocab_size, "vocab_size", 1)
        if scheme not in SCHEMES:
            raise InvalidValueError(f"scheme is {scheme!r}, not one of its values{suggest(str(scheme), SCHEMES)}")
        self.scheme = scheme
        self.eos, self.bos = self._tokens(eos, "eos"), self._tokens(bos, "bos")
        self.pad = None if pad is None else self._token(pad, "pad")
        self.fill = (self.eos[0] if self.eos else 0) if fill is None else self._token(fill, "fill")
        self.token_map = None if token_map is None else checked_map(token_map, self.vocab_size)
        # One more than the largest number that is hashed.
        self._distinct = self.vocab_size if self.token_map is None else int(self.token_map.max()) + 1
        layer = check_size(layer, "layer")
        self.sizes = self._sizes(rows, sizes, layer)
        self.offsets = tuple(sum(self.sizes[:head]) for head in range(len(self.sizes)))
        self.padding_row = None if self.pad is None else sum(self.sizes)
        least, unit = sum(self.sizes) + (self.pad is not None), check_size(divisible_by, "divisible_by", 1)
        self.num_rows = -(-least // unit) * unit
        if self.num_rows >= _MAX:
            raise InvalidValueError(
                f"the table has {self.num_rows} rows but numbers of rows are below 2**63; pass fewer"
            )
        self.numbers: list[Any] = (
            self._multipliers(multipliers, seed, layer) if scheme == "xor" else self._powers(multipliers)
        )

    def _token(self, token: Any, name: str) -> int:
        token = check_size(token, name)
        if token >= self.vocab_size:
            raise InvalidValueError(f"{name} is {token} but vocab_size is {self.vocab_size}; pass a token below it")
        return token

    def _tokens(self, tokens: int | Sequence[int] | None, name: str) -> tuple[int, ...]:
        tokens = as_list(tokens)
        if not isinstance(tokens, Sequence) or isinstance(tokens, str):
            tokens = () if tokens is None else (tokens,)
        return tuple(self._token(token, name) for token in tokens)

    def _sizes(self, rows: int | Sequence[int] | None, sizes: Sequence[int] | None, layer: int) -> tuple[int, ...]:
        if (rows is None) == (sizes is None):
            raise InvalidValueError(
                f"rows is {rows!r} and sizes is {sizes!r}, of which one must be given; pass rows=1_000_003, for instance: the "
                "least number of rows of a head"
            )
        if rows is not None:
            rows = as_list(rows)
            each = [*rows] if isinstance(rows, Sequence) and not isinstance(rows, str) else [rows] * len(self.orders)
            if len(each) != len(self.orders):
                raise InvalidValueError(
                    f"rows is {each} but there are {len(self.orders)} orders; pass a number for each, or one for all"
                )
            sizes = schemes.head_sizes([check_size(number, "rows", 1) for number in each], self.heads, layer)
        found = tuple(check_size(size, "sizes", 1) for size in listed(sizes, "sizes"))
        if len(found) != self.heads * len(self.orders):
            raise InvalidValueError(
                f"sizes has {len(found)} numbers but there are {self.heads} heads of {len(self.orders)} orders; pass "
                "one for each"
            )
        return found

    def _multipliers(self, given: Sequence[int] | None, seed: int, layer: int) -> list[int]:
        count = self.orders[-1]
        if given is None:
            return schemes.splitmix_multipliers(count, self._distinct, check_size(seed, "seed"), layer)
        numbers = [check_size(number, "multipliers", 1) for number in listed(given, "multipliers")]
        if len(numbers) != count:
            raise InvalidValueError(
                f"multipliers has {len(numbers)} numbers but an n-gram has up to {count} places; pass one for each"
            )
        if max(numbers) * (self._distinct - 1) >= _MAX:
            raise InvalidValueError(
                f"the multiplier {max(numbers)} times the token {self._distinct - 1} exceeds 63 bits; pass smaller multipliers"
            )
        return numbers

    def _powers(self, given: Sequence[int] | None) -> list[Any]:
        if given is not None:
            raise InvalidValueError(
                "multipliers is given but scheme='polynomial' has powers of vocab_size; leave it out"
            )
        count = self.orders[-1]
        if (self._distinct - 1) * (max(self.sizes) - 1) >= _MAX // count:
            raise InvalidValueError(
                f"vocab_size {self.vocab_size} times {max(self.sizes)} rows of a head exceeds 63 bits; pass fewer rows, or "
                "scheme='xor'"
            )
        found = []
        for place, order in enumerate(self.orders):
            sizes = self.sizes[place * self.heads : (place + 1) * self.heads]
            found.append([schemes.powers(self.vocab_size, order, size) + [0] * (count - order) for size in sizes])
        return found

    def as_tensor(self) -> Tensor:
        """Return all that decides row numbers, int64, for comparing."""
        parts: list[Any] = [self.orders, self.sizes, self.numbers, self.eos, self.bos]
        parts.append(
            [self.fill, -1 if self.pad is None else self.pad, self.vocab_size, self.num_rows, self.scheme == "xor"]
        )
        flat = [torch.tensor(part, dtype=torch.int64, device="cpu").flatten() for part in parts]
        flat.append(torch.empty(0, dtype=torch.int64, device="cpu") if self.token_map is None else self.token_map)
        return torch.cat([torch.tensor([len(part) for part in flat], dtype=torch.int64, device="cpu"), *flat])


def as_list(values: Any) -> Any:
    """Return arrays and tensors as Python numbers and lists of them, and anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def listed(values: Any, name: str) -> list[Any]:
    """Return `values`, a sequence, as a list; raise `InvalidTypeError` where it is none."""
    values = as_list(values)
    if isinstance(values, str):
        raise InvalidTypeError(f"{name} is {values!r} (str) but must be a number or a sequence of numbers; pass these")
    if not isinstance(values, Iterable):
        raise InvalidTypeError(f"{name} is {values!r} but must be a sequence of numbers; pass ({values!r},)")
    return list(values)


def as_integers(values: Any, name: str) -> Tensor:
    """Return `values` as a tensor; raise `InvalidTypeError` where it holds no integers."""
    # A tensor as it is: under torch.device("meta") torch would take its values away.
    found = values if isinstance(values, Tensor) else _tensor_of(values, name)
    if found.is_nested or found.layout != torch.strided:
        raise InvalidTypeError(
            f"{name} is nested or sparse ({found.layout}) but n-grams follow rows of one length; pass "
            f"torch.nested.to_padded_tensor({name}, pad), or {name}.to_dense()"
        )
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise InvalidTypeError(f"{name} is of dtype {found.dtype} but must hold integers; pass {name}.long()")
    return found


def _tensor_of(values: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InvalidTypeError(
            f"{name} is a {type(values).__name__} that makes no tensor ({reason}); pass a tensor of integers"
        ) from error


def checked_map(token_map: Any, vocab_size: int | None = None) -> Tensor:
    """Return a map of tokens, ``(vocab_size,)``, as int64 on the CPU.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        It holds no integers, negative ones, or none; it is on the meta device; it has another size.
    """
    token_map = as_integers(token_map, "token_map")
    if token_map.is_meta:
        raise InvalidValueError('token_map is on the meta device, without values; make it with device="cpu"')
    wanted = (token_map.numel() or 1,) if vocab_size is None else (vocab_size,)
    if tuple(token_map.shape) != wanted:
        raise InvalidValueError(
            f"token_map has shape {tuple(token_map.shape)} but must be {wanted}; pass a number for each token below vocab_size"
        )
    if int(token_map.min()) < 0:
        raise InvalidValueError(
            f"token_map has {int(token_map.min())} but what is hashed is 0 or more; number from 0 on"
        )
    return token_map.detach().to("cpu", torch.int64).clone()
