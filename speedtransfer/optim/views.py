"""What graphs and callers have of the weight beside lookups: its node in the graph, all rows, tensors over their memory."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from speedtransfer.cuda import check_not_capturing
from speedtransfer.eager import unseen
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.optim.anchor import Joined, kept
from speedtransfer.optim.graph import TableRows, apply_plainly, as_tensor
from speedtransfer.tables import NOTHING, Known


class Views:
    """The rows of a table that graphs and callers have.

    Parameters
    ----------
    handle : Handle
        Of the table, which has this object.
    """

    def __init__(self, handle: Any) -> None:
        # Weak: a cycle would keep the table until the next gc.
        self._handle: Callable[[], Any] = weakref.ref(handle)
        # The nodes by which graphs have rows.
        self.joined: list[weakref.ref[Any]] = []
        # From how many on those that are gone are left out.
        self._most_joined = 16
        # Whether others know the node of the parameter in the graph; how many calls of torch.autograd.grad ask for it.
        self.node_known = False
        self.askers = 0
        # All rows as a graph has them, and the version of the table that they show.
        self._whole: tuple[weakref.ref[Tensor], int] | None = None
        # Tensors over the memory of the table that the caller may hold and write to; whether any was made since the last step.
        self.aliases: list[weakref.ref[Tensor]] = []
        self.exposed = False
        # The rows, (n,), of which such tensors show no others.
        self.exposed_rows: list[Tensor] = []

    def join(
        self,
        rows: Tensor,
        ids: Tensor | None,
        deposit: Callable[..., None],
        features: Callable[[], int] | None = None,
        guarded: bool = True,
        known: Known = NOTHING,
    ) -> Tensor:
        """Return `rows`, ``(n, dim)``, as what a graph made of the weight; `deposit` takes their gradient, `grad`.

        `ids`, (n,), name the rows; None: all. `features` returns those that the gradient is of.
        What is `guarded` cannot be changed in place.
        """
        handle = self._handle()
        if handle.id_space.come_and_go:
            handle.id_space.pin(rows, ids, known)
        if kept.joins is not None and ids is not None:
            kept.joins.append(Joined(handle, rows.detach().requires_grad_(), ids, known, deposit, features))
            return kept.joins[-1].rows
        if len(self.joined) > self._most_joined:
            self.joined = [reference for reference in self.joined if reference() is not None]
            self._most_joined = 16 + 2 * len(self.joined)
        # Hooks that get the gradient later would be called with None.
        late = (not handle.owners.is_alone or handle.id_space.come_and_go) and handle.has_hooks()
        leaf = handle.anchor.leaf if late else handle.param_ref()
        if leaf is None:
            raise InvalidTypeError(f"the module that has the parameter of {handle} is gone; keep it, with what it has")
        apply = TableRows.apply if torch._C._are_functorch_transforms_active() else apply_plainly
        with as_tensor():
            made: Tensor = apply(leaf, rows, (handle, ids, deposit, features, guarded, known))
        return made

    def alive(self) -> list[Any]:
        """Return the nodes by which graphs have rows, of the graphs that are alive."""
        return [node for node in (reference() for reference in self.joined) if node is not None]

    def leave(self, is_ordinary: bool) -> None:
        """Let graphs so far be those of the weight that was replaced: their gradient goes there, if it `is_ordinary` now."""
        problem = ""
        if not is_ordinary:
            problem = (
                f"backward comes to rows of {self._handle()} from before another weight was assigned to it; call backward "
                "first, or write the values (weight.data.copy_(values))"
            )
        for node in self.alive():
            node.left = problem
        self.joined.clear()
        self.forget_whole()

    def is_observed(self) -> bool:
        """Tell whether anything looks at the node of the parameter: gradients of rows then have to go there."""
        handle = self._handle()
        return self.askers > 0 or self.node_known or (handle.has_hooks() and not handle.late_hooks)

    def know_node(self) -> None:
        """Send gradients of rows to the node of the parameter from now on, which others know."""
        handle = self._handle()
        if handle.late_hooks:
            self.refuse_node()
        self.node_known = True

    def refuse_node(self) -> NoReturn:
        """Raise: gradients of rows cannot be those of the parameter's node in the graph."""
        handle = self._handle()
        reason = "several processes train it"
        if handle.owners.is_alone:
            reason = f"its rows are those of {handle.id_space.kind}"
        raise InvalidValueError(
            f"{handle} is used by its node in the graph (get_gradient_edge, register_multi_grad_hook, expand_as, a "
            "torch.autograd.Function, a forward before it got its table), but its gradient is not known there, as "
            f"{reason}; use hooks of the weight (register_hook), functions of torch, and replace_embeddings before forward"
        )

    def whole(self, ids: Tensor | None = None) -> Tensor:
        """Return all rows, caught up, ``(num_rows, dim)`` on the compute device; if `aliased` over the table's memory.

        Then only the rows `ids` (n,), sorted and unique, need be caught up, if others are not used.
        """
        # An inference tensor has no version, which shows writes.
        with outside_of_transforms(), torch.inference_mode(False):
            return self._read_whole(ids)

    def _read_whole(self, ids: Tensor | None) -> Tensor:
        handle = self._handle()
        handle.check_whole()
        handle.step.recover()
        if ids is not None and handle.aliased:
            handle.rows.catch_up(ids.to(handle.table.device))
            handle.table.wait()
            return handle.table.view("weight")
        copied = not handle.rows.is_viewable("weight")
        values = handle.rows.whole("weight").detach()
        # Writes to this memory may go unnoticed (NumPy), so that the next step must read its rows again.
        self.exposed = True
        if handle.aliased:
            return self.track_alias(values)
        try:
            moved = values.to(handle.table.device, handle.rows.dtype)
            return moved.clone() if moved is values and not copied else moved
        except torch.OutOfMemoryError as error:
            raise InvalidValueError(
                f"{handle} is used as a whole, but its {handle.table.num_rows} rows do not fit on {handle.table.device}; use "
                "the rows that are needed (emb(ids)), or all on the host (emb.weight.detach().cpu(), emb.table.torch())"
            ) from error

    def note_use(self, ids: Tensor, version: int) -> None:
        """Note that since a version of the table the rows `ids` (n,) may have changed, and that views of them may be held.

        Active rows that are not among them need not be read again.
        """
        handle = self._handle()
        pending = handle.pending
        with handle.rows.lock:
            self.exposed_rows.append(ids)
            if len(self.exposed_rows) > 16:
                self.exposed_rows, self.exposed = [], True
            if pending.ids is not None and pending.version == version and not pending.is_active(ids):
                pending.version = handle.table.version

    def whole_in_graph(self) -> Tensor:
        """Return all rows, ``(num_rows, dim)``, as what a graph made of the weight; backward deposits the gradient of all."""
        handle = self._handle()
        if handle.table.device.type == "cuda":
            check_not_capturing(f"a use of all of {handle}", "look the rows up that are needed (emb(ids))")
        # Each time anew where rows are pinned until their gradient comes.
        if self._whole is not None and not handle.id_space.come_and_go:
            known = self._whole[0]()
            if known is not None and self._whole[1] == handle.table.version:
                # Torch asks for that of who has it by a weak reference.
                known._fix_weakref()  # type: ignore[attr-defined]
                return known
        with torch.inference_mode(False), outside_of_transforms():
            values = self.whole().detach()
            every = None if handle.features is None else handle.features.every
            deposit = functools.partial(handle.pending.deposit_whole, values, handle.id_space.stamp())
            made = self.join(values, None, deposit, every)
        self._whole = weakref.ref(made), handle.table.version
        return made

    def track_alias(self, alias: Tensor) -> Tensor:
        """Remember a tensor that reads and writes the table, and return it."""
        if len(self.aliases) > 16:
            self.aliases = [reference for reference in self.aliases if reference() is not None]
        self.aliases.append(weakref.ref(alias))
        return alias

    def detach_aliases(self) -> None:
        """Give the tensors that alias the table a copy of its values, before others are written there."""
        detach_from(self._handle(), self.aliases)
        self.aliases = []

    def show_memory(self) -> None:
        """Let the rows that a graph has be those of the memory that the table has by now: it has saved the weight itself."""
        whole = None if self._whole is None else self._whole[0]()
        if whole is not None:
            whole.data = self._handle().table.view("weight")

    def forget_whole(self) -> None:
        """Read all rows anew for the next graph: the table has others."""
        self._whole = None


def detach_from(weight: Any, aliases: Sequence[Callable[[], Any]]) -> None:
    """Give those of `aliases` that live a copy of the rows of `weight`, before others are written there.

    InvalidValueError: there are some, of rows that several processes own.
    """
    alive = [tensor for tensor in (reference() for reference in aliases) if tensor is not None]
    if not alive:
        return
    if not weight.of.owners.has_whole:
        raise InvalidValueError(
            f"{weight} is assigned other rows while its data of before is kept (kept = weight.data), of which no process has "
            "a copy; let go of that, and to have the rows back save them before (st.save_checkpoint)"
        )
    kept = weight.whole().clone()
    for tensor in alive:
        if type(tensor) is Tensor:
            tensor.data = kept
        else:
            tensor.detach_from_table(kept)


@contextlib.contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Leave transforms of torch.func (vmap, grad), within which no tensor becomes a leaf, and modes of dispatch."""
    with contextlib.ExitStack() as stack:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack())
        stack.enter_context(unseen())
        yield
