"""Ordinary tables under `DistributedDataParallel`: every process has all rows, and all take the same steps.

It broadcasts first values and averages gradients of parameters; the rows of a table are in none. So tables are left out there,
and the same is done here for their rows.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from speedtransfer.errors import InvalidValueError, OptimizerError, format_bytes
from speedtransfer.optim.handle import Handle, any_handles, find_handle
from speedtransfer.optim.merge import Part, added, keep, unpadded
from speedtransfer.optim.owners import Owners
from speedtransfer.ranks import Exchange, as_int64, exchange_of, to_words
from speedtransfer.tables import row_chunks, unique_rows

# How many rows of the gradient of this backward, and of earlier ones, a process brings: the bits of its number.
_COUNT, _WORDS = 48, 96
_LEFT = (1 << _COUNT) - 1

_REMEDY = (
    "make the tables with process_group=..., which shares out their rows and needs no wrapper, and leave them out of it with "
    "st.table_parameters(model)"
)


class Replicas(Owners):
    """The same table in other processes, as the handle of one sees them: gradients of rows are averaged over all."""

    is_alone = False

    def __init__(self, handle: Handle, exchange: Exchange) -> None:
        super().__init__(handle, exchange)
        # Gradients are exchanged from a forward of the wrapper, but in its `no_sync()`, to the end of a backward. Others are
        # added to that of the weight here, as in torch, and go along with the next exchange.
        self.holds = False
        # Whether this backward came through what the wrapper returned, some of whose parameters may be unused: as torch does
        # for these, what was accumulated is exchanged at its end.
        self.passed = False
        # That of the weight after the last exchange, and its version then.
        self._exchanged: tuple[Callable[[], Tensor | None], int] | None = None
        # Parts of the gradient of this process since the last exchange; and whether a whole table was used.
        self._left: list[Part] = []
        self._whole = False
        # What goes along.
        self._local: Part | None = None

    @property
    def has_local_gradient(self) -> bool:  # type: ignore[override]  # noqa: D102
        grad = self.handle.pending.grad
        if grad is None or self._exchanged is None:
            return grad is not None
        seen, version = self._exchanged
        return version != grad._version or seen() is not grad

    def begin(self, model: DistributedDataParallel) -> None:
        """Note that the forward pass of `model` begins: of several before a backward one that is to exchange is enough."""
        self.holds, self.passed = self.holds or model.require_backward_grad_sync, False

    def is_open(self, at_step: bool = False) -> bool:  # noqa: D102
        return self.holds

    def hold(self, part: Part, whole: bool, lookup: Any) -> None:  # noqa: D102
        ids, grad, known = unpadded(part)
        keep(self._left, (ids.clone(), grad.detach().clone(), known), self.handle.table.num_rows, False)
        self._whole |= whole

    def has_left(self) -> bool:  # noqa: D102
        return bool(self._left)

    def forget(self) -> None:  # noqa: D102
        self._left, self._whole, self._local = [], False, None

    def announce(self) -> list[int]:  # noqa: D102
        handle, whole, count, rows, local = self.handle, self._whole, 0, 0, self.has_local_gradient
        # Else what was accumulated goes along if another process brings something.
        brings = bool(self._left) or (self.passed and local)
        if self._left:
            self._left = [added(handle.table.num_rows, self._left, False)]
            rows = len(self._left[0][0])
        if local and (brings or not handle.pending.is_cleared()):
            self._local = handle.pending.part()
            whole, count = whole or handle.pending.used_whole, len(self._local[0])
            if brings and handle.features is not None:
                handle.features.left |= handle.features.touched
        return to_words(count << _COUNT | rows << 2 | int(whole) << 1 | brings, _WORDS)

    def receive(self, numbers: Sequence[int], received: Sequence[Tensor]) -> None:
        """Average the gradients of all processes, in the order of the ranks: the same bits in each."""
        # `announce` has added them.
        left, local = self._left[0] if self._left else None, self._local
        self.forget()
        if not any(number & 1 for number in numbers):
            # Of another loss: that of this forward may come.
            return
        self.holds = self.passed = False
        pending, whole = self.handle.pending, any(number & 2 for number in numbers)
        now, before = [(number & _LEFT) >> 2 for number in numbers], [number >> _COUNT for number in numbers]
        found = [(self._mean(left, now), False)] if any(now) else []
        if any(before):
            # Hooks of the parameter have seen it.
            found.insert(0, (self._mean(local, before), True))
            if self.handle.features is not None:
                # Those of a process that has brought nothing else were not announced.
                self.handle.features.touched |= self.handle.features.mask_of(found[0][0][0])
        if self.has_local_gradient:
            pending.begin_anew()
        for (ids, mean), hooked in found:
            pending.deposit(ids, mean, whole=whole, summed=True, hooked=hooked)
        total = pending.grad
        self._exchanged = None if total is None else (weakref.ref(total), total._version)

    def _mean(self, part: Part | None, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the rows of the gradients of all processes, and their mean; `counts` are the rows of each."""
        exchange, (ids, grad, _) = self.exchange, part or self.no_gradient()
        ids = exchange.gather("ids", ids.unsqueeze(1), counts)[:, 0]
        grads = exchange.gather("gradients", grad * (1 / exchange.ranks), counts)
        rows = unique_rows(ids)
        total, inverse = grads.new_zeros(len(rows.ids), grads.shape[1]), rows.inverse.view(-1)
        for place, some in zip(inverse.split(counts), grads.split(counts), strict=True):
            total.index_add_(0, place, some)
        return rows.ids, total

    def before_step(self) -> None:  # noqa: D102
        self.holds = False


# --- DistributedDataParallel ---------------------------------------------------------------------------------------------


def replicating_tables(method: Callable[..., None]) -> Callable[..., None]:
    """Return ``DistributedDataParallel.__init__``, which looks for tables before it takes a model."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def replicating(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        tables: dict[str, Handle] = {}
        if any_handles() and dist.is_available() and dist.is_initialized():
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            module, mesh, group = (given.arguments[name] for name in ("module", "device_mesh", "process_group"))
            tables = _tables_of(module)
            if tables:
                _refuse_vocabularies(tables)
                _check_others(module, tables)
                group = mesh.get_group(0) if mesh is not None else group if group is not None else dist.group.WORLD
                _leave_out(module, tables)
                # torch 2.6 has no init_sync.
                _replicate(tables, exchange_of(group), given.arguments.get("init_sync", True))
        method(self, *args, **kwargs)
        replicas = [handle.owners for handle in tables.values() if isinstance(handle.owners, Replicas)]
        if replicas:
            vars(self)["_replicas_of_tables"] = replicas

    return replicating


def beginning(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``DistributedDataParallel._pre_forward``, which `replicate` of torch calls too: tables learn of the pass."""

    @functools.wraps(method)
    def begin(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        _begin(vars(self).get("_replicas_of_tables", ()), self)
        return method(self, *args, **kwargs)

    return begin


def ending(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``DistributedDataParallel._post_forward``, whose tables learn of a backward through what it returns."""

    @functools.wraps(method)
    def end(self: DistributedDataParallel, output: Any) -> Any:
        output, replicas = method(self, output), vars(self).get("_replicas_of_tables", ())
        if replicas and self.find_unused_parameters and self.require_backward_grad_sync and torch.is_grad_enabled():
            for each in tree_leaves(output):
                if isinstance(each, Tensor) and each.requires_grad:
                    each.register_hook(functools.partial(_note_backward, replicas))
        return output

    return end


def _note_backward(replicas: list[Replicas], grad: Tensor) -> None:
    for each in replicas:
        each.passed = True


def _refuse_vocabularies(tables: dict[str, Handle]) -> None:
    """Raise for tables whose rows belong to other ids in each process."""
    for handle in tables.values():
        if handle.id_space.come_and_go and handle.owners.has_whole:
            raise InvalidValueError(
                f"DistributedDataParallel was given {handle}, which has a vocabulary: each process would give its rows to "
                "other ids; make it with process_group=..., or train in one process"
            )


def _check_others(module: nn.Module, tables: dict[str, Handle]) -> None:
    """Raise, before anything is written, for a model that has tables alone: torch's message is that none is trained."""
    if not any(param.requires_grad for param in module.parameters() if find_handle(param) is None):
        raise InvalidValueError(
            f"DistributedDataParallel was given a model of which only the table {_name_of_module(next(iter(tables)))} is "
            "trained, and leaves tables out; make the tables with process_group=... and train the model as it is: they "
            "exchange gradients by themselves"
        )


def _begin(replicas: Iterable[Replicas], model: Any) -> None:
    # A copy of the wrapper has copies of these.
    if not all(each.is_alive() for each in replicas):
        raise InvalidValueError(
            "this DistributedDataParallel is a copy of another, and the tables in it are those of each process alone; make it "
            "anew, of a copy of the model: DistributedDataParallel(copy.deepcopy(model.module))"
        )
    if torch.is_grad_enabled():
        for each in replicas:
            each.begin(model)


def _tables_of(module: nn.Module) -> dict[str, Handle]:
    """Return the handles among the parameters of `module`, by the names of the parameters."""
    found = {name: find_handle(param) for name, param in module.named_parameters(remove_duplicate=False)}
    return {name: handle for name, handle in found.items() if handle is not None}


def _leave_out(module: nn.Module, tables: dict[str, Handle]) -> None:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    # Its list of parameters calls those of the model itself ".weight".
    ignored.update(*((name, f".{name}") for name in tables))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)


def _name_of_module(name: str) -> str:
    """Return what messages call the module whose parameter is `name`."""
    module = name.rpartition(".")[0]
    return repr(module) if module else "(the model itself)"


def _replicate(tables: dict[str, Handle], exchange: Exchange, copy_rows: bool) -> None:
    """Have the processes train the same rows from now on: those of rank 0."""
    whole: dict[str, Handle] = {}
    for name, handle in tables.items():
        if isinstance(handle.owners, Replicas) and handle.owners.exchange.is_destroyed():
            # Of a group that was there before.
            handle.owners = Owners(handle)
        owners = handle.owners
        if not owners.is_alone and owners.exchange is not exchange:
            ours, theirs = (each.members for each in (owners.exchange, exchange))
            if ours != theirs:
                raise InvalidValueError(
                    f"DistributedDataParallel runs in the processes {theirs} but the table {_name_of_module(name)} belongs to "
                    f"the processes {ours}, so that its replicas would drift apart; give both the same process group"
                )
        # Rows that are read in place are the same in all.
        if owners.is_alone and handle.table.writable and handle not in whole.values():
            whole[name] = handle
    # Its own messages wait in backward, where a process that has left something out must still be told so.
    others = [handle.owners for handle in tables.values() if not handle.owners.is_alone]
    for each in dict.fromkeys([exchange, *(owners.exchange for owners in others)]):
        each.keep_apart()
    if not whole or exchange.ranks == 1:
        return
    error = None
    renormed = [handle.name or name for name, handle in whole.items() if handle.renormalizes]
    if renormed:
        error = InvalidValueError(
            f"DistributedDataParallel was given a model with the table {renormed[0]!r}, which has max_norm: each process "
            "would shorten rows of its own; make it with process_group=..., or without max_norm"
        )
    about = ", ".join(
        f"{_name_of_module(name)}: {handle.num_rows} x {handle.table.dim} {handle.rows.stored} idle={handle.idle}"
        for name, handle in whole.items()
    )
    exchange.agree_on_error("makes replicas", error, about)
    for handle in whole.values():
        _copy_from_first(handle, exchange, copy_rows)
        handle.owners = Replicas(handle, exchange)
    num_bytes = sum(handle.table.nbytes for handle in whole.values())
    warnings.warn(
        f"DistributedDataParallel keeps the whole table {', '.join(map(_name_of_module, whole))} in each of {exchange.ranks} "
        f"processes ({format_bytes(num_bytes)} each, without optimizer state); process_group=torch.distributed.group.WORLD "
        "shares the rows out, memory='shared' keeps one table for all processes of a host",
        stacklevel=4,
    )


@torch.no_grad()
def _copy_from_first(handle: Handle, exchange: Exchange, copy_rows: bool) -> None:
    """Make rows and the seed of rounding those of rank 0."""
    rows = handle.rows
    state = torch.tensor([as_int64(word) for word in rows.state_dict().values()], device="cpu")
    rows.load_state_dict(dict(zip(rows.state_dict(), exchange.from_first(state).tolist(), strict=True)))
    if not copy_rows:
        return
    rows.catch_up()
    handle.table.wait()
    for part in rows.parts("weight").values():
        for chunk in row_chunks(len(part), max(part[:1].nbytes, 1)):
            part[chunk].copy_(exchange.from_first(part[chunk]))
    handle.table.wait()


def refusing_tables(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``join``, or `join_hook`, of ``DistributedDataParallel``, which refuses tables."""

    @functools.wraps(method)
    def refusing(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        tables = _tables_of(self.module)
        if tables and dist.get_world_size(self.process_group) > 1:
            raise InvalidValueError(
                f"join() and Join let processes stop early, but the rows of table {_name_of_module(next(iter(tables)))} are "
                "exchanged by all; iterate over st.equal_steps(loader) instead, which stops all at the shortest"
            )
        return method(self, *args, **kwargs)

    return refusing


def check_not_wrapped(model: nn.Module) -> None:
    """Raise where tables that are made in a model are in a wrapper that would not know of them."""
    for each in model.modules():
        if isinstance(each, DistributedDataParallel) and dist.get_world_size(each.process_group) > 1:
            raise InvalidValueError(
                "model has a DistributedDataParallel, which would not know of tables that are made within it, so that their "
                "gradients are averaged by nobody; replace the embeddings first, or pass process_group="
            )


# --- what shards parameters by itself ------------------------------------------------------------------------------------


def refusing_zero(method: Callable[..., None]) -> Callable[..., None]:
    """Return ``Optimizer.__init__``, which refuses tables to an optimizer that shares its parameters out."""

    @functools.wraps(method)
    def refusing(self: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        if any_handles() and any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(self).__mro__):
            params = list(params)
            for param in params:
                each = param["params"] if isinstance(param, dict) else [param]
                for handle in filter(None, map(find_handle, each)):
                    raise OptimizerError(
                        f"ZeroRedundancyOptimizer was given {handle}, the weight of a table: it would step the table in one "
                        "process and send no rows to the others; give it the other parameters, and the table to an optimizer "
                        "of its own (with process_group=... its state is shared out as well)"
                    )
        method(self, params, *args, **kwargs)

    return refusing


def check_same_in_all(handle: Handle, optimizer: Optimizer) -> None:
    """Raise if processes, or groups of them, train a table each by itself beside parameters that FSDP shares out."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    others = (param.data for group in optimizer.param_groups for param in group["params"] if find_handle(param) is None)
    parts: list[Any] = [data for data in others if type(data).__name__ == "DTensor"]
    if parts and handle.owners.is_alone:
        raise OptimizerError(
            f"this optimizer trains parameters that fully_shard has shared out and {handle}, the weight of a table that every "
            f"process has by itself: their rows would drift apart; {_REMEDY}"
        )
    for part in parts:
        # Copied along the first dimension and shared out along another: hybrid sharding.
        if not part.placements[0].is_replicate() or not any(place.is_shard() for place in part.placements):
            continue
        copies = dist.get_process_group_ranks(part.device_mesh.get_group(0))
        owners = handle.owners.exchange.members
        if not set(copies) <= set(owners):
            raise OptimizerError(
                f"this optimizer trains parameters of which the processes {copies} have copies and {handle}, the weight of a "
                f"table that belongs to the processes {owners}: the copies of its rows would drift apart; make it with "
                "process_group=torch.distributed.group.WORLD"
            )
