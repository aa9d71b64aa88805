"""Several embeddings of one width in one table: a model that looks them up together moves their rows in one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from speedtransfer.dtypes import TABLE_DTYPES
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.nn.active import ActiveRows
from speedtransfer.nn.embedding import Embedding
from speedtransfer.nn.feature import Feature, FeatureModules, device_of, find, look_up
from speedtransfer.nn.feature_ids import FeatureIds, FeatureRows
from speedtransfer.nn.lookup_ops import looks_up
from speedtransfer.nn.module_state import with_placeholders, with_weight
from speedtransfer.nn.options import TableOptions, refuse_vocabulary, takes_options
from speedtransfer.nn.rounds import Rounds, split
from speedtransfer.nn.shard_rounds import ask
from speedtransfer.nn.table_module import TableModule
from speedtransfer.nn.tracing import in_transform, refuse_to_export
from speedtransfer.nn.weight import is_ordinary
from speedtransfer.optim import Features, Handle, UsedFeatures, check_alike, find_handle
from speedtransfer.vocabulary import FeatureKeys, as_ids

_ATTRIBUTES = """
    activate embedding_dim feature_ids from_modules idle max_norm named norm_type num_embeddings padding_idx prefetch
    reset_parameters scale_grad_by_freq sparse vocabulary vocabulary_ids weight
"""


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
    vocabulary : Vocabulary, optional
        Gives ids of all features rows as they come: `num_embeddings` is then how many there is room for at first, in sum, and
        `padding_idx` an id of each feature, which all share one row of padding. The ids of the vocabulary, which its methods
        take and return, have the number of the feature in their highest bits (`vocabulary_ids`, `feature_ids`): ids of n
        features have ``64 - n.bit_length()`` bits, and others raise.

    Notes
    -----
    ``m[i]`` looks feature i up alone. Its `weight` reads and writes the rows of the feature but is no parameter: optimizers,
    parameter groups and ``requires_grad`` are those of all features. As in a ``ModuleList`` a feature that nothing came to in
    backward has no gradient (``m[i].weight.grad`` is None), and a step leaves it out. The state of an optimizer has one entry,
    with what each feature has of its own from the first such step on; that of a ``ModuleList`` does not load.

    With a vocabulary ``m[i]`` has no `weight`, and the state dict is that of one table: it loads where the features are the
    same, in the same order.
    """

    # The modules that it is made of, and arguments of these that all rows of a table have in common.
    _replaces: tuple[Any, Any] = (nn.Embedding, Embedding)
    _common: tuple[str, ...] = ("embedding_dim", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    # No feature can have the name of one.
    _taken = tuple(_ATTRIBUTES.split())

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
        nn.Module.__init__(self)
        if not isinstance(num_embeddings, Iterable) or isinstance(num_embeddings, str):
            raise InvalidTypeError(
                f"num_embeddings is {num_embeddings!r} but must be several; pass one for each feature, such as [1000, 50], or "
                "a dict by name"
            )
        self.named = isinstance(num_embeddings, Mapping)
        sizes = by_name(num_embeddings)
        self._refuse_names(sizes)
        one_for_all = not isinstance(padding_idx, Iterable) or isinstance(padding_idx, str)
        paddings = dict.fromkeys(sizes, padding_idx) if one_for_all else by_name(padding_idx)
        if paddings.keys() != sizes.keys():
            raise InvalidValueError(
                f"padding_idx is of the features {list(paddings)} but num_embeddings of {list(sizes)}; pass one for each, "
                "None where there is none"
            )
        self.embedding_dim, self.padding_idx, self.max_norm, self.norm_type = embedding_dim, None, max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.num_embeddings, self._rounds = 0, Rounds([weakref.ref(self)])
        # Of the features in the vocabulary.
        self._keys = None if options.get("vocabulary") is None else FeatureKeys(len(sizes))
        if self._keys is not None:
            if any(padding is not None for padding in paddings.values()):
                self.padding_idx = FeatureKeys.PADDING
            if _weight is not None:
                raise InvalidTypeError(
                    "a weight is given with a vocabulary, but its rows would be of no ids; make the module without, and call "
                    "vocabulary.update(module.vocabulary_ids(feature, ids), rows)"
                )
        for number, (name, size) in enumerate(sizes.items()):
            size = check_size(size, f"num_embeddings of feature {name!r}")
            start = self.num_embeddings if self._keys is None else self._keys.start(number + 1)
            # 0 is no feature's of a vocabulary.
            place = number + (self._keys is not None)
            self.add_module(name, Feature(self, name, place, start, size, paddings[name], self._keys))
            self.num_embeddings += size
        self._feature_ids = FeatureIds(self._modules, self._keys)
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
        return cls._of(modules, options, {})

    @classmethod
    def _of(cls, modules: Any, options: Any, more: dict[str, Any]) -> Self:
        refuse_vocabulary(options, "from_modules", f"make a {cls.__name__} with it, and call its vocabulary.update")
        each = by_name(modules)
        alike = cls._alike(each)
        sizes = {name: module.num_embeddings for name, module in each.items()}
        padding = {name: module.padding_idx for name, module in each.items()}
        # Zeros that take no memory; without a weight numbers would be drawn.
        zeros = torch.zeros(1, 1, dtype=alike.pop("dtype"), device="cpu")
        alike |= {"_weight": zeros.expand(sum(sizes.values()), alike["embedding_dim"]), "padding_idx": padding}
        made = cls(sizes, _freeze=not alike.pop("requires_grad"), **alike, **more, **options)
        made.named = isinstance(modules, Mapping | nn.ModuleDict)
        for feature, module in zip(made.values(), each.values(), strict=True):
            feature.load(module.weight.detach())
        return made

    @classmethod
    def _refuse_names(cls, names: Iterable[str]) -> None:
        """Raise for a feature with the name of an attribute of the module."""
        taken = next((name for name in names if name in cls._taken), None)
        if taken is not None:
            raise InvalidValueError(
                f"a feature is named {taken!r}, as an attribute of {cls.__name__} is; give it another name, such as "
                f"'{taken}_ids'"
            )

    @classmethod
    def _alike(cls, modules: dict[str, Any]) -> dict[str, Any]:
        """Return what modules have in common that can share a table; raise for others."""
        ours = cls._replaces[0].__name__
        if not modules:
            raise InvalidValueError(f"there are no modules; pass at least one nn.{ours}, which says the width of all")
        cls._refuse_names(modules)
        first = next(iter(modules))
        alike = cls._traits(first, modules[first])
        for name, module in modules.items():
            for key, value in cls._traits(name, module).items():
                if value != alike[key]:
                    raise InvalidValueError(
                        f"{key} of {name!r} is {value} but that of {first!r} is {alike[key]}, and one table has one; make a "
                        f"{cls.__name__} for each"
                    )
        if len({id(module.weight) for module in modules.values()}) < len(modules):
            raise InvalidValueError(
                "two modules share a weight, and would get one each; leave one out, and use the other"
            )
        return alike

    @classmethod
    def _traits(cls, name: str, module: Any) -> dict[str, Any]:
        """Return what the modules of one table have in common; raise unless `module` is one that can be replaced."""
        of, ours = cls._replaces
        is_own = not isinstance(module, of) or "forward" in vars(module)
        if is_own or type(module).forward not in (of.forward, ours.forward):
            raise InvalidTypeError(
                f"{name!r} is a {type(module).__name__}, whose own way to look up would be lost; make a {cls.__name__} of "
                f"nn.{of.__name__} modules, and give others tables of their own (replace_embeddings)"
            )
        weight = module._parameters.get("weight")
        if weight is None or not is_ordinary(weight) or weight.dtype not in TABLE_DTYPES:
            kind = "computed (a parametrization)" if weight is None else f"a {type(weight).__name__} of {weight.dtype}"
            raise InvalidTypeError(f"the weight of {name!r} is {kind}, which a table cannot be; leave that module out")
        about = {"dtype": weight.dtype, "device": weight.device, "requires_grad": weight.requires_grad}
        return {key: getattr(module, key) for key in cls._common} | about

    @looks_up
    def forward(self, ids: Any) -> Any:
        """Look up the ids of all features at once.

        Parameters
        ----------
        ids : Tensor, or sequence or mapping of Tensor, or Ticket
            ``(..., features)``, a column for each feature. Or the ids of each, of any shapes. Or by name those of some. Or the
            ticket that `prefetch` has returned for ids in one of these forms.

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
        for module in self.values():
            # What was put in the place of a feature, or looks at its lookups, is called.
            has_hooks = module._forward_hooks or module._forward_pre_hooks
            if has_hooks or module._backward_hooks or module._backward_pre_hooks or type(module) is not Feature:
                self._feature_ids.check_form(ids)
                return super().forward(ids)
        weight = self.weight
        handle = find_handle(weight)
        if handle is not None and not handle.owners.has_whole:
            ids = ask(self, ids)
        found = find(self, weight, ids)
        shapes, used = found.shapes, UsedFeatures(self._every() if found.shapes is None else 0)
        rows = look_up(self, weight, found.index, found.padded, used)
        if shapes is None:
            return rows
        split = self._split(rows, {name: shape.numel() for name, shape in shapes.items()}, used)
        # Of 1-D ids as it is: a view would be one more node for backward.
        parts = [
            part if len(shape) == 1 else part.view(*shape, self.embedding_dim)
            for part, shape in zip(split, shapes.values(), strict=True)
        ]
        return dict(zip(shapes, parts, strict=True)) if found.by_name else parts

    def _split(self, rows: Tensor, sizes: dict[str, int], used: UsedFeatures) -> Any:
        """Return the rows of each feature, which backward notes in `used`."""
        if rows.requires_grad and not in_transform():
            return split(rows, list(sizes.values()), self._bits(sizes), used)
        if in_transform():
            # For "unsafe" ones vmap has no rule.
            return [part.clone() for part in rows.split(list(sizes.values()))] if sizes else ()
        # What split() returns could not be changed in place; "unsafe" means that `rows` must not be used any more.
        return torch.unsafe_split_with_sizes(rows, list(sizes.values())) if sizes else ()

    def activate(self, ids: Any) -> ActiveRows:
        """Return the unique rows of `ids`, given as to `forward`, with their numbers in the table."""
        if self._is_waiting():
            raise self._without_rows("")
        found = find(self, self.weight, ids, by_hand=True)
        if self._keys is None or not self._has_rows():
            active: ActiveRows = super().activate(found.index)
            return active
        some = [name for name, shape in (found.shapes or {}).items() if shape.numel()]
        given = self._every() if found.shapes is None else sum({*self._bits(some)})
        training = torch.is_grad_enabled() and self._handle.requires_grad
        return self._activate_by_id(found.index, training, UsedFeatures(given))

    def _every(self) -> int:
        """Return all features, a bit for each."""
        return (1 << len(self)) - 1 << (self._keys is not None)

    def _bits(self, names: Iterable[str]) -> list[int]:
        """Return the bit of each of these features."""
        modules: Any = self._modules
        return [1 << modules[name].number for name in names]

    def vocabulary_ids(self, feature: str | int, ids: Any) -> Tensor:
        """Return what the vocabulary calls the ids of a feature, int64 in their shape, for its methods: `update`, `rows`, ...

        The padding of all features is one id.
        """
        self._check_vocabulary()
        found: Tensor = self[feature]._found(ids).index
        return found

    def feature_ids(self, vocabulary_ids: Any) -> tuple[Tensor, Tensor]:
        """Return which feature each id of the vocabulary is of, by number from 0 on, -1 for padding, and its id there.

        Parameters
        ----------
        vocabulary_ids : tensor, ndarray or list
            Any shape, such as ``vocabulary.export()[0]``.
        """
        numbers, ids = self._check_vocabulary().split(as_ids(vocabulary_ids))
        return numbers - 1, ids

    def _tensors_of(self, ids: Any) -> Iterable[Any]:
        """Return the ids in `ids`, given as to `forward`."""
        return ids.values() if isinstance(ids, Mapping) else ids if isinstance(ids, list | tuple) else [ids]

    def _check_vocabulary(self) -> FeatureKeys:
        if self._keys is None:
            raise InvalidTypeError(
                "this MultiEmbedding has no vocabulary: its ids are row numbers of their features; pass "
                "vocabulary=st.Vocabulary() for ids of any kind"
            )
        return self._keys

    def _found(self, ids: Any, weight: Any = None) -> FeatureRows:
        return self._feature_ids.rows(ids, device_of(self.weight if weight is None else weight))

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 1), feature by feature, padding rows zero: the numbers that a ``ModuleList`` has.

        Those of ids of a vocabulary become what they begin with.
        """
        if self._keys is not None:
            super().reset_parameters()
            return
        for feature in self.values():
            feature.reset_parameters()

    def extra_repr(self) -> str:
        """Describe the table; the features follow."""
        return ", ".join(filter(None, (str(self.num_embeddings), str(self.embedding_dim), super().extra_repr())))

    # --- nn.Module ----------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("max_norm", "norm_type", "scale_grad_by_freq") and vars(self).get(name, value) != value:
            raise InvalidValueError(
                f"{name} of a {type(self).__name__} becomes {value!r} but its features have {getattr(self, name)!r}, "
                f"for lookups of each alone; make it with {name}="
            )
        super().__setattr__(name, value)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._rounds.belong_to(self)

    def _use(self, handle: Handle) -> None:
        super()._use(handle)
        if self._keys is not None:
            handle.id_space.vocabulary.features = tuple(self._modules)
        handle.features = self._features()

    def _features(self) -> Features:
        if self._keys is not None:
            return Features(["", *self._modules], [], self._handle.id_space)
        return Features(list(self._modules), [feature.start for feature in self.values()], self._handle.id_space)

    def _take_weight(self, param: nn.Parameter) -> None:
        shape, handle = (self.num_embeddings, self.embedding_dim), self.__dict__.get("_handle")
        if tuple(param.shape) != shape:
            raise InvalidValueError(
                f"{handle or 'this MultiEmbedding'} is {shape} but the weight assigned is {tuple(param.shape)}; assign one of "
                "that shape"
            )
        other = find_handle(param)
        if other is not None and handle is None:
            raise InvalidValueError(
                f"this MultiEmbedding is on the meta device and is given {other}, the weight of another; make it of its own "
                "rows (to_empty), and then share the weight"
            )
        if other is not None:
            check_alike(handle, self._features(), other.features)
        super()._take_weight(param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MultiEmbedding:
        # The table first, whose dtype and device features then have; others may be among them, and in their places.
        super()._apply(fn, False)
        for child in self.children() if recurse else ():
            child._apply(fn)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save nothing, as the features save the rows; in a checkpoint, and of a vocabulary, the whole table."""
        if with_placeholders() or self._keys is not None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        if self._has_rows():
            self._name_table(prefix)
            self._check_has_all_rows()
        with with_weight(self, None) as double:
            nn.Module._save_to_state_dict(double, destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if with_placeholders() or self._keys is not None:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
            return
        if self._is_waiting() and local_metadata.get("assign_to_params_buffers"):
            self._begin_with(state_dict, prefix, rest[-1])
        elif self._has_rows() and local_metadata.get("assign_to_params_buffers"):
            self._handle.assign_gradient(None)
        with with_weight(self, None) as double:
            nn.Module._load_from_state_dict(double, state_dict, prefix, local_metadata, *rest)

    def _begin_with(self, state_dict: Any, prefix: str, errors: list[str]) -> None:
        """Make the table where the rows to load are, ``assign=True``; the features load theirs then."""
        given = {name: state_dict.get(f"{prefix}{name}.weight") for name in self._modules}
        there = [each for each in given.values() if isinstance(each, Tensor) and not each.is_meta]
        if not there:
            return
        fits = len(there) == len(given) and all(
            each.shape == (feature.num_embeddings, self.embedding_dim)
            for each, feature in zip(there, self.values(), strict=True)
        )
        if fits and len({(each.device, each.dtype) for each in there}) == 1:
            trained = self.weight.requires_grad
            self._end_wait(None, nn.Parameter(there[0].new_empty(0), requires_grad=trained))
            return
        errors.append(
            f"the features of {prefix[:-1] or 'this MultiEmbedding'}, on the meta device, are given rows of other shapes, of "
            "several dtypes or devices, or of some features alone; give those of all, or call to_empty(device=...) first"
        )


def by_name(values: Any) -> dict[str, Any]:
    """Return `values`, a sequence or a mapping, by name; a sequence has its numbers for names."""
    is_several = isinstance(values, Iterable) and not isinstance(values, nn.Module)
    if not is_several and not isinstance(values, nn.ModuleDict | nn.ModuleList | nn.Sequential):
        raise InvalidTypeError(
            f"modules is a {type(values).__name__} but must be several; pass a list, or a dict, of them"
        )
    named = isinstance(values, Mapping | nn.ModuleDict)
    return dict(values.items()) if named else {str(number): value for number, value in enumerate(values)}
