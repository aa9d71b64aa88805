"""What models with tables need beside ``torch.distributed``: parameters to leave out, clipping, and whole state dicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.errors import InvalidTypeError
from speedtransfer.nn.module_state import placeholder_rows
from speedtransfer.nn.multi import MultiEmbedding
from speedtransfer.nn.options import check_model
from speedtransfer.optim import Handle, Sharded, find_handle
from speedtransfer.ranks import Segment, is_first
from speedtransfer.tables import row_chunks


def table_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of the tables in `model`.

    FSDP2 must leave them out: ``fully_shard(model, ignored_params=st.table_parameters(model))``. Make the tables with
    `process_group`, or the processes would train each its own. `DistributedDataParallel` leaves them out by itself.
    """
    check_model(model)
    return {param for param in model.parameters() if find_handle(param) is not None}


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_``, which takes no model that is half FSDP2.

    Parameters
    ----------
    parameters : iterable of Tensor
        Ordinary ones, those that ``fully_shard`` has made DTensors, and weights of tables.
    max_norm, norm_type, error_if_nonfinite
        As there.

    Returns
    -------
    Tensor
        The norm before clipping, a scalar; the same in all processes.

    Raises
    ------
    RuntimeError
        With `error_if_nonfinite`, the norm is no number or infinite.
    """
    if isinstance(parameters, nn.Module):
        raise InvalidTypeError(f"parameters is a {type(parameters).__name__}; pass its parameters()")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.tensor(0.0, device="cpu")
    max_norm, norm_type = float(max_norm), float(norm_type)  # refused as torch refuses them
    groups: dict[Any, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((_is_dtensor(grad), grad.device, grad.dtype), []).append(grad)
    norms = []
    for group in groups.values():
        norm: Any = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(group, norm_type)), norm_type)
        norms.append((norm.full_tensor() if _is_dtensor(norm) else norm).to(grads[0].device))
    total = torch.linalg.vector_norm(
        torch.stack([norm.to(torch.promote_types(norm.dtype, norms[0].dtype)) for norm in norms]), norm_type
    )
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(total)}, so they cannot be clipped; to go on, "
            "pass error_if_nonfinite=False"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for (_, device, _), group in groups.items():
        torch._foreach_mul_([_local(grad) for grad in group], factor.to(device))
    return total


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def _local(grad: Any) -> Tensor:
    """Return the part of a gradient that this process has, over the same memory."""
    return grad.to_local() if _is_dtensor(grad) else grad


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of `model` with all rows of its tables, as that of ``nn.Embedding`` modules, in rank 0.

    Collective: every process of the tables' group must call it. Others than its rank 0 get an empty dict. Rows come in chunks
    of 16 MB; rank 0 needs memory for all of them.
    """
    check_model(model)
    with placeholder_rows() as met:
        state = model.state_dict()
    handles = {id(placeholder): handle for placeholder, handle in met}
    result, whole = dict[str, Any](), dict[Handle, Tensor]()
    for key, value in state.items():
        handle = handles.get(id(value))
        if handle is None:
            result[key] = value.full_tensor() if _is_dtensor(value) else value
            continue
        if handle not in whole:
            handle.step.recover()
            owners = handle.owners
            if not owners.has_whole and handle.id_space.come_and_go:
                raise InvalidTypeError(
                    f"{handle} has a vocabulary that {owners.exchange.ranks} processes share out, and rows in no order; call "
                    "vocabulary.export() in each of them, for their ids and rows"
                )
            whole[handle] = _all_rows(handle, owners) if isinstance(owners, Sharded) else handle.rows.whole("weight")
        result[key] = whole[handle]
    for name, module in model.named_modules(remove_duplicate=False):
        # In place of the whole table, and of what its features save in a checkpoint.
        if isinstance(module, MultiEmbedding) and module._has_rows() and module.vocabulary is None:
            prefix = f"{name}." if name else ""
            rows = result.pop(f"{prefix}weight")
            result.update({f"{prefix}{key}.weight": rows[f.start : f.stop] for key, f in module.items()})
    exchanges = [handle.owners.exchange for handle in whole if not handle.owners.has_whole]
    first = all(exchange.rank == 0 for exchange in exchanges) if exchanges else is_first()
    return result if first else {}


def _all_rows(handle: Handle, owners: Sharded) -> Tensor:
    """Return all rows, ``(num_rows, dim)`` in the order of ids on the host, in rank 0; no rows in others."""
    exchange, partition, rows = owners.exchange, owners.partition, handle.rows
    rows.catch_up()
    exchange.agree("reads all rows", [0], handle.owners.so_far)
    dim, none = handle.table.dim, [0] * exchange.ranks
    # That of a state dict: of rows stored as bfloat16 or float16 this, also in a process that has none.
    dtype = rows.whole("weight", 0, 0).dtype
    if owners.is_shared:
        # It has all of them, in this order.
        return rows.whole("weight") if exchange.rank == 0 else torch.empty(0, dim, dtype=dtype, device="cpu")
    whole = torch.empty(handle.num_rows if exchange.rank == 0 else 0, dim, dtype=dtype, device="cpu")
    sizes = [partition.size(rank) for rank in range(exchange.ranks)]
    for chunk in row_chunks(partition.per_rank, dim * dtype.itemsize):
        parts = [slice(min(chunk.start, size), min(chunk.stop, size)) for size in sizes]
        counts, own = [part.stop - part.start for part in parts], parts[exchange.rank]
        values = rows.whole("weight", own.start, own.stop).cpu()
        sends = [len(values), *none[1:]]
        (got,) = exchange.move("rows", [Segment(values, sends, counts if exchange.rank == 0 else none)])
        if exchange.rank == 0:
            ids = [partition.ids_of(rank, part.start, part.stop) for rank, part in enumerate(parts)]
            whole[torch.cat(ids)] = got
    return whole
