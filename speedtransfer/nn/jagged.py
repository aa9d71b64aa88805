"""Bags of ids of several features, given in one of many forms, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.cuda import to_device
from speedtransfer.errors import InvalidTypeError, InvalidValueError


class Part(NamedTuple):
    """The ids of one feature, where its bags begin in these, and the weights that come with them."""

    values: Tensor
    begins: Tensor
    weights: Any = None


class Bags(NamedTuple):
    """The bags of several features, one feature after the other.

    Attributes
    ----------
    values : Tensor
        The ids of all, ``(n,)``.
    lengths, counts : dict of str to int
        How many ids, and how many bags, each feature has.
    offsets : Tensor
        ``(bags,)`` int64, where each bag begins among the ids of all.
    source : tuple of Tensor
        What the ids were given in.
    weights : Tensor, optional
        A weight for each id of all.
    form : {dict, list, Tensor}
        What the results are to be in, as the ids were.
    """

    values: Tensor
    lengths: dict[str, int]
    counts: dict[str, int]
    offsets: Tensor
    source: tuple[Tensor, ...]
    weights: Tensor | None = None
    form: type = dict

    @staticmethod
    def of(parts: dict[str, Part]) -> Bags:
        """Return those of some features, without weights."""
        given = [_integers(name, part.values) for name, part in parts.items()]
        lengths = {name: len(part.values) for name, part in parts.items()}
        starts = itertools.accumulate(lengths.values(), initial=0)
        begins = [part.begins + start for part, start in zip(parts.values(), starts, strict=False)]
        counts = {name: len(part.begins) for name, part in parts.items()}
        return Bags(_joined(given), lengths, counts, _joined(begins), tuple(given))

    def parts(self) -> dict[str, Part]:
        """Return the same by feature."""
        lengths, counts = [*self.lengths.values()], [*self.counts.values()]
        starts = itertools.accumulate(lengths, initial=0)
        begins = [part - start for part, start in zip(self.offsets.split(counts), starts, strict=False)]
        weights = [None] * len(begins) if self.weights is None else self.weights.split(lengths)
        parts = zip(self.counts, self.values.split(lengths), begins, weights, strict=True)
        return {name: Part(*part) for name, *part in parts}

    def sizes(self) -> Tensor:
        """Return how many ids each bag has."""
        return torch.cat([self.offsets, self.offsets.new_full((1,), len(self.values))]).diff()

    def pooled(self, rows: Tensor, index: Tensor, modes: Mapping[str, str], padding_idx: Any, **more: Any) -> Tensor:
        """Return the sums, means and maxima of the bags, ``(bags, dim)``, of which each id has the row at its `index` (n,).

        `padding_idx` is an index, None, or one of these by feature.
        """
        found, bag, at, offsets = [], 0, 0, to_device(self.offsets, index.device)
        by_name = padding_idx if isinstance(padding_idx, Mapping) else dict.fromkeys(self.counts, padding_idx)
        # Features of one mode follow each other.
        for (mode, padding), some in itertools.groupby(self.counts, lambda name: (modes[name], by_name[name])):
            names = list(some)
            end, stop = at + sum(self.lengths[name] for name in names), bag + sum(self.counts[n] for n in names)
            given: dict[str, Any] = {"mode": mode, "padding_idx": padding, **more}
            if self.weights is not None and mode == "sum":
                given["per_sample_weights"] = self.weights[at:end]
            own = offsets if stop - bag == len(offsets) else offsets[bag:stop] - at
            found.append(F.embedding_bag(index[at:end], rows, own, **given))
            at, bag = end, stop
        return found[0] if len(found) == 1 else torch.cat(found)


def of_keys(names: list[str], ids: Any) -> tuple[Bags, Any]:
    """Return the bags of a KeyedJaggedTensor, or anything like it, and the weights that it has."""
    values, offsets = ids.values(), ids.offsets().long()
    alike = [(len(offsets) - 1) // len(names)] * len(names)
    counts = list(ids.stride_per_key()) if hasattr(ids, "stride_per_key") else alike
    if len(offsets) != sum(counts) + 1:
        raise InvalidValueError(
            f"ids has {len(offsets)} offsets, so that it is not known which are of feature {names[0]!r}; pass as many bags of "
            f"each of {len(names)} features, and the end of the last"
        )
    places = list(itertools.accumulate(counts, initial=0))
    bounds = offsets[places].tolist()
    # Feature by feature only where something is wrong.
    if bounds[0] or bounds[-1] > len(values) or bounds != sorted(bounds) or not _rises(offsets):
        for name, place, end in zip(names, places, places[1:], strict=False):
            _check(name, offsets[place : end + 1].cpu(), len(values), place)
    lengths = {name: stop - start for name, start, stop in zip(names, bounds, bounds[1:], strict=False)}
    weights, used = _weights_with(ids), slice(bounds[0], bounds[-1])
    if weights is not None and len(weights) != len(values):
        raise InvalidValueError(f"ids has {len(weights)} weights but {len(values)} values; pass a weight for each")
    bags = Bags(values[used], lengths, dict(zip(names, counts, strict=True)), offsets[:-1].clone(), (values,))
    return bags, None if weights is None else weights[used]


def _rises(offsets: Tensor) -> bool:
    """Tell whether offsets never fall, as far as the host sees."""
    return offsets.device.type != "cpu" or not bool((offsets.numpy()[1:] < offsets.numpy()[:-1]).any())


def of_part(name: str, given: Any, include_last_offset: bool) -> Part:
    """Return the ids of a feature."""
    if isinstance(given, tuple) and len(given) == 2:
        values, offsets = (_tensor(name, part) for part in given)
        if values.dim() != 1 or offsets.dim() != 1 or offsets.is_floating_point():
            raise InvalidValueError(
                f"feature {name!r} has ids of shape {tuple(values.shape)} and offsets of shape {tuple(offsets.shape)} and "
                f"dtype {offsets.dtype}; pass 1-D tensors of integers, or 2-D ids alone"
            )
        _check(name, offsets, len(values), exact=include_last_offset)
        offsets = offsets.long()
        return Part(values, offsets[:-1] if include_last_offset else offsets)
    if callable(getattr(given, "offsets", None)) and not _has_holes(given):
        values, offsets = given.values(), given.offsets().long()
        _check(name, offsets, len(values), exact=True)
        return Part(values, offsets[:-1], _weights_with(given))
    values = _tensor(name, given)
    if values.is_nested or values.dim() != 2:
        shape = "nested" if values.is_nested else f"of shape {tuple(values.shape)}"
        raise InvalidValueError(
            f"the ids of feature {name!r} are {shape} but bags are 2-D; pass (bags, n), (values, offsets), or a nested tensor "
            "(layout=torch.jagged) without holes"
        )
    return Part(values.reshape(-1), torch.arange(len(values), device=values.device) * values.shape[1])


def of_nested(ids: Any, weights: Any) -> tuple[Tensor, Tensor, Any]:
    """Return the ids of a nested tensor of bags, where these begin and the last ends, and their weights as 1-D."""
    if ids.layout != torch.jagged or _has_holes(ids):
        raise InvalidValueError(
            f"input is a nested tensor ({ids.layout}, {ids.dim()}-D) but bags are 2-D and jagged; pass one of "
            "layout=torch.jagged without holes, or 1-D ids and offsets"
        )
    offsets = ids.offsets()
    return ids.values(), offsets, None if weights is None else flat_weights("input", weights, offsets.diff())


def _tensor(name: str, given: Any) -> Tensor:
    try:
        # A tensor as it is: torch would move it to the default device.
        found = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
        if found.layout not in (torch.strided, torch.jagged):
            raise TypeError(f"its layout is {found.layout}")
        return found
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTypeError(
            f"the ids of feature {name!r} are a {type(given).__name__} that is no tensor ({error}); pass bags of different "
            "lengths as (values, offsets) or as a nested tensor, and their weights as per_sample_weights="
        ) from None


def _integers(name: str, ids: Tensor) -> Tensor:
    """Return ids in a dtype that those of all features can have; booleans, which would be 0 and 1 there, are refused."""
    if ids.dtype == torch.bool:
        raise InvalidTypeError(f"the ids of feature {name!r} are torch.bool but must be integers; pass ids, not a mask")
    return ids.long() if ids.dtype in (torch.uint16, torch.uint32, torch.uint64) else ids


def _joined(parts: list[Tensor]) -> Tensor:
    device = next((part.device for part in parts if part.device.type != "cpu"), None)
    return torch.cat(parts if device is None else [to_device(part, device) for part in parts])


def _has_holes(ids: Any) -> bool:
    """Tell whether a nested tensor is not (bags, n), or its values are not all of bags."""
    return isinstance(ids, Tensor) and (ids.dim() != 2 or ids.lengths() is not None)  # type: ignore[attr-defined]


def _check(name: str, offsets: Tensor, count: int, place: int = 0, exact: bool = False) -> None:
    """Raise unless bags begin at `offsets` in `count` ids, as far as the host sees; `exact`: the last is the end of all.

    Torch's kernels on the CPU address memory by them. `place`: of the first, where other features come before.
    """
    if offsets.device.type != "cpu":
        return
    array = offsets.numpy()
    if (array[:1].any() and not place) or (not len(array) and (count or exact)):
        raise InvalidValueError(
            f"offsets of feature {name!r} begin with {array[:1].tolist()}; pass where each bag begins, the first at 0"
        )
    check_order(array, f"feature {name!r}", place)
    if len(array) and (array[-1] > count or (exact and array[-1] != count)):
        raise InvalidValueError(
            f"offsets of feature {name!r} go to {array[-1]} but there are {count} ids; pass the ids and offsets of one batch"
        )


def check_order(offsets: np.ndarray, of: str, place: int = 0) -> None:
    """Raise where offsets, the first of which is at `place`, fall."""
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        bad = 1 + int(falls.argmax())
        raise InvalidValueError(
            f"offsets[{place + bad}] of {of} is {offsets[bad]} after {offsets[bad - 1]} but bags follow each other; pass "
            "offsets that never fall"
        )


def _weights_with(ids: Any) -> Any:
    return ids.weights_or_none() if hasattr(ids, "weights_or_none") else None


def flat_weights(of: str, weights: Any, sizes: Tensor) -> Tensor:
    """Return weights as 1-D; raise where they are 2-D or nested in bags of other `sizes`, as far as the host sees."""
    if callable(getattr(weights, "offsets", None)) and getattr(weights, "layout", torch.jagged) == torch.jagged:
        flat = weights.values()
        given = sizes - 1 if _has_holes(weights) else weights.offsets().diff()
    else:
        try:
            whole = weights if isinstance(weights, Tensor) else torch.as_tensor(weights, device="cpu")
            flat = whole.reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidTypeError(
                f"the weights of {of} are a {type(weights).__name__} that is no tensor ({error}); pass a tensor like the ids"
            ) from None
        given = torch.full((len(whole),), whole.shape[1], device="cpu") if whole.dim() == 2 else sizes
    if given.device.type == sizes.device.type == "cpu" and given.tolist() != sizes.tolist():
        raise InvalidValueError(
            f"the weights of {of} are in other bags than its ids; pass a weight for each id, in the shape of the ids"
        )
    return flat
