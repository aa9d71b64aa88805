"""Encode and decode rows near the speed of memory: in one pass of numba where that works, else in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.encoding.codecs import Blocks8, Codec, meanings
from speedtransfer.encoding.rounding import Keys
from speedtransfer.jit import compiled_module, run_on_threads

# Values that torch takes at a time on the CPU: they stay in the cache, and on one thread.
_CHUNK = (1 << 15) - 1
# Below this size torch is faster than a numba call.
_COMPILED_VALUES = 1 << 11
# A value takes as long as copying so many.
_WORK = 2


def encode_rows(codec: Codec, values: Tensor, keys: Keys | None) -> dict[str, Tensor]:
    """Return the encoded rows of `values` (n, width), contiguous: rounded stochastically with `keys`, else to the nearest."""
    if values.shape[1] == 0:
        return {s: values.new_zeros(len(values), p.width, dtype=p.dtype) for s, p in codec.parts.items()}
    compiled = None if keys is None else _compiled(values)
    if compiled is None and len(values) <= _chunk_rows(values):
        encoded = codec.encode(values, None if keys is None else keys.bits(slice(0, len(values))))
        return {suffix: part.contiguous() for suffix, part in encoded.items()}
    made = {s: buffers.empty((len(values), p.width), p.dtype, values.device) for s, p in codec.parts.items()}
    if compiled is not None and keys is not None:
        _encode_compiled(compiled, codec, values, keys, made)
        return made
    for rows in _chunks(values):
        for suffix, part in codec.encode(values[rows], None if keys is None else keys.bits(rows)).items():
            made[suffix][rows] = part
    return made


def decode_rows(codec: Codec, parts: dict[str, Tensor]) -> Tensor:
    """Return the values of encoded rows, ``(n, width)`` float32 and contiguous."""
    codes = parts[""]
    values = buffers.empty(tuple(codes.shape), torch.float32, codes.device)
    if not isinstance(codec, Blocks8):  # one pass
        return codec.decode(parts, values)
    compiled = _compiled(codes)
    if compiled is not None:
        _run(compiled.decode_blocks, [*parts.values(), meanings(codes.device)], values)
        return values
    for rows in _chunks(codes):
        codec.decode({suffix: part[rows] for suffix, part in parts.items()}, values[rows])
    return values


def _encode_compiled(compiled: Any, codec: Codec, values: Tensor, keys: Keys, made: dict[str, Tensor]) -> None:
    # NumPy has no bfloat16.
    outputs = [part.view(torch.int16) if part.element_size() == 2 else part for part in made.values()]
    _run(getattr(compiled, codec.kernel), [keys.rows.view(-1), keys.columns, *outputs], values.detach())


def _compiled(values: Tensor) -> Any:
    """Return the module of compiled passes where `values` are worth one and numba works, else None."""
    if values.device.type != "cpu" or values.numel() < _COMPILED_VALUES:
        return None
    return compiled_module("speedtransfer.encoding.numba_codecs")


def _run(function: Any, others: list[Tensor], values: Tensor) -> None:
    memory = values, *others
    part = function, tuple(tensor.numpy() for tensor in memory)
    run_on_threads([part], len(values), _WORK * values.nbytes, memory)


def _chunk_rows(values: Tensor) -> int:
    return max(1, _CHUNK // max(1, values.shape[1])) if values.device.type == "cpu" else max(1, len(values))


def _chunks(values: Tensor) -> Iterator[slice]:
    step = _chunk_rows(values)
    for start in range(0, len(values), step):
        yield slice(start, start + step)
