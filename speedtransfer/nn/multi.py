"""Several embeddings of one width in one table: a model that looks them up together moves their rows in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from speedtransfer.dtypes import TABLE_DTYPES
from speedtransfer.eager import uncompiled
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.nn.active import ActiveRows
from speedtransfer.nn.embedding import Embedding
from speedtransfer.nn.feature import Feature, FeatureModules, device_of, look_up
from speedtransfer.nn.feature_ids import FeatureIds
from speedtransfer.nn.module_state import with_placeholders, with_weight
from speedtransfer.nn.options import TableOptions, refuse_vocabulary, takes_options
from speedtransfer.nn.table_module import TableModule
from speedtransfer.nn.ticket import known_again
from speedtransfer.nn.tracing import refuse_to_export, unrecorded
from speedtransfer.nn.weight import is_ordinary
from speedtransfer.nn.weight_calls import in_transform
from speedtransfer.optim import Features, Handle, UsedFeatures, check_alike, find_handle

# Arguments of nn.Embedding that all rows of a table have in common.
_COMMON = ("embedding_dim", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


class MultiEmbedding(FeatureModules, TableModule):
    """Several embeddings of one width in one table: one gather and one scatter a step for all of them.

    Takes the place of ``nn.ModuleList([nn.Embedding(n, dim) for n in sizes])``: with the same seed it has the same numbers,
    and it has the same state dict and a module for each feature. Its one parameter, `weight`, has the rows of all features.

    Parameters
    ----------
    num_embeddings : sequence of int, or mapping of str to int
        The rows of each feature. A mapping names the features, as ``nn.ModuleDict`` does.
    embedding_dim : int
    padding_idx : int, or sequence or mapping like `num_embeddings`, optional
        The padding row of every feature, or of each (None: it has none), counted within the feature.
    max_norm, norm_type, scale_grad_by_freq, sparse, device, dtype
        As in :class:`~speedtransfer.Embedding`, for all features.
    memory, path, idle, storage_dtype, state_dtype, scale_block, layout, cache_rows, cache_counts, process_group,
    comm_dtype
        As in :class:`~speedtransfer.Embedding`, for the one table.

    Notes
    -----
    ``m[i]`` looks feature i up alone. Its `weight` reads and writes the rows of the feature but is no parameter: optimizers,
    parameter groups and ``requires_grad`` are those of all features. As in a ``ModuleList`` a feature that nothing came to in
    backward has no gradient (``m[i].weight.grad`` is None), and a step leaves it out. The state of an optimizer has one entry,
    with what each feature has of its own from the first such step on; that of a ``ModuleList`` does not load.
    """

    @takes_options
    def __init__(
        self,
        num_embeddings: Sequence[int] | Mapping[str, int],
        embedding_dim: int,
        padding_idx: Any = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        refuse_vocabulary(options, "a MultiEmbedding", "make an Embedding for each feature that needs one")
        nn.Module.__init__(self)
        if not isinstance(num_embeddings, Iterable) or isinstance(num_embeddings, str):
            raise InvalidTypeError(
                f"num_embeddings is {num_embeddings!r} but must be several; pass one for each feature, such as [1000, 50], or "
                "a dict by name"
            )
        self.named = isinstance(num_embeddings, Mapping)
        sizes = _by_name(num_embeddings)
        one_for_all = not isinstance(padding_idx, Iterable) or isinstance(padding_idx, str)
        paddings = dict.fromkeys(sizes, padding_idx) if one_for_all else _by_name(padding_idx)
        if paddings.keys() != sizes.keys():
            raise InvalidValueError(
                f"padding_idx is of the features {list(paddings)} but num_embeddings of {list(sizes)}; pass one for each, "
                "None where there is none"
            )
        self.embedding_dim, self.padding_idx, self.max_norm, self.norm_type = embedding_dim, None, max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.num_embeddings = 0
        for name, size in sizes.items():
            size = check_size(size, f"num_embeddings of feature {name!r}")
            self.add_module(name, Feature(self, name, self.num_embeddings, size, paddings[name]))
            self.num_embeddings += size
        self._feature_ids = FeatureIds(self._modules)
        self._set_up(_weight, _freeze, device, dtype, options)

    @classmethod
    @takes_options
    def from_modules(cls, modules: Iterable[Any] | Mapping[str, Any], **options: Unpack[TableOptions]) -> Self:
        """Make one of embeddings, with copies of the weights that they have.

        Parameters
        ----------
        modules : nn.ModuleList, nn.ModuleDict, sequence or mapping of nn.Embedding
            Alike but for their rows and `padding_idx`.
        memory, path, idle, storage_dtype, state_dtype, scale_block, layout, cache_rows, cache_counts
            As in :class:`~speedtransfer.Embedding`.

        Raises
        ------
        InvalidTypeError, InvalidValueError
            A module is no ``nn.Embedding``, or is not like the first.
        """
        by_name = _by_name(modules)
        if not by_name:
            raise InvalidValueError("there are no modules; pass at least one nn.Embedding, which says the width of all")
        first = next(iter(by_name))
        alike: Any = _traits(first, by_name[first])
        for name, module in by_name.items():
            for key, value in _traits(name, module).items():
                if value != alike[key]:
                    raise InvalidValueError(
                        f"{key} of {name!r} is {value} but that of {first!r} is {alike[key]}, and one table has one; make a "
                        "MultiEmbedding for each"
                    )
        if len({id(module.weight) for module in by_name.values()}) < len(by_name):
            raise InvalidValueError(
                "two modules share a weight, and would get one each; leave one out, and use the other"
            )
        sizes = {name: module.num_embeddings for name, module in by_name.items()}
        padding = {name: module.padding_idx for name, module in by_name.items()}
        # Zeros that take no memory; without a weight numbers would be drawn.
        zeros = torch.zeros(1, 1, dtype=alike.pop("dtype"), device="cpu")
        alike |= {"_weight": zeros.expand(sum(sizes.values()), alike["embedding_dim"]), "padding_idx": padding}
        made = cls(sizes, _freeze=not alike.pop("requires_grad"), **alike, **options)
        made.named = isinstance(modules, Mapping | nn.ModuleDict)
        for feature, module in zip(made.values(), by_name.values(), strict=True):
            feature.load(module.weight.detach())
        return made

    @unrecorded
    def forward(self, ids: Any) -> Any:
        """Look up the ids of all features at once.

        Parameters
        ----------
        ids : Tensor, or sequence or mapping of Tensor
            ``(..., features)``, a column for each feature. Or the ids of each, of any shapes. Or by name those of some.

        Returns
        -------
        Tensor, or list or dict of Tensor
            ``(..., features, embedding_dim)``. Or for each feature ``(*shape of its ids, embedding_dim)``.

        Raises
        ------
        RowIndexError
            An id is not below the rows of its feature. On a CUDA device the table finds it, as `Table.gather` says, and shows
            -1 and its place among all ids.
        """
        refuse_to_export(self)
        weight = self.weight
        index, padded, shapes = self._feature_ids.rows(ids, device_of(weight))
        used = UsedFeatures((1 << len(self)) - 1 if shapes is None else 0)
        rows = look_up(self, weight, index, padded, used)
        if shapes is None:
            return rows
        split: Any = ()
        sizes = [shape.numel() for shape in shapes.values()]
        if rows.requires_grad and not in_transform():
            features = [1 << list(self._modules).index(name) for name in shapes]
            split = _Parts.apply(rows, sizes, features, used)
        elif shapes:
            # What split() returns could not be changed in place; "unsafe" means that `rows` must not be used any more.
            split = torch.unsafe_split_with_sizes(rows, sizes)
        parts = [part.view(*shape, self.embedding_dim) for part, shape in zip(split, shapes.values(), strict=True)]
        return dict(zip(shapes, parts, strict=True)) if isinstance(ids, Mapping) else parts

    def activate(self, ids: Any) -> ActiveRows:
        """Return the unique rows of `ids`, given as to `forward`, with their numbers in the table."""
        active: ActiveRows = super().activate(known_again(self._handle, self._row_ids(ids)))
        return active

    def _row_ids(self, ids: Any) -> Any:
        return self._feature_ids.rows(ids, device_of(self.weight))[0]

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 1), feature by feature, padding rows zero: the numbers that a ``ModuleList`` has."""
        for feature in self.values():
            feature.reset_parameters()

    def extra_repr(self) -> str:
        """Describe the table; the features follow."""
        return ", ".join(filter(None, (str(self.num_embeddings), str(self.embedding_dim), super().extra_repr())))

    # --- nn.Module ----------------------------------------------------------------------------------------------------

    def _use(self, handle: Handle) -> None:
        super()._use(handle)
        handle.features = self._features()
        for number, feature in enumerate(self.values()):
            feature.number = number

    def _features(self) -> Features:
        return Features(list(self.keys()), [feature.start for feature in self.values()])

    def _wait(self, weight: nn.Parameter, options: TableOptions) -> None:
        raise InvalidValueError(
            "a MultiEmbedding cannot be on the meta device; make it on the device that it is for, and leave it there"
        )

    def _take_weight(self, param: nn.Parameter) -> None:
        shape = self.num_embeddings, self.embedding_dim
        if tuple(param.shape) != shape:
            raise InvalidValueError(
                f"{self._handle} is {shape} but the weight assigned is {tuple(param.shape)}; assign one of that shape"
            )
        other = find_handle(param)
        if other is not None:
            check_alike(self._handle, self._features(), other.features)
        super()._take_weight(param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MultiEmbedding:
        # Without the features, which have no tensors.
        super()._apply(fn, False)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save nothing, as the features save the rows; in a checkpoint the whole table."""
        if with_placeholders():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        self._name_table(prefix)
        self._check_has_all_rows()
        with with_weight(self, None) as double:
            nn.Module._save_to_state_dict(double, destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if with_placeholders():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
            return
        with with_weight(self, None) as double:
            nn.Module._load_from_state_dict(double, state_dict, prefix, local_metadata, *rest)


class _Parts(torch.autograd.Function):
    """Split rows by feature, and note the features whose rows backward comes to: others have no gradient, as in torch."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], features: list[int], used: UsedFeatures) -> Any:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.sizes, ctx.features, ctx.used = rows.shape, sizes, features, used
        # As for the other lookups: what split() returns could not be changed in place.
        return tuple(torch.unsafe_split_with_sizes(rows, sizes))

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        some = next((grad for grad in grads if grad is not None), None)
        if some is None:
            return None, None, None, None
        parts = []
        for size, feature, grad in zip(ctx.sizes, ctx.features, grads, strict=True):
            if grad is not None:
                ctx.used.used |= feature
            parts.append(some.new_zeros(size, ctx.shape[1]) if grad is None else grad)
        return torch.cat(parts), None, None, None


def _by_name(values: Any) -> dict[str, Any]:
    """Return `values`, a sequence or a mapping, by name; a sequence has its numbers for names."""
    named = isinstance(values, Mapping | nn.ModuleDict)
    return dict(values.items()) if named else {str(number): value for number, value in enumerate(values)}


def _traits(name: str, module: Any) -> dict[str, Any]:
    """Return what the modules of one table have in common; raise unless `module` is an ``nn.Embedding``."""
    if not isinstance(module, nn.Embedding) or type(module).forward not in (nn.Embedding.forward, Embedding.forward):
        raise InvalidTypeError(
            f"{name!r} is a {type(module).__name__}, whose own way to look up would be lost; make a MultiEmbedding of "
            "nn.Embedding modules, and give others tables of their own (replace_embeddings)"
        )
    weight = module._parameters.get("weight")
    if weight is None or not is_ordinary(weight) or weight.dtype not in TABLE_DTYPES:
        kind = "computed (a parametrization)" if weight is None else f"a {type(weight).__name__} of {weight.dtype}"
        raise InvalidTypeError(f"the weight of {name!r} is {kind}, which a table cannot be; leave that module out")
    about = {"dtype": weight.dtype, "device": weight.device, "requires_grad": weight.requires_grad}
    return {key: getattr(module, key) for key in _COMMON} | about
