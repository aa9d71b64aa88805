"""Modules that pool rows by feature, of ids in any form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.feature import FeatureModules
from speedtransfer.nn.feature_ids import by_feature
from speedtransfer.nn.jagged import Bags, flat_weights, of_keys, of_part

MODES = ("sum", "mean", "max")


class Given(NamedTuple):
    """The arguments of a lookup."""

    ids: Any
    weights: Any


class BagModules(FeatureModules):
    """Modules of one table each, whose rows are pooled by feature; `MultiEmbeddingBag` has a forward of its own.

    Attributes
    ----------
    features, modes : dict of str to str
        The table of each feature, and its mode.
    include_last_offset, concatenate : bool
    """

    features: dict[str, str]
    modes: dict[str, str]
    include_last_offset: bool
    concatenate: bool

    def forward(self, ids: Any, per_sample_weights: Any = None) -> Any:
        """Return the pooled rows of `ids`, as :meth:`MultiEmbeddingBag.forward`."""
        bags, found = self._bags(Given(ids, per_sample_weights)), {}
        for name, part in bags.parts().items():
            module: Any = self._modules[self.features[name]]
            one = Bags.of({name: part})._replace(weights=part.weights)
            more = {"max_norm": module.max_norm, "norm_type": module.norm_type}
            index = part.values.to(module.weight.device)
            found[name] = one.pooled(module.weight, index, self.modes, module.padding_idx, **more)
        return self._arranged(found, bags.form)

    def _arranged(self, parts: dict[str, Tensor], form: type) -> Any:
        """Return what forward does, of the pooled rows of each feature."""
        found = [parts[name] for name in self.features]
        if self.concatenate or form is Tensor:
            return torch.cat(found, 1) if self.concatenate else torch.stack(found, 1)
        return dict(zip(self.features, found, strict=True)) if form is dict else found

    # --- ids in any form ------------------------------------------------------------------------------------------------

    def _bags(self, given: Given) -> Bags:
        """Return the ids of a lookup, features of one mode after the other; raise where they are no bags."""
        ids: Any = given.ids
        weights = given.weights
        columns = isinstance(ids, Tensor) and not ids.is_nested
        ids = self._columns(ids, "ids") if columns else ids
        keyed = callable(getattr(ids, "offsets", None)) and callable(getattr(ids, "keys", None))
        order, theirs = sorted(self.features, key=lambda name: MODES.index(self.modes[name])), {}
        if keyed:
            self._check_names(list(ids.keys()))
            bags, all_weights = of_keys(list(ids.keys()), ids)
            if weights is None and all_weights is not None:
                theirs = {name: part.weights for name, part in bags._replace(weights=all_weights).parts().items()}
            if [self.modes[name] for name in bags.counts] != [self.modes[name] for name in order]:
                parts = bags.parts()
                bags = Bags.of({name: parts[name] for name in order})
        else:
            given_ids = self._by_feature(ids, "ids")
            self._check_names(list(given_ids))
            parts = {name: of_part(name, given_ids[name], self.include_last_offset) for name in order}
            bags = Bags.of(parts)
            theirs = {name: part.weights for name, part in parts.items() if part.weights is not None}
        counts = bags.counts
        other = next((name for name in order if counts[name] != counts[order[0]]), None)
        if self.concatenate and other is not None:
            raise InvalidValueError(
                f"feature {other!r} has {counts[other]} bags but {order[0]!r} has {counts[order[0]]}, so that they are no "
                "columns of one tensor; pass as many of each, or leave concatenate out"
            )
        form: type = Tensor if columns else dict if keyed or isinstance(ids, Mapping) else list
        return self._weighed(bags._replace(form=form), theirs if weights is None else weights)

    def _columns(self, given: Tensor, what: str) -> list[Tensor]:
        """Return the ids of each feature, ``(bags, n)``."""
        if given.dim() not in (2, 3) or given.shape[1] != len(self.features):
            raise InvalidValueError(
                f"{what} has shape {tuple(given.shape)} but must be (bags, {len(self.features)}), a column for each feature, "
                "or (bags, features, n); pass a list or a dict for other shapes"
            )
        return [part.unsqueeze(1) if given.dim() == 2 else part for part in given.unbind(1)]

    def _by_feature(self, given: Any, what: str) -> Mapping[str, Any]:
        """Return what is given for each feature, by name."""
        if not isinstance(given, Mapping | list | tuple):
            raise InvalidTypeError(
                f"{what} is a {type(given).__name__} but must be of each of {len(self.features)} features; pass a list or a "
                "dict, or as ids what has keys(), values() and offsets()"
            )
        return by_feature(given, self.features, what)

    def _check_names(self, names: list[str]) -> None:
        """Raise unless `names` are those of all features."""
        for place, name in enumerate(names):
            if name in names[:place]:
                raise InvalidValueError(f"ids has feature {name!r} twice; pass all bags of it once")
            self._by_feature({name: None}, "ids")
        missing = next((name for name in self.features if name not in names), None)
        if missing is not None:
            raise InvalidValueError(
                f"ids has no {missing!r}, a feature of table {self.features[missing]!r}; pass bags for it, which may be empty"
            )

    def _weighed(self, bags: Bags, given: Any) -> Bags:
        """Return `bags` with weights `given` by feature, or in columns; those of other features are 1."""
        given = self._columns(given, "per_sample_weights") if isinstance(given, Tensor) else given
        parts = {name: part for name, part in self._by_feature(given, "per_sample_weights").items() if part is not None}
        if not parts:
            return bags
        sizes = dict(zip(bags.counts, bags.sizes().split([*bags.counts.values()]), strict=True))
        flat = {name: flat_weights(f"feature {name!r}", part, sizes[name]) for name, part in parts.items()}
        for name, part in flat.items():
            if self.modes[name] != "sum":
                raise InvalidValueError(
                    f"feature {name!r} has weights but its mode is {self.modes[name]!r}; weights go with mode 'sum'"
                )
            if len(part) != bags.lengths[name]:
                raise InvalidValueError(
                    f"feature {name!r} has {len(part)} weights but {bags.lengths[name]} ids; pass a weight for each id"
                )
        like = next(iter(flat.values()))
        weights = [flat.get(name, like.new_ones(count)) for name, count in bags.lengths.items()]
        return bags._replace(weights=torch.cat(weights))
