"""Pooled features of several tables in one: a model that looks them up together moves their rows in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from speedtransfer.errors import InvalidTypeError, InvalidValueError, suggest
from speedtransfer.nn.active import activate, rows_for_lookup
from speedtransfer.nn.bag import EmbeddingBag
from speedtransfer.nn.bag_modules import MODES, BagModules, Given
from speedtransfer.nn.bag_sums import pool, without_padding
from speedtransfer.nn.feature import device_of, find
from speedtransfer.nn.feature_ids import FeatureIds, FeatureRows, found_by
from speedtransfer.nn.jagged import Bags
from speedtransfer.nn.lookup import apart_from_padding
from speedtransfer.nn.multi import MultiEmbedding, by_name
from speedtransfer.nn.options import TableOptions, takes_options
from speedtransfer.nn.ticket import FoundRows, Ticket, rows_in
from speedtransfer.nn.tracing import in_transform, refuse_to_export, unrecorded
from speedtransfer.nn.vocabulary_lookup import refuse_without_rows
from speedtransfer.optim import UsedFeatures, find_handle


class MultiEmbeddingBag(BagModules, MultiEmbedding):
    """Pooled features of several tables of one width, whose rows are in one: one gather and one scatter a step.

    Takes the place of ``nn.ModuleDict({name: nn.EmbeddingBag(n, dim)})`` and its loop over features: with the same seed it has
    the same numbers, and it has the same state dict. A table may serve several features. Its one parameter, `weight`, has the
    rows of all tables.

    Parameters
    ----------
    num_embeddings : sequence of int, or mapping of str to int
        The rows of each table. A mapping names the tables.
    embedding_dim : int
        Of all tables.
    features : mapping of str to str, optional
        The name of the table of each feature. By default each table has one, of its name.
    mode : {"sum", "mean", "max"}, or mapping of str to these
        Of all features, or of each.
    padding_idx : int, or sequence or mapping like `num_embeddings`, optional
        The row of every table, or of each, that bags leave out (None: none).
    include_last_offset : bool
        Whether offsets that are given with ids have the end of the last bag too.
    concatenate : bool
        Return one tensor, ``(bags, features * embedding_dim)``.
    max_norm, norm_type, sparse, device, dtype
        As in :class:`~speedtransfer.Embedding`, for all tables.
    memory, path, idle, storage_dtype, state_dtype, scale_block, layout, cache_rows, cache_counts, process_group,
    comm_dtype
        As in :class:`~speedtransfer.Embedding`, for the one table.
    vocabulary : Vocabulary, optional
        As in :class:`~speedtransfer.MultiEmbedding`: gives ids of all tables rows as they come.

    Notes
    -----
    ``m[name]`` is a table as a feature of a :class:`~speedtransfer.MultiEmbedding`: it looks rows up, which are not pooled,
    and has a `weight`. A table that nothing came to in backward has no gradient.
    """

    _replaces = (nn.EmbeddingBag, EmbeddingBag)
    _common = ("embedding_dim", "max_norm", "norm_type", "sparse", "include_last_offset")
    _taken = (*MultiEmbedding._taken, "concatenate", "features", "include_last_offset", "modes")

    @takes_options
    def __init__(
        self,
        num_embeddings: Sequence[int] | Mapping[str, int],
        embedding_dim: int,
        features: Mapping[str, str] | None = None,
        mode: str | Mapping[str, str] = "mean",
        padding_idx: Any = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        sparse: bool = False,
        include_last_offset: bool = False,
        concatenate: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        if isinstance(embedding_dim, Iterable):
            dims = by_name(embedding_dim)
            other = next((name for name, dim in dims.items() if dim != next(iter(dims.values()))), None)
            raise InvalidValueError(
                f"embedding_dim is {embedding_dim!r} but tables of one MultiEmbeddingBag have one width, "
                + (
                    "which is one number"
                    if other is None
                    else f"and that of {other!r} is another; make one for each width"
                )
            )
        about: Any = {"device": device, "dtype": dtype, **options}
        tables = by_name(num_embeddings) if isinstance(num_embeddings, Iterable) else {}
        served = _served(features, tables)
        for name, table in served.items():
            if tables and table not in tables:
                raise InvalidValueError(
                    f"feature {name!r} is of {table!r}, which is not a table{suggest(str(table), tables)}"
                )
        if isinstance(num_embeddings, Iterable) and not tables:
            raise InvalidValueError("num_embeddings is empty; pass the rows of at least one table")
        idle = next((table for table in tables if table not in served.values()), None)
        if idle is not None:
            raise InvalidValueError(
                f"table {idle!r} serves no feature; leave it out, or name it in features: {{'...': {idle!r}}}"
            )
        modes = dict(mode) if isinstance(mode, Mapping) else dict.fromkeys(served, mode)
        for name in [*served, *modes]:
            if name not in served or modes.get(name) not in MODES:
                raise InvalidValueError(
                    f"mode of feature {name!r} is {modes.get(name)!r} but the features are {list(served)} and modes are "
                    f"{list(MODES)}; pass one of these for each"
                )
        more = False, sparse, _weight, _freeze
        super().__init__(num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, *more, **about)
        self.features, self.modes = served, modes
        self.include_last_offset, self.concatenate = include_last_offset, concatenate
        self._feature_ids = FeatureIds({name: self._modules[table] for name, table in served.items()}, self._keys)

    @classmethod
    @takes_options
    def from_modules(
        cls,
        modules: Iterable[Any] | Mapping[str, Any],
        features: Mapping[str, str] | None = None,
        concatenate: bool = False,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Make one of ``nn.EmbeddingBag`` modules, with copies of the weights that they have.

        Parameters
        ----------
        modules : nn.ModuleList, nn.ModuleDict, sequence or mapping of nn.EmbeddingBag
            Alike but for their rows, `mode` and `padding_idx`.
        features, concatenate
            As in the class; a feature has the mode of its table.
        memory, path, idle, storage_dtype, state_dtype, scale_block, layout, cache_rows, cache_counts
            As in :class:`~speedtransfer.Embedding`.

        Raises
        ------
        InvalidTypeError, InvalidValueError
            A module is no ``nn.EmbeddingBag``, or is not like the first.
        """
        tables = by_name(modules)
        for name, module in tables.items():
            if getattr(module, "scale_grad_by_freq", False):
                raise InvalidValueError(
                    f"scale_grad_by_freq of {name!r} is True, which tables that are looked up at once do not have; leave that "
                    "module out"
                )
        served = _served(features, tables)
        modes = {name: getattr(tables.get(table), "mode", "mean") for name, table in served.items()}
        return cls._of(modules, options, {"features": served, "mode": modes, "concatenate": concatenate})

    @unrecorded
    def forward(self, ids: Any, per_sample_weights: Any = None) -> Any:
        """Look up the ids of all features at once, and pool the rows of each bag.

        Parameters
        ----------
        ids : sequence or mapping, KeyedJaggedTensor or like it, Tensor, or Ticket
            Of each feature: 2-D ids, ``(bags, n)``; a pair of 1-D ids and the offsets where bags begin in these; a nested
            tensor (``torch.jagged``), or anything with ``values()`` and ``offsets()``. Or one object with ``keys()``,
            ``values()`` and ``offsets()`` (with the end of the last bag) for all. Or a tensor, ``(bags, features)`` for bags
            of one id, or ``(bags, features, n)``. Or the ticket that `prefetch` has returned.
        per_sample_weights : sequence or mapping, optional
            A weight for each id of some features of mode "sum", like their ids; by default what ``weights_or_none()`` of the
            ids returns.

        Returns
        -------
        dict or list of Tensor, or Tensor
            ``(bags, embedding_dim)`` of each feature, by name unless `ids` is a sequence; ``(bags, features, embedding_dim)``
            if it is a tensor; and with `concatenate` ``(bags, features * embedding_dim)``.

        Raises
        ------
        InvalidValueError, InvalidTypeError
            Offsets fall or go beyond the ids, a feature is missing, twice or not known, or is weighted and no sum. Nothing is
            read, and no row has changed.
        RowIndexError
            An id is not below the rows of its table.
        """
        refuse_to_export(self)
        weight = self.weight
        found = find(self, weight, Given(ids, per_sample_weights))
        bags: Bags = found.bags
        if bags.weights is not None and bags.weights.dtype != weight.dtype:
            raise InvalidTypeError(
                f"per_sample_weights have dtype {bags.weights.dtype} but rows have {weight.dtype}; pass weights of that dtype"
            )
        names, order = list(self.features), list(bags.counts)
        whole = self.concatenate or bags.form is Tensor
        used = UsedFeatures(self._every() if whole else 0)
        pooled = self._pool(weight, found, used)
        if not whole:
            parts = self._split(pooled, bags.counts, used)
            return self._arranged(dict(zip(order, parts, strict=True)), bags.form)
        columns = pooled.view(len(order), bags.counts[order[0]], self.embedding_dim)
        columns = (columns if names == order else columns[[order.index(name) for name in names]]).transpose(0, 1)
        return columns.flatten(1) if self.concatenate else columns.contiguous()

    def _pool(self, weight: Any, found: FeatureRows, used: UsedFeatures) -> Tensor:
        """Return the pooled rows of all bags, ``(bags, dim)``, whose gradient is one of the features that are `used`."""
        handle, bags = find_handle(weight), found.bags
        if handle is None or in_transform():
            refuse_without_rows(self.__dict__.get("_handle"))
            index = found.index.ids if isinstance(found.index, Ticket) else rows_in(found.index)
            tables: Any = {name: self._modules[table] for name, table in self.features.items()}
            padding = {n: None if it.padding_idx is None else it.start + it.padding_idx for n, it in tables.items()}
            return bags.pooled(weight, index, self.modes, padding, max_norm=self.max_norm, norm_type=self.norm_type)
        training = torch.is_grad_enabled() and handle.requires_grad
        padding_row = handle.id_space.padding_row(self.padding_idx) if self._keys is not None else None

        def look_up(index: Any) -> Tensor:
            spare = found.padded is not None or padding_row is not None
            about = training, self.max_norm, self.norm_type, padding_row
            active = activate(handle, index, *about, padded=True, spare=spare, features=used)
            rows, inverse, padding = apart_from_padding(active, index.fill if isinstance(index, FoundRows) else None)
            if found.padded is not None:
                spare_row = len(active.rows) - 1 if active._groups.known.length is not None else None
                inverse, padding = without_padding(inverse, found.padded, spare_row)
            return pool(rows, active, bags, inverse, found.padded, self.modes, padding)

        if self._keys is not None:
            return self._read_by_id(found.index, training, look_up)
        return look_up(rows_for_lookup(handle, found.index, None, training)[0])

    def _found(self, ids: Any, weight: Any = None) -> FeatureRows:
        given = ids if isinstance(ids, Given) else Given(ids, None)
        if isinstance(given.ids, Ticket):
            found = found_by(given.ids)
            return found if given.weights is None else found._replace(bags=self._weighed(found.bags, given.weights))
        # Offsets and weights of a ticket are copies: their memory may be filled anew.
        bags = self._bags(given)
        flat, _ = self._feature_ids.read(bags.values, device_of(self.weight if weight is None else weight))
        shapes = {name: torch.Size((count,)) for name, count in bags.lengths.items()}
        return self._feature_ids.found(flat, shapes, (tuple(shapes), bags.source), True)._replace(bags=bags)

    def extra_repr(self) -> str:
        """Describe the table, and which features it serves; the tables follow."""
        modes = {*self.modes.values()}
        text = f"{super().extra_repr()}, mode={modes.pop() if len(modes) == 1 else self.modes!r}"
        return text if [*self.features] == [*self.keys()] else f"{text}, features={self.features}"

    def _bits(self, names: Iterable[str]) -> list[int]:
        return super()._bits(self.features[name] for name in names)

    def _tensors_of(self, ids: Any) -> Iterable[Any]:
        return self._bags(ids if isinstance(ids, Given) else Given(ids, None)).source


def _served(features: Any, tables: Iterable[str]) -> dict[str, str]:
    """Return the name of the table of each feature."""
    if features is not None and not isinstance(features, Mapping):
        raise InvalidTypeError(
            f"features is {features!r} but must be a mapping; pass the table of each, for instance {{'clicked': 'items'}}"
        )
    return {name: name for name in tables} if features is None else dict(features)
