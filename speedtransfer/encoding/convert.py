"""Rows to their small form and back, near the speed of memory: in one compiled pass where numba is there, else in torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.encoding.codecs import SCALE, Blocks8, Cast, Codec, RowInt8, meanings
from speedtransfer.encoding.rounding import Keys
from speedtransfer.jit import compiled_module, run_on_threads

_CHUNK = (1 << 15) - 1  # values that torch takes at a time on the CPU: they stay in the cache, and on one thread
_COMPILED_VALUES = 1 << 11  # fewer are done before a compiled pass would have begun
_WORK = 2  # a value takes as long as copying so many


def encode_rows(codec: Codec, values: Tensor, keys: Keys | None) -> dict[str, Tensor]:
    """Return the raw rows of `values` (n, width), contiguous: rounded stochastically with `keys`, without to the nearest."""
    if values.shape[1] == 0:
        return {s: values.new_zeros(len(values), p.width, dtype=p.dtype) for s, p in codec.parts.items()}
    step, compiled = _step(values), _compiled(values)
    if step >= len(values) and (compiled is None or keys is None):
        every = codec.encode(values, None if keys is None else keys.bits(slice(0, len(values))))
        return {suffix: part.contiguous() for suffix, part in every.items()}
    made = {s: buffers.empty((len(values), p.width), p.dtype, values.device) for s, p in codec.parts.items()}
    if compiled is not None and keys is not None:
        _encode_compiled(compiled, codec, values, keys, made)
        return made
    for start in range(0, len(values), step):
        rows = slice(start, start + step)
        for suffix, part in codec.encode(values[rows], None if keys is None else keys.bits(rows)).items():
            made[suffix][rows] = part
    return made


def decode_rows(codec: Codec, parts: dict[str, Tensor]) -> Tensor:
    """Return the values of raw rows, ``(n, width)`` float32 and contiguous."""
    raw = parts[""]
    values = buffers.empty(tuple(raw.shape), torch.float32, raw.device)
    if not isinstance(codec, Blocks8):  # one pass
        return codec.decode(parts, values)
    compiled = _compiled(raw)
    if compiled is not None:
        table = meanings(raw.device)
        arrays = raw.numpy(), parts[SCALE].numpy(), table.numpy(), codec.size, values.numpy()
        _run(compiled.decode_blocks, arrays, values, (*parts.values(), values))
        return values
    step = _step(raw)
    for start in range(0, len(raw), step):
        rows = slice(start, start + step)
        codec.decode({suffix: part[rows] for suffix, part in parts.items()}, values[rows])
    return values


def _encode_compiled(compiled: Any, codec: Codec, values: Tensor, keys: Keys, made: dict[str, Tensor]) -> None:
    source = values.detach().numpy(), keys.rows.view(-1).numpy(), keys.columns.numpy()
    memory = values, *keys, *made.values()
    if isinstance(codec, Cast):
        target = made[""].view(torch.int16).numpy()
        _run(
            compiled.encode_bfloat16 if codec.lost == 16 else compiled.encode_float16, (*source, target), values, memory
        )
    elif isinstance(codec, RowInt8):
        _run(compiled.encode_int8, (*source, made[""].numpy(), made[SCALE].numpy()), values, memory)
    elif isinstance(codec, Blocks8):
        _run(compiled.encode_blocks, (*source, codec.size, made[""].numpy(), made[SCALE].numpy()), values, memory)
    else:
        raise NotImplementedError(codec.name)


def _compiled(values: Tensor) -> Any:
    """Return the module of compiled passes where `values` are worth one and numba works, else None."""
    if values.device.type != "cpu" or values.numel() < _COMPILED_VALUES:
        return None
    return compiled_module("speedtransfer.encoding.numba_codecs")


def _run(function: Any, arrays: tuple[Any, ...], values: Tensor, memory: tuple[Tensor, ...]) -> None:
    run_on_threads([(function, arrays)], len(values), _WORK * values.nbytes, memory)


def _step(values: Tensor) -> int:
    return max(1, _CHUNK // max(1, values.shape[1])) if values.device.type == "cpu" else max(1, len(values))
