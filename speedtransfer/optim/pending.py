"""Collect the gradient of the active rows, from backward to the step that applies it."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor

from speedtransfer.cuda import capture_number, check_not_capturing
from speedtransfer.eager import uncompiled
from speedtransfer.errors import DeviceError, InvalidTypeError, InvalidValueError
from speedtransfer.optim.gradient_exchange import exchange_gradients
from speedtransfer.optim.graph import as_tensor, receive
from speedtransfer.optim.merge import merged
from speedtransfer.optim.row_gradient import RowGradient, is_zeroed
from speedtransfer.optim.stepping import Stepping
from speedtransfer.tables import UniqueRows, padded_anew

# Steps of other optimizers after which a gradient that no step takes is worth a warning.
_UNTRAINED_STEPS = 100
_steps_made = 0


def count_step() -> None:
    """Count a step of any optimizer."""
    global _steps_made
    _steps_made += 1


class PendingGradient(Stepping):
    """The part of a :class:`Handle` that collects gradients."""

    def deposit(
        self,
        ids: Tensor,
        grad: Tensor,
        rows: Tensor | None = None,
        version: int = -1,
        state_rows: dict[str, Tensor] | None = None,
        whole: bool = False,
        lookup: Any = None,
        summed: bool = False,
        hooked: bool = False,
        features: int | None = None,
    ) -> None:
        """Add the gradient of some rows to the pending gradient, which the next step applies.

        Of a table of several processes it is exchanged first, at the end of this backward.

        Parameters
        ----------
        ids : Tensor
            ``(n,)`` int64, sorted, unique; maybe padded.
        grad : Tensor
            ``(n, dim)``.
        rows : Tensor, optional
            ``(n, dim)``, the rows as read at version `version` of the table; the step writes to this memory.
        state_rows : dict of str to Tensor, optional
            Their state by plane, each ``(n, *tail)``, as read then.
        whole : bool
            Whether it comes from a use of all rows, whose gradient is dense in torch.
        lookup : Lookup, optional
            What a table of several processes knows of the lookup.
        summed : bool
            Whether it is the gradient of all processes already.
        hooked : bool
            Whether the hooks of the parameter have seen it.
        features : int, optional
            Of which features of the table it is, a bit for each; by default those of the rows.
        """
        if self.features is not None and not (summed or hooked):
            self.note_features(ids, features)
        # Threads may run backward at the same time, as in torch.
        with self.rows.lock:
            noted, looked_up = None, ids
            if self.id_space.come_and_go:
                grad, noted = self.id_space.begin_deposit(ids, grad, whole, summed)
            if not summed and not self.owners.is_alone:
                self.owners.hold(ids, grad, whole, lookup)
            else:
                if self.has_grown:
                    ids = padded_anew(ids, self.table.num_rows)
                if self.state is not None and self.state.running:
                    self.check_steps_here("a gradient arrives")
                    self.recover()
                if self.grad is not None:
                    self._check_capture(self.grad)
                    if self._assigned is None and self.is_cleared():
                        self._clear_for_next()
                self.used_whole = self.used_whole or whole
                self._of_graph = self._of_graph or grad.requires_grad
                grad = grad.detach()
                if not hooked and self.has_hooks():
                    self._arrive(ids, grad)
                else:
                    self._accumulate(ids, grad, rows, version, state_rows)
            if noted is not None:
                self.id_space.end_deposit(looked_up, noted)

    def _clear_for_next(self) -> None:
        """Clear a gradient that was set to zero; what shows it will show the next."""
        reused = self._shown_gradient() is not None
        touched = 0 if self.features is None else self.features.touched
        self.clear()
        self._reused = reused
        if self.features is not None:
            # A gradient of zeros is one.
            self.features.touched = touched

    def note_features(self, ids: Tensor | None, given: int | None) -> None:
        """Note that there is a gradient of the features `given`, a bit for each; None: of those of the rows `ids` (n,)."""
        features = self.features
        assert features is not None
        touched = given or (0 if ids is None else features.mask_of(ids))
        if self.owners.is_alone:
            features.touched |= touched
        else:
            features.left |= touched

    def deposit_whole(self, rows: Tensor, grad: Tensor, features: int | None = None) -> None:
        """Add the gradient of all rows, ``(rows that there were, dim)``, which a graph has had as `rows`."""
        with self.rows.lock:
            grad = self.id_space.of_same_ids(rows, grad)
            self.deposit(*self._rows_of(grad), whole=True, features=features)
            self.id_space.note_late()

    @uncompiled
    def receive(self, grad: Tensor) -> None:
        """Deposit what has reached the node of the parameter in the graph: the gradient of all rows."""
        # It is not known which ids the rows had.
        if self.id_space.come_and_go or (self.late_hooks and self.has_hooks()):
            self.refuse_node()
        whole = not (isinstance(grad, RowGradient) or grad.is_sparse)
        if self.features is not None and whole:
            self.note_features(None, self.features.all)
        # Of a forward before the parameter got this table it may be of another dtype, or elsewhere.
        grad = grad.to(self.table.device, self.rows.dtype)
        self.deposit(*self._rows_of(grad), whole=whole, hooked=not self.late_hooks)

    def is_observed(self) -> bool:
        """Tell whether anything looks at the node of the parameter: gradients of rows then have to go there."""
        return self.askers > 0 or self.node_known or (self.has_hooks() and not self.late_hooks)

    def know_node(self) -> None:
        """Send gradients of rows to the node of the parameter from now on, which others know."""
        if self.late_hooks:
            self.refuse_node()
        self.node_known = True

    def refuse_node(self) -> NoReturn:
        """Raise: gradients of rows cannot be those of the parameter's node in the graph."""
        reason = (
            "several processes train it" if not self.owners.is_alone else f"its rows are those of {self.id_space.kind}"
        )
        raise InvalidValueError(
            f"{self} is used by its node in the graph (get_gradient_edge, register_multi_grad_hook, expand_as, a "
            "torch.autograd.Function, a forward before it got its table), but its gradient is not known there, as "
            f"{reason}; use hooks of the weight (register_hook), functions of torch, and replace_embeddings before forward"
        )

    def of_all_rows(self, ids: Tensor | None, grad: Tensor, num_rows: int) -> Tensor:
        """Return the gradient ``(num_rows, dim)`` that is `grad`, ``(*, n, dim)``, at the rows `ids` (n,); None: at all."""
        grad = self.id_space.own_gradient(ids, grad)
        if ids is None:
            return grad
        # One that can be differentiated again, or many at once (is_grads_batched).
        if torch.is_grad_enabled() or grad.dim() != 2 or torch._C._functorch.is_legacy_batchedtensor(grad):
            # What pads the rows adds zero to the last one.
            ids = ids.to(grad.device).clamp(max=num_rows - 1)
            return grad.new_zeros(*grad.shape[:-2], num_rows, grad.shape[-1]).index_add(-2, ids, grad)
        return RowGradient(num_rows, ids, grad, sparse=self.sparse)

    def _accumulate(
        self,
        ids: Tensor,
        grad: Tensor,
        rows: Tensor | None = None,
        version: int = -1,
        state_rows: dict[str, Tensor] | None = None,
    ) -> None:
        grad = grad if grad.is_contiguous() else _writable(grad)
        shown = None if self._shown is None else self._shown_gradient()
        if self.ids is None:
            self.ids, self.grad, self._grad_version = ids, grad, grad._version
            self.active, self.state_rows, self._version = rows, state_rows or {}, version
        else:
            assert self.grad is not None
            table = self.table
            ids, grad, union = merged(table.num_rows, (self.ids, self.grad), (ids, grad), table.takes_padding)
            if union is None:
                self._set_gradient(ids, grad)
            else:
                self._join(union, grad, rows, version, state_rows or {})
        self._reused, self._capture = False, capture_number() if ids.is_cuda else None
        # As in torch, where a gradient stays the same object until it is set to None.
        if shown is not None:
            shown.ids, shown.rows = ids, grad
        self._warn_untrained()

    def _check_capture(self, grad: Tensor) -> None:
        """Raise if a gradient would be added to `grad` of another CUDA graph than its own, or of none."""
        if self._capture == (capture_number() if grad.is_cuda else None):
            return
        if self._capture is None:
            raise DeviceError(
                f"{self} has a gradient from before the capture of a CUDA graph, to which replays cannot add theirs; call "
                "zero_grad(set_to_none=True) before the capture, or first in it"
            )
        raise DeviceError(
            f"the gradient of {self} is one that a CUDA graph writes at each replay, to which no other can be added; call "
            "zero_grad(set_to_none=True) before this backward"
        )

    def _shown_gradient(self) -> RowGradient | None:
        """Return the object that `gradient` returned, if it is alive and still the gradient of the weight."""
        shown = None if self._shown is None else self._shown()
        return shown if shown is not None and (self._reused or shown.rows is self.grad) else None

    def _arrive(self, ids: Tensor, grad: Tensor) -> None:
        """Add a part of the gradient, for hooks to see all of it at the end of the running backward."""
        task, table = torch._C._current_graph_task_id(), self.table
        # Outside of a backward: written by hand.
        if task < 0:
            self._finish(ids, grad)
        elif task in self._arriving:
            self._arriving[task] = merged(table.num_rows, self._arriving[task], (ids, grad), table.takes_padding)[:2]
        else:
            self._arriving[task] = ids, grad
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(*self._arriving.pop(task)))

    @torch.no_grad()
    def _finish(self, ids: Tensor, grad: Tensor) -> None:
        """Run the hooks of the parameter on the gradient of one backward, and accumulate it between them."""
        param = self.param_ref()
        if param is not None and param._backward_hooks:
            sparse = self.sparse and not self.used_whole
            shown = self.owners.row_gradient(self.num_rows, ids, grad, None, sparse)
            ids, grad = self._rows_of(self.hooked(shown).detach())
        self._accumulate(ids, grad)
        if param is not None:
            with as_tensor():
                hooks = list((param._post_accumulate_grad_hooks or {}).values())
            for hook in hooks:
                if hook is not receive:
                    hook(param)

    def _warn_untrained(self) -> None:
        """Warn once if the gradient grows while only optimizers without this weight step."""
        if self._waiting_since is None:
            self._waiting_since = _steps_made
        elif _steps_made - self._waiting_since >= _UNTRAINED_STEPS and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self} has received gradients for {_UNTRAINED_STEPS} optimizer steps, none of which trained it, and they "
                "pile up: no optimizer that steps has this weight; make it from model.parameters() as they are now, or call "
                "requires_grad_(False) on the module",
                stacklevel=2,
            )

    def _rows_of(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the active rows (n,) of a gradient ``(num_rows, dim)``, and their gradient (n, dim).

        With lazy idle rows those whose gradient is zero are not active.
        """
        if isinstance(grad, RowGradient):
            return grad.ids, grad.rows
        if grad.is_sparse:
            return self._rows_of_sparse(grad)
        # With exact idle rows a zero gradient and none are the same. After a softmax over all rows, where no row is zero, one
        # column shows that.
        if self.rows.lag is not None or (grad.shape[1] and bool((grad[:, 0] != 0).all())):
            return torch.arange(len(grad), device=grad.device), grad
        ids = (grad != 0).any(dim=1).nonzero().flatten()
        return ids, grad if len(ids) == len(grad) else grad[ids]

    def _rows_of_sparse(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        # A copy: torch itself checks indices only where a sparse tensor is made, and not always (check_invariants=False).
        places, shape = grad._indices().clone(), tuple(grad.shape)
        for at, size in zip(places, shape, strict=False):
            if len(at) and not (int(at.min()) >= 0 and int(at.max()) < size):
                raise InvalidValueError(
                    f"the gradient of {self} is a sparse tensor of shape {shape} with indices from {int(at.min())} to "
                    f"{int(at.max())}, which are not all in 0 to {size - 1}; make it with check_invariants=True"
                )
        grad = torch.sparse_coo_tensor(places, grad._values(), shape, check_invariants=False).coalesce()
        ids, values = grad.indices()[0], grad.values()
        if grad.sparse_dim() == 1:
            return ids, values
        rows, inverse = ids.unique_consecutive(return_inverse=True)
        return rows, values.new_zeros(len(rows), shape[1]).index_put_((inverse, grad.indices()[1]), values)

    def hooked(self, grad: Tensor) -> Tensor:
        """Return the gradient of the whole table, ``(num_rows, dim)``, as the hooks of the parameter change it."""
        param = self.param_ref()
        hooks = None if param is None else param._backward_hooks
        for hook in list((hooks or {}).values()):
            changed = hook(grad)
            if changed is not None:
                self._check_gradient(changed)
                grad = changed
        return grad

    def _join(
        self, union: UniqueRows, grad: Tensor, rows: Tensor | None, version: int, state_rows: dict[str, Tensor]
    ) -> None:
        """Make `grad` the pending gradient of `union`, and join what was read of its rows: none is read again."""
        active, pairs = self.active, {name: (part, state_rows.get(name)) for name, part in self.state_rows.items()}
        self._set_gradient(union.ids, grad)
        known = active is not None and rows is not None and self._version == version == self.table.version
        if not known or pairs.keys() != state_rows.keys() or union.order is None or union.starts is None:
            return
        # One place of each row in the two lists; of padding any.
        places = union.order[union.starts[:-1].clamp(max=len(union.order) - 1)]

        def joined(*parts: Any) -> Tensor:
            return torch.cat(parts).index_select(0, places)

        self.active, self.state_rows = joined(active, rows), {name: joined(*pair) for name, pair in pairs.items()}

    def is_cleared(self) -> bool:
        """Tell whether the pending gradient, which there is, was set to zero since it was deposited."""
        grad = self.grad
        assert grad is not None
        # Clipping and unscaling change a gradient in place too; only zero_grad(set_to_none=False) makes it all zero.
        if grad._version == self._grad_version or not grad.numel():
            return False
        check_not_capturing(f"a backward after a change of the gradient of {self}")
        return is_zeroed(grad) or not bool(grad.any())

    def gradient(self) -> Tensor | None:
        """Return the gradient of the whole table, or None."""
        if not self.owners.is_alone and self.owners.has_left() and torch._C._current_graph_task_id() < 0:
            # Given by hand (add_grad): as backward does at its end, before it is clipped.
            exchange_gradients([self.owners])
        if self.grad is None:
            return None
        assert self.ids is not None
        shown = None if self._shown is None else self._shown()
        sparse = self.sparse and not self.used_whole
        if shown is None or shown.rows is not self.grad or shown.sparse != (sparse and self.owners.shows_sparse):
            tell = functools.partial(_tell, weakref.ref(self))
            shown = self.owners.row_gradient(self.num_rows, self.ids, self.grad, tell, sparse)
            self._shown = weakref.ref(shown)
        shown.of_graph = self._of_graph
        return shown

    def _changed(self, before: Tensor, ids: Tensor, grad: Tensor, trimmed: bool) -> None:
        """Use the gradient that `gradient` returned, made dense for a function that writes to it, or without padding."""
        # One that was shown before zero_grad, or a copy of one that has become dense since, is not the gradient any more.
        if self.grad is None or before.untyped_storage().data_ptr() != self.grad.untyped_storage().data_ptr():
            return
        if self._capture is not None:
            # Replays go on writing to it as it is.
            if trimmed:
                return
            raise DeviceError(
                f"the gradient of {self} is one that a CUDA graph writes at each replay, and it cannot become dense; take a "
                "dense copy (weight.grad.to_dense())"
            )
        if trimmed:
            self._take_trimmed(ids, grad)
        else:
            self._touched = self.ids
            self._set_gradient(ids, grad)

    def assign_gradient(self, grad: Tensor | None) -> None:
        """Set the gradient of the whole table to `grad`, ``(num_rows, dim)`` or None."""
        if grad is not None:
            self.owners.check_gradient(grad)
        self.recover()
        if grad is None:
            # Not while another thread begins a step, or adds to it.
            with self.rows.lock:
                if self.state is not None and self.state.running:
                    self.check_steps_here("no gradient is set")
                self.clear()
            return
        if self.table.device.type == "cuda":
            check_not_capturing(f"assigning a gradient to {self}")
        self.id_space.note_late()
        if grad is self.gradient():
            return
        self._check_gradient(grad)
        given, self._of_graph = grad, False
        grad = grad if isinstance(grad, RowGradient) else _writable(grad.detach())
        if isinstance(grad, RowGradient) or grad.is_sparse:
            self.used_whole = not grad.is_sparse
            again = grad is given and self._shown is not None and given is self._shown() and self.grad is None
            self._set_gradient(*self._rows_of(grad))
            if self.features is not None:
                assert self.ids is not None
                self.features.assign(self.named_rows(self.ids), again)
            self._touched = self._assigned = None
            # Cleared and assigned again, by a probe for one.
            if again and self._cleared is not None:
                self.used_whole, was_assigned, self._touched = self._cleared
                self._assigned = self.grad if was_assigned else None
        else:
            # The caller may write to this memory before the step, which looks for the active rows.
            self._assigned, self.used_whole = grad, True
            if self.features is not None:
                self.features.assign(None)
            self._use_assigned()

    def _check_gradient(self, grad: Any) -> None:
        shape = (self.num_rows, self.table.dim)
        if not isinstance(grad, Tensor) or tuple(grad.shape) != shape:
            what = tuple(grad.shape) if isinstance(grad, Tensor) else f"a {type(grad).__name__}"
            raise InvalidValueError(
                f"the gradient of {self} is {what} but the table is {shape}; pass a tensor of that shape"
            )
        if grad.dtype != self.rows.dtype or grad.device != self.table.device:
            raise InvalidTypeError(
                f"the gradient of {self} is {grad.dtype} on {grad.device} but its rows are {self.rows.dtype} on "
                f"{self.table.device}; pass grad.to({str(self.table.device)!r}, {self.rows.dtype})"
            )

    def clear(self) -> None:
        """Set the gradient to None and forget the active rows."""
        if not self.owners.is_alone:
            self.owners.forget()
        if self.id_space.come_and_go:
            self.id_space.note_cleared()
        if self.features is not None:
            self.features.clear()
        if self.grad is not None:
            self._cleared = self.used_whole, self._assigned is not None, self._touched
        self.ids = self.grad = self.active = self._touched = None
        self._reused, self._assigned, self._capture, self._of_graph = False, None, None, False
        self.state_rows, self.used_whole, self.in_place, self._waiting_since = {}, False, False, None


def _tell(reference: weakref.ref[PendingGradient], *args: Any) -> None:
    """Call `_changed` of an object, unless it is gone: who keeps a gradient does not keep the table."""
    found = reference()
    if found is not None:
        found._changed(*args)


def _writable(grad: Tensor) -> Tensor:
    """Return a gradient that can be written in place: a copy of one that is expanded."""
    expanded = grad.layout == torch.strided and not isinstance(grad, RowGradient) and 0 in grad.stride()
    return grad.clone(memory_format=torch.contiguous_format) if expanded else grad
