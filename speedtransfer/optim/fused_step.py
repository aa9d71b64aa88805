"""A step of torch's Adam, AdamW or SGD on active rows by one kernel, which reads and writes their state where it is stored.

It takes the place of a gather, the optimizer's own operations and a scatter. Rows of ``idle="exact"`` have caught up when they
were read, for which their state was read along: the kernel takes that, and notes the step that they have taken. `plan_step`
says whether the kernel does what the optimizer would do; where that is not known the step goes the ordinary way. While the
optimizer steps the rows have no gradient, so that it leaves them alone. Only the gradient may differ after the step: it stays
as it is, where foreach SGD with nesterov changes it.

Torch makes a step in several ways (foreach, fused, neither), each with a rounding of its own. The kernel has that of foreach,
torch's default on CUDA, and is used where a first comparison on the device gives the same bits; with
``SPEEDTRANSFER_FUSED_STEP=1`` in the environment also where it gives them to rounding, with ``SPEEDTRANSFER_FUSED_STEP=0``
nowhere.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach, _global_optimizer_pre_hooks

from speedtransfer.cuda import WARM_UP, KernelArgument, check_not_capturing, is_capturing, is_trusted, launch_over
from speedtransfer.engines import CachedRows
from speedtransfer.errors import InvalidValueError
from speedtransfer.once import once
from speedtransfer.optim.graph import KEY
from speedtransfer.optim.state import RowState
from speedtransfer.rows import LAST_STEP
from speedtransfer.tables import Known

SWITCH = "SPEEDTRANSFER_FUSED_STEP"
log = logging.getLogger(__name__)

# struct Step of step.cu
_MAX_STATES = 3
_STEP = f"{27 + 3 * (_MAX_STATES + 2)}q11d"
_FLOAT32_MAX = torch.finfo(torch.float32).max
# Whose functions may make up the step of an optimizer: its own, and what torch and this package wrap around it.
_OURS = {
    "torch.optim.adam",
    "torch.optim.adamw",
    "torch.optim.sgd",
    "torch.optim.optimizer",
    "speedtransfer.optim.hooks",
}


# How torch would make the step: what the kernel has in enum Way of step.cu, and others, to which it only comes near.
_CPU, _FOREACH, _OTHER = range(3)


class FusedStep(NamedTuple):
    """What the kernel needs to know: the planes of state in its order, its numbers, and how many steps came before."""

    planes: tuple[str, ...]
    way: int = _CPU
    maximize: bool = False
    nesterov: bool = False
    decay: float = 0.0
    shrink: float = 1.0
    rate: float = 0.0
    momentum: float = 0.0
    gradient_share: float = 0.0
    beta1: float = 0.0
    first_share: float = 0.0
    beta2: float = 0.0
    second_share: float = 0.0
    root_correction: float = 1.0
    eps: float = 0.0
    steps: Tensor | None = None

    @property
    def on_device(self) -> list[Tensor]:
        """Return `steps` if the host does not know its value: the kernel then makes what depends on it."""
        return [self.steps] if self.steps is not None and self.steps.is_cuda else []


def plan_step(
    state: RowState, optimizer: Optimizer, group: dict[str, Any], given: dict[str, Tensor]
) -> FusedStep | None:
    """Return how the kernel makes the step of `optimizer`, or None where the step goes the ordinary way.

    `given` is the state of the active rows by plane, each ``(n, width)``, as it was read with them, if it was.
    """
    rows, table = state.rows, state.rows.table
    if not table.runs_kernels:
        return None
    switch = os.environ.get(SWITCH)
    if switch not in (None, "", "0", "1"):
        raise InvalidValueError(f"{SWITCH} is {switch!r} in the environment; set it to 0 or 1, or leave it out")
    if switch == "0":
        return None
    plan = _PLANS.get(type(optimizer))
    if plan is None or state.sparse or not rows.as_stored or rows.dtype != torch.float32:
        return None
    if is_capturing() or _is_altered(optimizer):
        return None
    way = _way_of(optimizer, group, table.device)
    if way == _OTHER and switch != "1":
        return None
    found = optimizer.state.get(state.param) or {}
    planes = state.planes_in_use(found)
    made = None if planes is None else plan(group, found, planes)
    if made is None or not _are_numbers(made[4:-1]):
        return None
    # Idle rows catch up when they are read, with their state. For those who read ahead the ordinary way writes beside the
    # next operations, and keeps what it writes for them.
    has_state = given.keys() >= {*made.planes}
    if (rows.lag and not has_state) or (has_state and table.is_read_ahead):
        return None
    if not is_trusted("fused steps", table.device, lambda: _check(table.device)):
        return None
    return made._replace(way=way) if switch == "1" or _has_bits_of_torch(table.device) else None


def make_step(
    plan: FusedStep,
    state: RowState,
    optimizer: Optimizer,
    group: dict[str, Any],
    ids: Tensor,
    grad: Tensor,
    active: Tensor,
    given: dict[str, Tensor],
    known: Known,
) -> None:
    """Update the rows `ids` (n,) and their state in the table.

    Parameters
    ----------
    plan : FusedStep
    state : RowState
    optimizer, group : Optimizer, dict
    ids, known : Tensor, Known
        ``(n,)`` int64 on the compute device, unique; maybe padded.
    grad : Tensor
        ``(n, dim)``.
    active : Tensor
        ``(n, dim)``, the rows as read, updated as well.
    given : dict of str to Tensor
        As for `plan_step`.
    """
    grad, rows, lag = grad.contiguous(), state.rows, state.rows.lag
    held = [given[name] for name in plan.planes] if given.keys() >= {*plan.planes} else []
    read, written = () if held else plan.planes, ("weight", *plan.planes)
    # Before the kernel, which counts from here on: what fails afterwards takes it back.
    if plan.steps is not None:
        plan.steps.add_(1)
    made = None if lag is None else lag.step_made(optimizer, group, optimizer.state[state.param])
    if made is not None:
        rows.mark_steps()
    taken = lag.now + (made is not None) if rows.has(LAST_STEP) else None

    def queue(stored: list[Tensor], cached: CachedRows | None) -> list[Tensor]:
        weight, *states = stored
        last = None if taken is None else states.pop()
        _queue(plan, ids, grad, active, weight, states, held, last, taken or 0, cached)
        return [ids, grad, active, *held, *plan.on_device]

    rows.update(ids, read, written if taken is None else (*written, LAST_STEP), queue, known)
    if made is not None:
        lag.record(made)
    state.end_elsewhere()


def _is_altered(optimizer: Optimizer) -> bool:
    """Tell whether somebody else takes part in the steps of `optimizer`, or looks at a gradient before them."""
    # One of each is ours.
    if len(optimizer._optimizer_step_pre_hooks) > 1 or len(_global_optimizer_pre_hooks) > 1:
        return True
    # GradScaler's, for optimizers that do the unscaling themselves.
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return True
    step: Any = type(optimizer).step
    while step is not None:
        # functools.wraps copies `__module__`, but not this.
        if getattr(step, "__globals__", {}).get("__name__") not in _OURS:
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def _way_of(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> int:
    """Return how `optimizer` would step the parameters of `group`."""
    if device.type != "cuda":
        return _CPU
    if group.get("fused"):
        return _OTHER
    foreach = group.get("foreach")
    if foreach is None:
        # Asking every parameter takes its time. Tables are ordinary parameters in the step.
        known, params = _foreach_by_default.setdefault(optimizer, {}), group["params"]
        key = id(params), len(params)
        if key not in known:
            others = [param for param in params if KEY not in param.__dict__]
            known[key] = _default_to_fused_or_foreach(others, differentiable=False)[1]
        foreach = known[key]
    return _FOREACH if foreach else _OTHER


_foreach_by_default = weakref.WeakKeyDictionary[Optimizer, dict[tuple[int, int], bool]]()


def _are_numbers(values: tuple[Any, ...]) -> bool:
    """Tell whether hyperparameters are numbers, no tensors, which float32 can hold."""
    return all(type(value) in (int, float) and abs(value) <= _FLOAT32_MAX for value in values)


def _plan_sgd(group: dict[str, Any], found: dict[str, Any], planes: dict[str, str]) -> FusedStep | None:
    numbers = [group[key] for key in ("lr", "momentum", "dampening", "weight_decay")]
    if group["differentiable"] or not _are_numbers(tuple(numbers)):
        return None
    lr, momentum, dampening, decay = numbers
    names = ("momentum_buffer",) if momentum else ()
    if planes.keys() != set(names):
        return None
    return FusedStep(
        tuple(planes[name] for name in names),
        maximize=group["maximize"],
        nesterov=group["nesterov"],
        decay=decay,
        rate=-lr,
        momentum=momentum,
        gradient_share=1 - dampening,
    )


def _plan_adam(
    group: dict[str, Any], found: dict[str, Any], planes: dict[str, str], decoupled: bool = False
) -> FusedStep | None:
    numbers = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
    names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
    steps = found.get("step")
    if group["capturable"] or group["differentiable"] or not _are_numbers(numbers):
        return None
    if planes.keys() != set(names) or not isinstance(steps, Tensor):
        return None
    lr, beta1, beta2, eps, decay = numbers
    first = second = 1.0
    if steps.is_cuda:
        if steps.dtype != torch.float32:
            return None
    else:
        # As torch computes these, in float64.
        number = (steps + 1).item()
        first, second = 1 - beta1**number, 1 - beta2**number
    decoupled = group.get("decoupled_weight_decay", decoupled)
    return FusedStep(
        tuple(planes[name] for name in names),
        maximize=group["maximize"],
        decay=0.0 if decoupled else decay,
        shrink=1 - lr * decay if decoupled else 1.0,
        rate=-(lr / first),
        beta1=beta1,
        first_share=1 - beta1,
        beta2=beta2,
        second_share=1 - beta2,
        root_correction=second**0.5,
        eps=eps,
        steps=steps,
    )


# By class, not subclass: another may do anything.
_PLANS: dict[type, Callable[[dict[str, Any], dict[str, Any], dict[str, str]], FusedStep | None]] = {
    SGD: _plan_sgd,
    Adam: _plan_adam,
    # Where its groups do not say so themselves.
    AdamW: functools.partial(_plan_adam, decoupled=True),
}


# --- the kernel -----------------------------------------------------------------------------------------------------------


def _queue(
    plan: FusedStep,
    ids: Tensor,
    grad: Tensor,
    active: Tensor,
    weight: Tensor,
    states: list[Tensor],
    held: Sequence[Tensor] = (),
    last: Tensor | None = None,
    taken: int = 0,
    cached: CachedRows | None = None,
) -> None:
    """Queue the kernel on the current stream; `states`, and `held` if it was read, are in the order of `plan.planes`.

    The rows of `last`, (num_rows, 1) int32, become `taken`. `cached`: where rows of `weight`, `states` and `last` are instead.
    """
    (count, width), stored = grad.shape, [weight, *states]
    pointers, strides = [plane.data_ptr() for plane in stored], [4 * plane.stride()[0] for plane in stored]
    dense, slots = [rows.data_ptr() for rows in held], [] if cached is None else cached.slots
    moved = *dense, *pointers, *strides, *[values for values, *_ in slots[: len(stored)]]
    bits = functools.reduce(operator.or_, (4 * width, grad.data_ptr(), active.data_ptr(), *moved))
    lane = 16 if bits % 16 == 0 else 4
    lanes, missing = 4 * width // lane, [0] * (_MAX_STATES - len(states))
    noted = (0, 0, 0) if last is None else (last.data_ptr(), 4 * last.stride()[0], taken)
    argument = KernelArgument(_STEP).pack(
        *(ids.data_ptr(), grad.data_ptr(), active.data_ptr(), count, weight.shape[0], lanes, lane),
        *(pointers[0], strides[0], *pointers[1:], *missing, *strides[1:], *missing),
        *(*dense, *[0] * (_MAX_STATES - len(dense)), *noted, 0 if cached is None else cached.found.data_ptr()),
        *(*itertools.chain(*slots), *[0] * (3 * (_MAX_STATES + 2 - len(slots)))),
        *(sum(steps.data_ptr() for steps in plan.on_device), len(states), *plan[1:-1]),
    )
    launch_over(count * lanes, "step.cu", "step_rows", grad.device, argument, on_host=not weight.is_cuda)


_KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "dampening": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (Adam, {"weight_decay": 0.1}),
    (Adam, {"maximize": True}),
    (AdamW, {"betas": (0.4, 0.9), "weight_decay": 0.1, "amsgrad": True}),
]


def _check(device: torch.device) -> bool:
    """Compare the kernel with torch, for every kind, dimensions of whole lanes and others, and a row that does not exist."""
    return all(_is_right(*kind, width, device) for kind in _KINDS for width in (3, 8))


@once
def _has_bits_of_torch(device: torch.device) -> bool:
    """Tell whether the kernel rounds as torch does: asked once a process."""
    check_not_capturing("the first use of the kernels for steps", WARM_UP)
    found = all(_is_right(*kind, 1024, device, exact=True) for kind in _KINDS)
    if not found:
        log.info("steps go by torch's operations on %s: those of one kernel are rounded otherwise", device)
    return found


def _is_right(kind: type[Any], options: dict[str, Any], width: int, device: torch.device, exact: bool = False) -> bool:
    """Take one step by the optimizer, and then others by both; `exact`: they must give the same bits."""
    way = _CPU if device.type == "cpu" else _FOREACH
    # torch would make counts of steps on a default device.
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
        # Without hooks, which are not meant for this one.
        step, draw = inspect.unwrap(kind.step), torch.Generator().manual_seed(width)

        def drawn() -> Tensor:
            sizes = 10.0 ** torch.randint(-6, 3, (5, width), generator=draw, device="cpu") if exact else 1
            values = torch.randn(5, width, generator=draw, dtype=torch.float32, device="cpu") * sizes
            return values.to(device, torch.float32)

        weight = torch.nn.Parameter(drawn())
        optimizer = kind([weight], lr=0.1, foreach=way == _FOREACH, **options)
        (group,) = optimizer.param_groups
        weight.grad = drawn()
        step(optimizer)
        found = optimizer.state[weight]
        names = [name for name, value in found.items() if isinstance(value, Tensor) and value.dim()]
        ids = torch.tensor([5, 3, 0, 1, 4, 2], device=device)
        table, before = weight.detach().clone(), {name: found[name].clone() for name in names}
        last = torch.zeros(5, 1, dtype=torch.int32, device=device)
        for number in range(8 if exact else 2):
            plan = _PLANS[kind](group, found, {name: name for name in names})
            if plan is None:
                return False
            plan = plan._replace(way=way)
            weight.grad = grad = drawn()
            states = [before[name] for name in plan.planes]
            grads, rows, *held = (
                torch.cat([values.new_ones(1, width), values[ids[1:]]]) for values in (grad, table, *states)
            )
            # The state is read by the kernel, and then before it, in turns.
            if number % 2:
                _queue(plan, ids, grads, rows, table, states, held, last, number)
            else:
                _queue(plan, ids, grads, rows, table, states)
            step(optimizer)
        if not bool((last == number).all()):
            return False
        pairs = [(table, weight), (rows[1:], weight[ids[1:]]), *((before[name], found[name]) for name in names)]
        if exact:
            return all(torch.equal(ours, theirs) for ours, theirs in pairs)
        return all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) for ours, theirs in pairs)
