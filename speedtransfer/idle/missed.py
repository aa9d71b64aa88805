"""Let rows take the zero-gradient steps that they have missed, all at once: by numba or CUDA where it can, else in torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import is_trusted
from speedtransfer.idle import cuda_catch_up
from speedtransfer.idle.rule import IdleStep, Rule
from speedtransfer.idle.sums import Missed, Sums
from speedtransfer.idle.unsure import Unsure
from speedtransfer.jit import compiled_module, run_on_threads

_CHUNK_VALUES = 1 << 17  # on the CPU: so few that what is computed on the way stays in its cache
_TINY = 1e-30


def take_missed_steps(
    rule: Rule, sums: Sums, rows: dict[str, Tensor], last: Tensor, base: int, unsure: Unsure | None = None
) -> None:
    """Let rows take the steps that they have missed.

    Parameters
    ----------
    rule : Rule
    sums : Sums
        Of the steps after step number `base`.
    rows : dict of str to Tensor
        ``weight`` and the state planes, or one of `Lag.is_apart`, ``(n, dim)`` each, changed in place.
    last : Tensor
        ``(n, 1)`` int32: the step that touched each row last.
    unsure : Unsure, optional
        A step after those in `sums`, where `is_done_on_cuda`.
    """
    if last.is_cuda and is_done_on_cuda(rule, rows, last):
        packed = cuda_catch_up.pack_missed(rule, sums, rows, last, base, unsure)
        cuda_catch_up.launch("take_missed", rows["weight"], packed)
        return
    if _take_compiled(rule, sums, rows, last, base):
        return
    # Rows that were touched last before the steps begin exist in no table.
    index = (last.flatten() - base).long()
    index = index.masked_fill_(index < 0, sums.count)
    if "weight" not in rows:
        dtype = next(iter(rows.values())).dtype
        factors = sums.factors(index, torch.float64 if dtype == torch.float64 else torch.float32)
        _take_factors(rule, sums, factors, rows, index)
        return
    _take_chunks(rule, sums, rows, index)


def is_done_on_cuda(rule: Rule, rows: dict[str, Tensor], last: Tensor) -> bool:
    """Tell whether a kernel lets such rows, on a CUDA device, take steps."""
    planes = [rows[name] for name in ("weight", *rule.factors, rule.partner, rule.denominator) if name in rows]
    device = last.device
    suitable = cuda_catch_up.are_suitable(planes)
    return suitable and is_trusted("rows that take missed steps", device, lambda: _check_kernel(device))


def _take_compiled(rule: Rule, sums: Sums, rows: dict[str, Tensor], last: Tensor, base: int) -> bool:
    """Let rows take the steps by numba, if it can."""
    names = () if rule.denominator is None else ("weight", *rule.factors, rule.denominator)
    planes = tuple(rows[name] for name in names if name in rows)
    suitable = [p.dtype == torch.float32 and not p.is_cuda and p.is_contiguous() for p in planes]
    if not planes or len(planes) < len(names) or False in suitable:
        return False
    arrays = *[plane.numpy() for plane in planes], sums.table, sums.blocks, last.numpy()
    take = compiled_module("speedtransfer.idle.numba_sums").take_terms
    part = take, (*arrays, base, sums.count, sums.horizon, rule.floor, sums.eps)
    run_on_threads([part], last.shape[0], 2 * len(planes) * planes[0].nbytes, planes)
    return True


def _take_chunks(rule: Rule, sums: Sums, rows: dict[str, Tensor], index: Tensor) -> None:
    """Let rows, whose lines are `index` (n,) int64, take the steps by torch."""
    count, dim = rows["weight"].shape
    chunk = max(1, _CHUNK_VALUES // max(dim, 1)) if index.device.type == "cpu" else max(count, 1)
    for start in range(0, count, chunk):
        part_of_rows = {name: values[start : start + chunk] for name, values in rows.items()}
        _take(rule, sums, part_of_rows, index[start : start + chunk])


@torch.inference_mode(False)
def _check_kernel(device: torch.device) -> bool:
    rule = Rule(torch.float32)
    rule.factors, rule.denominator = ("m", "v"), "v"
    sums = Sums(rule)
    for t in range(1, 40):
        sums.take(IdleStep(0.99, (0.9, 0.99), scale=0.01 / (1 - 0.9**t), root=(1 - 0.99**t) ** -0.5, eps=1e-8))
    values = torch.linspace(-1, 1, 40 * 9, dtype=torch.float32, device=device).view(40, 9)
    rows = {"weight": values, "m": values.flip(0), "v": values.square() * 1e-14 ** values.abs()}
    found = {name: plane.clone() for name, plane in rows.items()}
    last = torch.arange(40, dtype=torch.int32, device=device)[:, None]
    cuda_catch_up.launch("take_missed", values, cuda_catch_up.pack_missed(rule, sums, found, last, 0))
    rows = {name: plane.clone() for name, plane in rows.items()}
    _take_chunks(rule, sums, rows, last.flatten().long())
    return all(torch.allclose(plane, rows[name], rtol=1e-5, atol=1e-6) for name, plane in found.items())


def _take(rule: Rule, sums: Sums, rows: dict[str, Tensor], index: Tensor) -> None:
    weight = rows["weight"]
    missed = sums.missed(index, torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if rule.denominator is not None and rule.factors[0] in rows:
        _take_terms(rule, sums, missed, rows, index)
    elif rule.partner is not None:
        a, b, c, d = missed.mix
        partner = rows.get(rule.partner)
        if partner is None:
            weight.mul_(a)
        else:
            mixed = weight * c
            weight.mul_(a).add_(partner * b)
            partner.mul_(d).add_(mixed)
    _take_factors(rule, sums, missed.factors, rows, index)


def _take_factors(rule: Rule, sums: Sums, factors: tuple[Tensor, ...], rows: dict[str, Tensor], index: Tensor) -> None:
    for name, factor in zip(rule.factors, factors, strict=True):
        if name in rows:
            rows[name].mul_(factor)
    if rule.floor and rule.denominator in rows:
        size = rows[rule.denominator]
        missed_any = (index < sums.count)[:, None].to(size.dtype)  # the others stay as they are
        size.clamp_min_(missed_any * sums.eps)


def _take_terms(rule: Rule, sums: Sums, missed: Missed, rows: dict[str, Tensor], index: Tensor) -> None:
    weight, m = rows["weight"], rows[rule.factors[0]]
    assert rule.denominator is not None
    x = rows[rule.denominator].to(missed.mass.dtype)  # of half precision, the least x would be zero
    x = x.clone() if rule.floor else _root(x)
    hard = index.new_empty(0, dtype=torch.int64)
    if sums.any_hard if index.is_cuda else bool((missed.valid_from > 0).any()):  # of CUDA that would be a wait
        hard = ((x < missed.valid_from) & (m != 0)).any(dim=1).nonzero().flatten()
    x.clamp_min_(torch.clamp_min(missed.valid_from, _TINY))
    values = x + missed.centers[-1]
    for center, spread in zip(reversed(missed.centers[:-1]), reversed(missed.spreads), strict=True):
        torch.div(spread, values, out=values)
        torch.sub(x + center, values, out=values)
    torch.div(missed.mass, values, out=values)
    values.add_(missed.linear).mul_(m)
    stepped = weight[hard]
    if len(hard):
        stepped = _step_by_step(rule, sums, {name: v[hard].double() for name, v in rows.items()}, index[hard])
    weight.mul_(missed.decay).sub_(values)
    weight[hard] = stepped.to(weight.dtype)


def _root(x: Tensor) -> Tensor:
    """Return the root, correctly rounded: torch's own may be one bit off on the CPU, and compiled code is not."""
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64):
        return x.sqrt()
    return torch.from_numpy(np.sqrt(x.numpy()))


def _step_by_step(rule: Rule, sums: Sums, rows: dict[str, Tensor], index: Tensor) -> Tensor:
    """Return the weights of a few rows after one missed step at a time."""
    weight, m = rows["weight"], rows[rule.factors[0]]
    assert rule.denominator is not None
    x = rows[rule.denominator]
    x = x if rule.floor else x.sqrt()
    longest = sums.count - int(index.min())
    for number in range(min(longest, sums.horizon)):
        scale, root, eps, factor, root_factor, decay = sums.steps_after(index, number)
        m, x = m * factor, x * root_factor
        divisor = torch.maximum(x, eps) if rule.floor else root * x + eps
        weight = weight * decay - scale * torch.where(m == 0, 0.0, m / divisor)
    return weight * sums.decay_after(index)
