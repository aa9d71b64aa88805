"""The features of a `MultiEmbedding`: modules that look up in some rows of the table that they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError, suggest
from speedtransfer.nn.active import activate, rows_for_lookup
from speedtransfer.nn.feature_ids import FeatureRows, first_beyond, found_by, in_table, keys_of, read_ids
from speedtransfer.nn.feature_view import FeatureView
from speedtransfer.nn.fused_lookup import read_ahead
from speedtransfer.nn.lookup import frozen_lookup, lookup
from speedtransfer.nn.lookup_ops import looks_up, new_key
from speedtransfer.nn.module_state import check_assigned, receive, with_placeholders, with_weight
from speedtransfer.nn.shard_rounds import ask
from speedtransfer.nn.ticket import Ticket, rows_in
from speedtransfer.nn.tracing import in_transform, refuse_to_quantize, unrecorded
from speedtransfer.nn.vocabulary_lookup import refuse_without_rows, without_rows
from speedtransfer.nn.vocabulary_module import VocabularyModule
from speedtransfer.optim import UsedFeatures, find_handle
from speedtransfer.vocabulary import FeatureKeys, as_ids


class Feature(nn.Embedding, VocabularyModule):
    """Look the rows of one feature up as an ``nn.Embedding`` does; without a parameter of its own.

    Parameters
    ----------
    multi : MultiEmbedding
        The module that has the parameter.
    name, number : str, int
        Of the feature; its number is that of its bit where features are told apart.
    start, num_embeddings : int
        Its first row in the table, and how many it has. With a vocabulary the key of its id 0, and how many ids there is room
        for at first.
    padding_idx : int, optional
        Counted from `start`; with a vocabulary an id of this feature.
    keys : FeatureKeys, optional
        Of the vocabulary.
    """

    # What the lookups of all features at once know of each.
    _fixed = frozenset(inspect.signature(nn.Embedding).parameters)

    def __init__(
        self,
        multi: Any,
        name: str,
        number: int,
        start: int,
        num_embeddings: int,
        padding_idx: int | None,
        keys: FeatureKeys | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._key = new_key(self)
        # Not the module itself, which has this one: a cycle would keep the table until the next gc.
        self._shared_parameters, self.name, self.number, self.start = multi._parameters, name, number, start
        self._rounds = multi._rounds
        self.num_embeddings, self.embedding_dim = num_embeddings, multi.embedding_dim
        self.max_norm, self.norm_type = multi.max_norm, multi.norm_type
        self.scale_grad_by_freq, self.sparse, self._keys = multi.scale_grad_by_freq, multi.sparse, keys
        if keys is None:
            padding_idx = self._checked_padding(padding_idx, f" of feature {name!r}")
        elif padding_idx is not None:
            given = as_ids([padding_idx])
            padding_idx = int(given)
            if keys.first_beyond(given) is not None:
                raise self.out_of_range(padding_idx, None, ())
        self.padding_idx = padding_idx

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """The rows of this feature, ``(num_embeddings, embedding_dim)``: read and written as a weight is."""
        self._refuse_with_ids("weight")
        rows = self._rows()
        return self._whole()[self.start : self.stop] if rows is None else rows.weight()

    @property
    def stop(self) -> int:
        """The row of the table after those of this feature."""
        return self.start + self.num_embeddings

    @looks_up
    def forward(self, input: Any) -> Tensor:
        """Return the rows of `input`, ``(*input.shape, embedding_dim)``."""
        weight = self._whole()
        rows: Tensor | None = self._rounds.take(self, weight, input)
        if rows is not None:
            return rows
        handle = find_handle(weight)
        if handle is not None and self._rounds.are_orphaned():
            self._check_has_parameter(handle)
        if handle is not None and not handle.owners.has_whole:
            input = ask(self, input)
        found = find(self, weight, input)
        return look_up(self, weight, found.index, found.padded, UsedFeatures(1 << self.number))

    @unrecorded
    def prefetch(self, ids: Any) -> Ticket:
        """Begin to read the rows of `ids`, and return a ticket for this feature, as :meth:`MultiEmbedding.prefetch`."""
        if self._whole().is_meta:
            raise InvalidValueError(
                f"feature {self.name!r} is on the meta device and has no rows yet; give the MultiEmbedding some: "
                "to_empty(device=...), load_state_dict(..., assign=True)"
            )
        if not self._has_rows():
            raise InvalidTypeError(
                f"the weight that feature {self.name!r} is part of was swapped from outside (functional_call), so there are "
                "no rows of a table; leave prefetch out"
            )
        return read_ahead(self, ids)

    @property
    def vocabulary(self) -> None:
        """None, or an error: the vocabulary is that of all features."""
        self._refuse_with_ids("vocabulary")

    def _found(self, ids: Any, weight: Any = None) -> FeatureRows:
        """Return the rows of `ids` in the table, or what a ticket of this feature has."""
        if isinstance(ids, Ticket):
            return found_by(ids, self.number)
        if self._keys is not None:
            given = as_ids(ids)
            flat = given.reshape(-1)
            bad = self._keys.first_beyond(flat)
            if bad is not None:
                raise self.out_of_range(int(flat[bad]), bad, given.shape)
            return FeatureRows(keys_of(given, self.start, self.padding_idx), None, number=self.number)
        flat, shape = read_ids(ids, device_of(self._whole() if weight is None else weight))
        bad = first_beyond(flat, self.num_embeddings)
        if bad is not None:
            raise self.out_of_range(int(flat[bad]), bad, shape)
        rows = in_table(flat.view(shape), self.start, self.num_embeddings, self.padding_idx)
        return FeatureRows(*rows, number=self.number)

    def out_of_range(self, value: int, position: int | None, shape: tuple[int, ...], called: str = "") -> RowIndexError:
        """Return the error for the id `value`, at a flat `position` of ids of `shape`, or of padding (None).

        `called`: the feature, if it has another name than its rows.
        """
        rows = None if position is None else self._rows()
        where = ", ".join(str(int(i)) for i in np.unravel_index(position or 0, shape)) if shape else ""
        name, index = self.name if rows is None else rows.path, f"index[{where}]" if where else "index"
        if called not in ("", self.name):
            name = f"{called} of table {name}"
        if self._keys is not None:
            limit, bits = self._keys.limit, self._keys.bits
            index = "padding_idx" if position is None else index
            return RowIndexError(
                f"{index} of feature {name!r} is {value} but ids of features that share a vocabulary have {bits} bits "
                f"({-limit} to {limit - 1}), as the others name the feature; pass the highest {bits} bits of a hash: "
                f"ids >> {64 - bits}"
            )
        have = f"{self.num_embeddings} rows (0 to {self.num_embeddings - 1})" if self.num_embeddings else "no rows"
        return RowIndexError(f"{index} of feature {name!r} is {value} but it has {have}; clamp or filter the index")

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 1), the padding row zero: the numbers of ``torch.nn`` with the same seed."""
        self._refuse_with_ids("reset_parameters()")
        handle = self._handle
        if handle is None:
            super().reset_parameters()
            return
        handle.normal_(self.start, self.stop)
        if self.padding_idx is not None:
            handle.load(torch.zeros(1, self.embedding_dim, device="cpu"), self.start + self.padding_idx)

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Set the rows to `values`, ``(num_embeddings, embedding_dim)``."""
        handle = self._handle
        if handle is None:
            self.weight.copy_(values)
        else:
            handle.load(values, self.start)

    @property
    def _handle(self) -> Any:
        """The handle of the table; None while another tensor is in the place of its weight (functional_call)."""
        return find_handle(self._whole())

    def _whole(self) -> Any:
        """Return the weight of all features."""
        if "weight" not in self._shared_parameters:
            raise InvalidTypeError(
                f"the weight that feature {self.name!r} is part of was replaced (a parametrization); look up by the "
                "MultiEmbedding itself, or remove that"
            )
        return self._shared_parameters["weight"]

    def _check_has_parameter(self, handle: Any) -> None:
        """Raise where gradients are wanted of rows that are among the parameters of no module and no optimizer."""
        has_optimizer = handle.state is not None and handle.state.optimizer() is not None
        if handle.requires_grad and torch.is_grad_enabled() and not has_optimizer:
            raise InvalidTypeError(
                f"feature {self.name!r} is looked up to be trained, but the MultiEmbedding that it is part of is gone, and "
                "with it the parameter, which no feature has; keep that in the model too (self.multi = multi)"
            )

    def _refuse_with_ids(self, what: str) -> None:
        """Raise where rows are those of ids, which are in no order, and others between them."""
        if self._keys is not None:
            raise InvalidTypeError(
                f"feature {self.name!r} shares a vocabulary, and its rows are among those of other features, in no order, so "
                f"that it has no {what} of its own; use the vocabulary of the MultiEmbedding (export, update, "
                "Vocabulary(initial=...)) with the ids that its vocabulary_ids() returns"
            )

    def _rows(self) -> FeatureView | None:
        handle = self._handle
        return None if handle is None else FeatureView(handle, self.start, self.stop, self.number, self.name)

    def _has_rows(self) -> bool:
        return self._handle is not None

    # --- nn.Module ----------------------------------------------------------------------------------------------------

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._key = new_key(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise InvalidTypeError(
                f"the weight of feature {self.name!r} is part of one parameter and cannot be replaced; copy the values: "
                "weight.data.copy_(values)"
            )
        if name == "qconfig":
            refuse_to_quantize(self, value)
        if name in self._fixed and vars(self).get(name, value) != value:
            raise InvalidValueError(
                f"{name} of feature {self.name!r} becomes {value!r} but features are looked up together, with what they were "
                f"made with ({vars(self)[name]!r}); make the MultiEmbedding with {name}="
            )
        super().__setattr__(name, value)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield `weight`, so that an optimizer of it raises; the parameters of a model do not contain it.

        With ``recurse=False``, as wrappers (FSDP, DDP) ask each module of a model, there is none: it has none of its own.
        """
        if self._keys is not None or not recurse:
            return
        yield f"{prefix}.weight" if prefix else "weight", self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Feature:
        weight = self._whole()
        sample = fn(torch.empty(0, self.embedding_dim, dtype=weight.dtype, device=weight.device))
        if (sample.dtype, sample.device) != (weight.dtype, weight.device):
            raise InvalidTypeError(
                f"feature {self.name!r} shares a table, which is converted and moved as a whole; call .to() of the "
                "MultiEmbedding, or of a model that has it before its features (self.multi = multi; self.user = multi[0])"
            )
        # What others have registered here.
        nn.Module._apply(self, fn, recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the rows as ``nn.Embedding`` does; in a checkpoint, which has the whole table, their number alone."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._keys is not None:
            # The MultiEmbedding has them.
            return
        handle = self._handle
        if with_placeholders():
            rows = torch.empty(self.num_embeddings, 0, device="cpu")
        elif handle is None or keep_vars:
            rows = self.weight
        else:
            handle.step.recover()
            handle.check_whole()
            rows = handle.rows.whole("weight", self.start, self.stop)
        destination[prefix + "weight"] = rows if keep_vars else rows.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if self._keys is not None:
            # Keys of rows of its own are those of another model.
            nn.Module._load_from_state_dict(self, state_dict, prefix, local_metadata, *rest)
            return
        if with_placeholders():
            return
        check_assigned(state_dict, prefix, local_metadata)
        weight = self._whole()
        handle = self._handle
        if handle is not None:
            handle.step.recover()
        # On the meta device torch says that nothing is loaded.
        empty = torch.empty(1, 1, dtype=weight.dtype, device="meta" if weight.is_meta else "cpu")
        whole = nn.Parameter(empty.expand(self.num_embeddings, self.embedding_dim), requires_grad=False)
        if not weight.is_meta:
            receive(whole, self.load)
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        with with_weight(self, whole) as double:
            super(Feature, double)._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class FeatureModules(nn.Module):
    """Modules of one feature each, by number as in ``nn.ModuleList`` or by name as in ``nn.ModuleDict``.

    Forward calls them one after the other; `MultiEmbedding` has its own.
    """

    named = False

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys() if self.named else self.values())

    def __contains__(self, item: Any) -> bool:
        return item in (self.keys() if self.named else self.values())

    def __getitem__(self, key: Any) -> Any:
        if not self.named:
            return list(self.values())[key]
        if key not in self._modules:
            raise KeyError(f"{key!r} is not a feature{suggest(str(key), self._modules)}")
        return self._modules[key]

    def keys(self) -> KeysView[str]:
        """Return the names of the features."""
        return self._modules.keys()

    def values(self) -> ValuesView[Any]:
        """Return the modules of the features."""
        return self._modules.values()

    def items(self) -> ItemsView[str, Any]:
        """Return the names and modules of the features."""
        return self._modules.items()

    def forward(self, ids: Any) -> Any:
        """Return the rows of `ids`, as :meth:`MultiEmbedding.forward`."""
        if isinstance(ids, Mapping):
            return {name: self._modules[name](part) for name, part in ids.items()}  # type: ignore[misc]
        # A tuple of types: torch 2.6 cannot trace a union, and torch.export traces this.
        if isinstance(ids, (list, tuple)):
            return [module(part) for module, part in zip(self.values(), ids, strict=True)]
        return torch.stack([module(ids[..., number]) for number, module in enumerate(self.values())], -2)


def device_of(weight: Any) -> torch.device:
    """Return the device that rows of `weight` are looked up on."""
    handle = find_handle(weight)
    device: torch.device = weight.device if handle is None else handle.table.device
    return device


def find(module: Any, weight: Any, ids: Any, by_hand: bool = False) -> FeatureRows:
    """Return the rows of `ids`, for a lookup in `weight`. If that raises the processes that share the rows out are told.

    `by_hand`: a gradient may come without autograd.
    """
    handle: Any = find_handle(weight)
    if module._keys is not None and (handle is None or in_transform()):
        about = "a weight on the meta device" if weight.is_meta else "a weight that was replaced"
        raise without_rows(about if handle is None else handle)
    try:
        found: FeatureRows = module._found(ids, weight)
        return found
    except Exception:
        if handle is not None and not handle.owners.has_whole:
            training = handle.requires_grad and torch.is_grad_enabled()
            if handle.id_space.come_and_go:
                handle.id_space.owners.refuse_ids(training and module.training)
            else:
                handle.owners.lookups.refuse(training or (by_hand and handle.requires_grad))
        raise


def look_up(module: Any, weight: Any, index: Any, padded: Tensor | None, features: UsedFeatures) -> Tensor:
    """Return the rows of `weight` at `index`, as the arguments of `module` say; `padded` ones get no gradient.

    Their gradient is one of `features`.
    """
    handle, freq = find_handle(weight), module.scale_grad_by_freq
    if module._keys is not None and handle is not None:
        training = torch.is_grad_enabled() and handle.requires_grad
        found: Tensor = module._look_up_by_id(index, training, features)
        return found
    if handle is None or in_transform():
        refuse_without_rows(module.__dict__.get("_handle", handle))
        index = index.ids.view(index.shape) if isinstance(index, Ticket) else rows_in(index)
        rows = F.embedding(index, weight, None, module.max_norm, module.norm_type, freq)
    else:
        training = torch.is_grad_enabled() and handle.requires_grad
        index, _ = rows_for_lookup(handle, index, None, training)
        if not training and module.max_norm is None:
            return frozen_lookup(handle, index, None, freq)
        active = activate(handle, index, training, module.max_norm, module.norm_type, padded=True, features=features)
        rows = lookup(active, freq)
    if padded is None or not rows.requires_grad:
        return rows
    return torch.where(padded.unsqueeze(-1), rows.detach(), rows)
