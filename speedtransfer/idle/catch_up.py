"""Rows brought up to date: the zero-gradient steps they have missed, all at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from speedtransfer.idle.history import History, Missed, compiled_module
from speedtransfer.idle.rule import Rule
from speedtransfer.jit import run_on_threads

_CHUNK_VALUES = 1 << 17  # on the CPU: so few that what is computed on the way stays in its cache
_TINY = 1e-30


def catch_up(history: History, rows: dict[str, Tensor], last: Tensor) -> None:
    """Let rows take the steps that they have missed.

    Parameters
    ----------
    history : History
    rows : dict of str to Tensor
        ``weight`` and the state planes, ``(n, dim)`` each, changed in place.
    last : Tensor
        ``(n, 1)`` int32: the step that touched each row last.
    """
    count, dim = rows["weight"].shape
    if _can_compile(history, rows):
        _take_terms_compiled(history, rows, last)
        return
    index = (last.flatten() - history.base).long()
    chunk = max(1, _CHUNK_VALUES // max(dim, 1)) if last.device.type == "cpu" else max(count, 1)
    for start in range(0, count, chunk):
        part = {name: values[start : start + chunk] for name, values in rows.items()}
        _catch_up(history, part, index[start : start + chunk])


def _planes_of_terms(rule: Rule) -> tuple[str, ...]:
    return () if rule.denominator is None else ("weight", *rule.factors, rule.denominator)


def _can_compile(history: History, rows: dict[str, Tensor]) -> bool:
    planes = [rows.get(name) for name in _planes_of_terms(history.rule)]
    suits = (p is not None and p.dtype == torch.float32 and not p.is_cuda and p.is_contiguous() for p in planes)
    return bool(planes) and all(suits) and compiled_module() is not None


def _take_terms_compiled(history: History, rows: dict[str, Tensor], last: Tensor) -> None:
    compiled = compiled_module()
    rule = history.rule
    memory = tuple(rows[name] for name in _planes_of_terms(rule))
    arguments = *(values.numpy() for values in memory), *history.arrays(), last.numpy(), history.base, history.length
    part = compiled.take_terms, (*arguments, history.horizon, rule.floor, history.eps)
    run_on_threads([part], len(last), 2 * sum(values.nbytes for values in memory), memory)


def _catch_up(history: History, rows: dict[str, Tensor], index: Tensor) -> None:
    rule, weight = history.rule, rows["weight"]
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    missed = Missed.of(history.lines(index).to(dtype))
    if rule.denominator is not None and rule.factors[0] in rows:
        _take_terms(history, missed, rows, index)
    elif rule.partner is not None:
        a, b, c, d = missed.mix
        partner = rows.get(rule.partner)
        if partner is None:
            weight.mul_(a)
        else:
            mixed = weight * c
            weight.mul_(a).add_(partner * b)
            partner.mul_(d).add_(mixed)
    for name, factor in zip(rule.factors, missed.factors, strict=True):
        if name in rows:
            rows[name].mul_(factor)
    if rule.floor and rule.denominator in rows:
        missed_any = (index < history.length)[:, None].to(weight.dtype)  # rows up to date stay as they are
        rows[rule.denominator].clamp_min_(missed_any * history.eps)


def _take_terms(history: History, missed: Missed, rows: dict[str, Tensor], index: Tensor) -> None:
    rule, weight, m = history.rule, rows["weight"], rows[history.rule.factors[0]]
    assert rule.denominator is not None
    x = rows[rule.denominator].to(missed.mass.dtype)  # of half precision, the least x would be zero
    x = x.clone() if rule.floor else _root(x)
    hard = index.new_empty(0, dtype=torch.int64)
    if history.any_hard if index.is_cuda else bool((missed.valid_from > 0).any()):  # of CUDA that would be a wait
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
        stepped = _step_by_step(history, {name: v[hard].double() for name, v in rows.items()}, index[hard])
    weight.mul_(missed.decay).sub_(values)
    weight[hard] = stepped.to(weight.dtype)


def _root(x: Tensor) -> Tensor:
    """Return the root, correctly rounded: torch's own may be one bit off on the CPU, and compiled code is not."""
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64):
        return x.sqrt()
    return torch.from_numpy(np.sqrt(x.numpy()))


def _step_by_step(history: History, rows: dict[str, Tensor], index: Tensor) -> Tensor:
    """Return the weights of a few rows after one missed step at a time."""
    rule, weight, m = history.rule, rows["weight"], rows[history.rule.factors[0]]
    assert rule.denominator is not None
    x = rows[rule.denominator]
    x = x if rule.floor else x.sqrt()
    longest = history.length - int(index.min())
    for number in range(min(longest, history.horizon)):
        scale, root, eps, factor, root_factor, decay = history.steps_after(index, number)
        m, x = m * factor, x * root_factor
        divisor = torch.maximum(x, eps) if rule.floor else root * x + eps
        weight = weight * decay - scale * torch.where(m == 0, 0.0, m / divisor)
    return weight * history.decay_after(index)
