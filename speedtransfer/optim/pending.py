"""Collect the gradient of the active rows, from backward to the step that applies it."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from speedtransfer.cuda import capture_number, check_not_capturing
from speedtransfer.eager import uncompiled
from speedtransfer.errors import DeviceError
from speedtransfer.optim import row_functions  # noqa: F401
from speedtransfer.optim.gradient_exchange import exchange_gradients
from speedtransfer.optim.graph import as_tensor, receive
from speedtransfer.optim.merge import Part, added, keep, merged, unpadded
from speedtransfer.optim.row_gradient import Parts, RowGradient
from speedtransfer.optim.whole_gradient import check_gradient, hooked, rows_of
from speedtransfer.tables import NOTHING, Known, UniqueRows, padded_anew

# Steps of other optimizers after which a gradient that no step takes is worth a warning.
_UNTRAINED_STEPS = 100
_steps_made = 0


def count_step() -> None:
    """Count a step of any optimizer."""
    global _steps_made
    _steps_made += 1


class PendingGradient:
    """The gradient of some rows of a table, the active ones, until a step takes it or it is set to None.

    Parameters
    ----------
    handle : Handle
        Of the table, which has this object.
    """

    def __init__(self, handle: Any) -> None:
        # Weak: a cycle would keep the table until the next gc.
        self._handle: Callable[[], Any] = weakref.ref(handle)
        # The active rows, (n,) sorted, and their gradient, (n, dim). None: there is none.
        self.ids: Tensor | None = None
        self.grad: Tensor | None = None
        # What is known of the active rows.
        self.known = NOTHING
        # The version of `grad` when it was made zero; whether there are views of its memory, whose writes do not change that.
        self.zeroed_at = -1
        self._viewed = False
        # The active rows, (n, dim), as read at version `version` of the table, and their state by plane, if read along.
        # None: the step reads them.
        self.active: Tensor | None = None
        self.state_rows: dict[str, Tensor] = {}
        self.version = -1
        # Whether `active` is the memory of the table.
        self.in_place = False
        # Whether some of the gradient comes from a use of all rows.
        self.used_whole = False
        # Whether some of it was made by ``backward(create_graph=True)``.
        self._of_graph = False
        # The version of `grad` as last written here.
        self.grad_version = 0
        # Number of the CUDA graph capture that `grad` was made in: replays write to its memory. None: of none.
        self.capture: int | None = None
        # Set while every row counts as active because the gradient was made dense: the active rows before that.
        self.touched: Tensor | None = None
        # A dense gradient that was assigned to the weight: the caller may go on writing to it.
        self.assigned: Tensor | None = None
        # The gradient of another table, which was assigned: it may go on changing.
        self._followed: RowGradient | None = None
        # What every RowGradient of this table calls when it changes.
        self._told = functools.partial(_tell, weakref.ref(self))
        # The RowGradient that ``weight.grad`` has returned last, and what that and its aliases show; whether they will show
        # the next gradient, after zero_grad.
        self._shown: weakref.ref[RowGradient] | None = None
        self._parts: weakref.ref[Parts] | None = None
        self._reused = False
        # What `clear` forgot last: `used_whole`, whether the gradient was assigned, `touched`.
        self._cleared: tuple[bool, bool, Tensor | None] | None = None
        # By number of a running backward: parts of the gradient that are added when it ends.
        self.arriving: dict[int, list[Part]] = {}
        # Number of steps of all optimizers when the gradient came that no step has taken since; whether it was warned of.
        self.waiting_since: int | None = None
        self._warned = False

    def deposit(
        self,
        ids: Tensor,
        grad: Tensor,
        known: Known = NOTHING,
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
        ids, known : Tensor, Known
            ``(n,)`` int64, sorted, unique; maybe padded.
        grad : Tensor
            ``(n, dim)``.
        rows : Tensor, optional
            ``(n, dim)``, the rows as read at version `version` of the table; the step writes to this memory.
        state_rows : dict of str to Tensor, optional
            Their state by plane, each ``(n, *tail)``, as read then.
        whole : bool
            Whether it comes from a use of all rows, whose gradient is dense in torch.
        lookup : Lookup or Stamp, optional
            What a table of several processes, or of ids that come and go, knows of the lookup.
        summed : bool
            Whether it is the gradient of all processes already.
        hooked : bool
            Whether the hooks of the parameter have seen it.
        features : int, optional
            Of which features of the table it is, a bit for each; by default those of the rows.
        """
        handle = self._handle()
        if handle.features is not None and not (summed or hooked):
            handle.features.note(handle, ids, features)
        # Threads may run backward at the same time, as in torch.
        with handle.rows.lock:
            noted = None
            if handle.id_space.come_and_go:
                grad, noted = handle.id_space.begin_deposit((ids, grad, known), lookup, whole, summed)
            if not summed and handle.owners.holds:
                handle.owners.hold((ids, grad, known), whole, lookup)
            else:
                if handle.has_grown:
                    ids = padded_anew(ids, known, handle.table.num_rows)
                if handle.state is not None and handle.state.running:
                    handle.step.check_steps_here("a gradient arrives")
                    handle.step.recover()
                if self.grad is not None:
                    self._check_capture(self.grad)
                    if self.assigned is None and self.is_cleared():
                        if self._viewed:
                            # Views see the next gradient, which is added in place.
                            self.touched = None if self.touched is None else self.touched[:0]
                        else:
                            self._clear_for_next()
                self.used_whole = self.used_whole or whole
                self._of_graph = self._of_graph or grad.requires_grad
                grad = grad.detach()
                # The second part and all others of a backward are added at once.
                waits = self.grad is not None and not (ids.is_cuda or summed)
                if not hooked and (handle.has_hooks() or (waits and torch._C._current_graph_task_id() >= 0)):
                    self._arrive((ids, grad, known))
                else:
                    self._accumulate((ids, grad, known), rows, version, state_rows)
            if noted is not None:
                handle.id_space.end_deposit(noted)

    def _clear_for_next(self) -> None:
        """Clear a gradient that was set to zero; what shows it will show the next."""
        handle = self._handle()
        reused = self._shown_parts() is not None
        touched = 0 if handle.features is None else handle.features.touched
        self.clear()
        self._reused = reused
        if handle.features is not None:
            # A gradient of zeros is one.
            handle.features.touched = touched

    def deposit_whole(self, rows: Tensor, lookup: Any, grad: Tensor, features: int | None = None) -> None:
        """Add the gradient of all rows, ``(rows that there were, dim)``, which a graph has had as `rows`."""
        handle = self._handle()
        with handle.rows.lock:
            grad = handle.id_space.of_same_ids(rows, grad, lookup)
            self.deposit(*rows_of(handle, grad), whole=True, features=features)
            handle.id_space.note_late()

    @uncompiled
    def receive(self, grad: Tensor) -> None:
        """Deposit what has reached the node of the parameter in the graph: the gradient of all rows."""
        handle = self._handle()
        # It is not known which ids the rows had.
        if handle.id_space.come_and_go or (handle.late_hooks and handle.has_hooks()):
            handle.views.refuse_node()
        whole = not (isinstance(grad, RowGradient) or grad.is_sparse)
        if handle.features is not None and whole:
            handle.features.note(handle, None, handle.features.all)
        # Of a forward before the parameter got this table it may be of another dtype, or elsewhere.
        grad = grad.to(handle.table.device, handle.rows.dtype)
        self.deposit(*rows_of(handle, grad), whole=whole, hooked=not handle.late_hooks)

    def _accumulate(
        self, part: Part, rows: Tensor | None = None, version: int = -1, state_rows: dict[str, Tensor] | None = None
    ) -> None:
        handle = self._handle()
        ids, grad, known = part
        # As torch does: fused kernels read rows one after the other.
        grad = grad.contiguous()
        shown = None if self._parts is None else self._shown_parts()
        if self.ids is None:
            self.ids, self.grad, self.known, self.grad_version, self.zeroed_at = ids, grad, known, grad._version, -1
            self.active, self.state_rows, self.version, self._viewed = rows, state_rows or {}, version, False
        else:
            assert self.grad is not None
            table, pending = handle.table, (self.ids, self.grad, self.known)
            (ids, grad, known), union = merged(table.num_rows, pending, (ids, grad, known), table.takes_padding)
            if union is None:
                self.set_gradient(ids, grad, known)
            else:
                self._join(union, grad, rows, version, state_rows or {})
        self._reused, self.capture, self._followed = False, capture_number() if ids.is_cuda else None, None
        # As in torch, where a gradient stays the same object until it is set to None.
        if shown is not None:
            shown.set(ids, grad, known)
        if self.waiting_since is None:
            self.waiting_since = _steps_made
        else:
            self._warn_untrained()

    def _check_capture(self, grad: Tensor) -> None:
        """Raise if a gradient would be added to `grad` of another CUDA graph than its own, or of none."""
        handle = self._handle()
        if self.capture == (capture_number() if grad.is_cuda else None):
            return
        if self.capture is None:
            raise DeviceError(
                f"{handle} has a gradient from before the capture of a CUDA graph, to which replays cannot add theirs; call "
                "zero_grad(set_to_none=True) before the capture, or first in it"
            )
        raise DeviceError(
            f"the gradient of {handle} is one that a CUDA graph writes at each replay, to which no other can be added; call "
            "zero_grad(set_to_none=True) before this backward"
        )

    def _shown_parts(self) -> Parts | None:
        """Return what the objects show that `gradient` returned, if one is alive and still the gradient of the weight."""
        shown = None if self._parts is None else self._parts()
        return shown if shown is not None and (self._reused or shown.rows is self.grad) else None

    def _arrive(self, part: Part) -> None:
        """Keep a part of the gradient until the running backward ends: hooks of the parameter see all of it."""
        task, (ids, grad, known) = torch._C._current_graph_task_id(), part
        # Others are added to its memory, of which an expanded one has too little.
        part = ids, grad.contiguous(), known
        # Outside of a backward: written by hand.
        if task < 0:
            self._finish([part])
        elif task in self.arriving:
            table = self._handle().table
            keep(self.arriving[task], part, table.num_rows, table.takes_padding)
        else:
            self.arriving[task] = [part]
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(self.arriving.pop(task, [])))

    @torch.no_grad()
    def _finish(self, parts: list[Part]) -> None:
        """Add the parts of the gradient of one backward, run the hooks of the parameter on it and accumulate it."""
        handle = self._handle()
        # Cleared since.
        if not parts:
            return
        param, table = handle.param_ref(), handle.table
        part = added(table.num_rows, parts, table.takes_padding)
        if param is not None and param._backward_hooks:
            sparse = handle.sparse and not self.used_whole
            shown = handle.owners.row_gradient(handle.num_rows, part, None, sparse)
            part = rows_of(handle, hooked(handle, shown).detach())
        with handle.rows.lock:
            self._accumulate(part)
        if param is not None:
            with as_tensor():
                hooks = list((param._post_accumulate_grad_hooks or {}).values())
            for hook in hooks:
                if hook is not receive:
                    hook(param)

    def _warn_untrained(self) -> None:
        """Warn once if the gradient grows while only optimizers without this weight step."""
        if _steps_made - (self.waiting_since or 0) >= _UNTRAINED_STEPS and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._handle()} has received gradients for {_UNTRAINED_STEPS} optimizer steps, none of which trained it, "
                "and they pile up: no optimizer that steps has this weight; make it from model.parameters() as they are now, "
                "or call requires_grad_(False) on the module",
                stacklevel=2,
            )

    def _join(
        self, union: UniqueRows, grad: Tensor, rows: Tensor | None, version: int, state_rows: dict[str, Tensor]
    ) -> None:
        """Make `grad` the pending gradient of `union`, and join what was read of its rows: none is read again."""
        handle = self._handle()
        active, pairs = self.active, {name: (part, state_rows.get(name)) for name, part in self.state_rows.items()}
        self.set_gradient(union.ids, grad, union.known)
        known = active is not None and rows is not None and self.version == version == handle.table.version
        if not known or pairs.keys() != state_rows.keys() or union.order is None or union.starts is None:
            return
        # One place of each row in the two lists; of padding any.
        places = union.order[union.starts[:-1].clamp(max=len(union.order) - 1)]

        def joined(*parts: Any) -> Tensor:
            return torch.cat(parts).index_select(0, places)

        self.active, self.state_rows = joined(active, rows), {name: joined(*pair) for name, pair in pairs.items()}

    def is_cleared(self) -> bool:
        """Tell whether the pending gradient, which there is, was set to zero since it was deposited."""
        handle = self._handle()
        grad = self.grad
        assert grad is not None
        # Clipping and unscaling change a gradient in place too; only zero_grad(set_to_none=False) makes it all zero.
        if grad._version == self.grad_version or not grad.numel():
            return False
        check_not_capturing(f"a backward after a change of the gradient of {handle}")
        return self.zeroed_at == grad._version or not bool(grad.any())

    def gradient(self) -> Tensor | None:
        """Return the gradient of the whole table, or None."""
        handle = self._handle()
        if not handle.owners.is_alone and handle.owners.has_left() and torch._C._current_graph_task_id() < 0:
            # Given by hand (add_grad): as backward does at its end, before it is clipped.
            exchange_gradients([handle.owners])
        if self.grad is None:
            return None
        if self._followed is not None:
            self._follow()
        assert self.ids is not None
        shown = None if self._shown is None else self._shown()
        sparse = handle.sparse and not self.used_whole
        if shown is None or shown.rows is not self.grad or shown.sparse != (sparse and handle.owners.shows_sparse):
            shown = handle.owners.row_gradient(handle.num_rows, (self.ids, self.grad, self.known), self._told, sparse)
            parts = None if self._parts is None else self._parts()
            if parts is not None and parts.rows is self.grad and not sparse:
                # Of an alias of one that is gone.
                shown.parts = parts
            self._shown, self._parts = weakref.ref(shown), weakref.ref(shown.parts)
        shown.of_graph = self._of_graph
        if handle.features is not None:
            shown.features = handle.features.touched
        if handle.id_space.come_and_go:
            shown.stamp = handle.id_space, handle.id_space.version
        return shown

    def _changed(self, before: Tensor, ids: Tensor, grad: Tensor, how: str) -> None:
        """Use the gradient that `gradient` returned, after a change of its rows (`RowGradient`)."""
        handle = self._handle()
        # One that was shown before zero_grad, or a copy of one that has become dense since, is not the gradient any more.
        if self.grad is None:
            return
        same = before.numel() and before.untyped_storage().data_ptr() == self.grad.untyped_storage().data_ptr()
        if before is not self.grad and not same:
            return
        if how in ("zeroed", "viewed"):
            self._viewed = self._viewed or how == "viewed"
            self.zeroed_at = -1 if self._viewed else self.grad._version
            return
        if self.capture is not None:
            # Replays go on writing to it as it is.
            if how == "trimmed":
                return
            raise DeviceError(
                f"the gradient of {handle} is one that a CUDA graph writes at each replay, and it cannot become dense; take a "
                "dense copy (weight.grad.to_dense())"
            )
        if how == "trimmed":
            self._take_trimmed(ids, grad)
        else:
            self.touched = self.ids
            self.set_gradient(ids, grad)
            if self._followed is not None:
                # It is the same tensor in torch.
                self._followed.parts.set(ids, grad, NOTHING)

    def assign_gradient(self, grad: Tensor | None) -> None:
        """Set the gradient of the whole table to `grad`, ``(num_rows, dim)`` or None."""
        handle = self._handle()
        if grad is not None:
            handle.owners.check_gradient(grad)
        handle.step.recover()
        if grad is None:
            # Not while another thread begins a step, or adds to it.
            with handle.rows.lock:
                if handle.state is not None and handle.state.running:
                    handle.step.check_steps_here("no gradient is set")
                self.clear()
            return
        if handle.table.device.type == "cuda":
            check_not_capturing(f"assigning a gradient to {handle}")
        handle.id_space.note_late()
        if grad is self.gradient():
            return
        check_gradient(handle, grad)
        if grad.is_inference() or torch.is_inference_mode_enabled():
            # Tensors of inference mode have no versions.
            with torch.inference_mode(False):
                self._assign(grad.clone() if grad.is_inference() else grad)
        else:
            self._assign(grad)

    def _assign(self, grad: Tensor) -> None:
        handle = self._handle()
        given, self._of_graph = grad, False
        grad = grad if isinstance(grad, RowGradient) else _writable(grad.detach())
        if isinstance(grad, RowGradient) or grad.is_sparse:
            self.used_whole = not grad.is_sparse
            if isinstance(grad, RowGradient):
                if grad.stamp is not None:
                    handle.id_space.check_same_ids(grad.ids, grad.known, grad.stamp[1])
                if grad._changed is None and not grad.elsewhere:
                    # From now on it is the gradient of this table.
                    grad._changed = self._told
            self._followed = grad if isinstance(grad, RowGradient) and grad._changed is not self._told else None
            again = grad is given and self._shown is not None and given is self._shown() and self.grad is None
            self.set_gradient(*rows_of(handle, grad))
            # One that was shown before, and kept, goes on showing the gradient.
            if isinstance(grad, RowGradient) and grad._changed is self._told:
                self._shown, self._parts = weakref.ref(grad), weakref.ref(grad.parts)
            if handle.features is not None:
                assert self.ids is not None
                of = grad.features if isinstance(grad, RowGradient) else 0
                handle.features.assign(handle.named_rows(self.ids), of, again)
            self.touched = self.assigned = None
            # Cleared and assigned again.
            if again and self._cleared is not None:
                self.used_whole, was_assigned, self.touched = self._cleared
                self.assigned = self.grad if was_assigned else None
        else:
            # The caller may write to this memory before the step, which looks for the active rows.
            self.assigned, self.used_whole, self._followed = grad, True, None
            if handle.features is not None:
                handle.features.assign(None)
            self.use_assigned()

    def _follow(self) -> None:
        """Take what the gradient of another table, which was assigned, has become since."""
        assert self._followed is not None
        if self._followed.rows is not self.grad:
            self.set_gradient(*rows_of(self._handle(), self._followed))

    def use_assigned(self) -> None:
        """Take every row of the assigned gradient as active until the step, which looks for zeros."""
        assert self.assigned is not None
        ids = torch.arange(len(self.assigned), device=self.assigned.device)
        self.set_gradient(ids, self.assigned)
        self.touched = ids[:0]

    def is_active(self, ids: Tensor) -> bool:
        """Tell whether one of the rows `ids` (n,) has a pending gradient."""
        # Another thread may make a step.
        active = self.ids
        if active is None or not len(active):
            return False
        ids = ids.to(active.device)
        places = torch.searchsorted(active, ids).clamp_(max=len(active) - 1)
        return bool((active[places] == ids).any())

    def part(self) -> Part:
        """Return the active rows and their gradient, which there is, without padding; of lazy rows those that are not zero."""
        assert self.ids is not None
        assert self.grad is not None
        return unpadded(self._narrowed() or (self.ids, self.grad, self.known))

    def begin_anew(self) -> None:
        """Have no gradient: what shows it will show the next, which goes on from it."""
        used_whole = self.used_whole
        self._clear_for_next()
        self.used_whole = used_whole

    def _narrowed(self) -> Part | None:
        """Return the gradient without lazy rows that are active only because it became dense, and still zero; else None."""
        if self.touched is None or self._handle().rows.lag is not None:
            return None
        assert self.grad is not None
        touched = (self.grad != 0).any(dim=1)
        touched[self.touched] = True
        ids = touched.nonzero().flatten()
        return ids, self.grad[ids], NOTHING

    def refresh(self) -> None:
        """Read the active rows again if the table has changed since: a step must not undo those writes."""
        handle = self._handle()
        if self.ids is None:
            return
        if self._followed is not None:
            self._follow()
        # A gradient given for all rows is one of rows that are not trained, too.
        given = handle.id_space.come_and_go and (
            self.touched is not None or self.assigned is not None or handle.has_hooks()
        )
        # Not for each step: a call costs.
        narrowed = None if self.touched is None else self._narrowed()
        if narrowed is not None:
            self.set_gradient(*narrowed)
        self.touched = None
        handle.views.exposed, exposed = False, handle.views.exposed
        exposed = exposed or (handle.rows.table.open_views.made and handle.rows.table.has_views)
        rows, handle.views.exposed_rows = handle.views.exposed_rows, []
        exposed = exposed or any(map(self.is_active, rows))
        # Rows that another graph, or none, has read may have changed.
        exposed = exposed or (self.ids.is_cuda and self.capture != capture_number())
        if exposed or self.active is None or self.version != handle.rows.table.version:
            every = len(self.ids) == handle.table.num_rows > 0 and self.known.length is None
            # A step of all rows can update them where they are stored.
            every = every and not (handle.features is not None and handle.features.is_apart)
            self.in_place = every and handle.aliased and handle.state is not None and handle.state.steps_in_place()
            if self.in_place:
                handle.table.end_snapshot()
                handle.rows.catch_up()
                self.active, self.state_rows = handle.table.stored("weight").detach(), {}
            else:
                self.state_rows = handle.rows.read(self.ids, known=self.known)
                self.active = self.state_rows.pop("weight")
            self.version = handle.table.version
        if given and self.grad is not None:
            self.grad = handle.id_space.own_gradient(self.ids, self.grad)
            self.grad_version, self.zeroed_at = self.grad._version, -1

    def set_gradient(self, ids: Tensor, grad: Tensor, known: Known = NOTHING) -> None:
        """Make `grad`, ``(n, dim)``, the pending gradient of the rows `ids` (n,), which the step has to read."""
        self.ids, self.grad, self.known, self.grad_version, self.zeroed_at = ids, grad, known, grad._version, -1
        self.active, self.state_rows = None, {}

    def convert(self, dtype: torch.dtype) -> None:
        """Have the pending gradient in another dtype, that of the weight by now; who was shown the one so far keeps it."""
        ids, grad, known, whole = self.ids, self.grad, self.known, self.used_whole
        features = self._handle().features
        touched, left = (0, 0) if features is None else (features.touched, features.left)
        self.clear()
        self._shown = self._parts = None
        if ids is not None and grad is not None and dtype.is_floating_point:
            self.set_gradient(ids, grad.to(dtype), known)
            self.used_whole = whole
            if features is not None:
                features.touched, features.left = touched, left

    def trim(self) -> None:
        """Drop the padding of the pending gradient, for which the host waits."""
        handle = self._handle()
        if self.ids is not None and self.grad is not None:
            if self.capture is not None:
                raise DeviceError(
                    f"the gradient of {handle} was made by a CUDA graph, where the number of its rows is not known, so that "
                    "it cannot be sparse; make the embedding with sparse=False, or use an optimizer for dense gradients"
                )
            if self.known.length is not None:
                self._take_trimmed(*unpadded((self.ids, self.grad, self.known))[:2])

    def _take_trimmed(self, ids: Tensor, grad: Tensor) -> None:
        n, before, shown = len(ids), self.grad, None if self._parts is None else self._parts()
        self.ids, self.grad, self.known = ids, grad, NOTHING
        self.active = None if self.active is None else self.active[:n]
        self.state_rows = {name: part[:n] for name, part in self.state_rows.items()}
        # It remains the gradient that was shown.
        if shown is not None and shown.rows is before:
            shown.set(ids, grad, NOTHING)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Show no gradient within the block; after it all is as before, the rows that were read too.

        Rows that are read again need not be the same: `max_norm` has rounded what it wrote to encoded ones.
        """
        kept = vars(self).copy()
        self.grad = None
        try:
            yield
        finally:
            vars(self).update(kept)

    def clear(self) -> None:
        """Set the gradient to None and forget the active rows."""
        handle = self._handle()
        if not handle.owners.is_alone:
            handle.owners.forget()
        if handle.id_space.come_and_go:
            handle.id_space.note_cleared()
        if handle.features is not None:
            handle.features.clear()
        if self.grad is not None:
            self._cleared = self.used_whole, self.assigned is not None, self.touched
        self.ids = self.grad = self.active = self.touched = None
        self.known = NOTHING
        self._reused, self.assigned, self.capture, self._of_graph, self._followed = False, None, None, False, None
        self.state_rows, self.used_whole, self.in_place, self.waiting_since = {}, False, False, None
        self.arriving.clear()


def _tell(reference: weakref.ref[PendingGradient], *args: Any) -> None:
    """Call `_changed` of an object, unless it is gone: who keeps a gradient does not keep the table."""
    found = reference()
    if found is not None:
        found._changed(*args)


def _writable(grad: Tensor) -> Tensor:
    """Return a gradient that can be written in place: a copy of one that is expanded."""
    expanded = grad.layout == torch.strided and not isinstance(grad, RowGradient) and 0 in grad.stride()
    return grad.clone(memory_format=torch.contiguous_format) if expanded else grad
