"""Encode and decode rows near the speed of memory: in one pass of numba or CUDA where those work, else in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.dtypes import FLOAT8_DTYPES
from speedtransfer.encoding import cuda_codecs
from speedtransfer.encoding.codecs import LOW, SCALE, Codec
from speedtransfer.encoding.rounding import Keys, column_keys
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
    encode = None if keys is None or not codec.kernel else _encoder(values)
    if encode is None and len(values) <= _chunk_rows(values):
        encoded = codec.encode(values, _bits(keys, slice(0, len(values)), values))
        return {suffix: part.contiguous() for suffix, part in encoded.items()}
    made = {s: buffers.empty((len(values), p.width), p.dtype, values.device) for s, p in codec.parts.items()}
    if encode is not None:
        encode(codec, values.detach(), keys, made)
        return made
    for rows in _chunks(values):
        for suffix, part in codec.encode(values[rows], _bits(keys, rows, values)).items():
            made[suffix][rows] = part
    return made


def decode_rows(codec: Codec, parts: dict[str, Tensor]) -> Tensor:
    """Return the values of encoded rows, ``(n, width)`` float32 and contiguous."""
    codes = parts[""]
    values = buffers.empty(tuple(codes.shape), torch.float32, codes.device)
    if not codec.decoder:  # one pass
        return codec.decode(parts, values)
    compiled = _compiled(codes)
    if compiled is not None:
        known = codec.meanings(codes.device)
        others = [parts[LOW]] if known is None else [parts[SCALE].to(torch.float32), known]
        _run(getattr(compiled, codec.decoder), [codes, *others], values)
        return values
    if cuda_codecs.is_usable(codes):
        cuda_codecs.decode(codec, parts, values)
        return values
    for rows in _chunks(codes):
        codec.decode({suffix: part[rows] for suffix, part in parts.items()}, values[rows])
    return values


def _encoder(values: Tensor) -> Callable[..., None] | None:
    """Return what encodes `values` stochastically in one pass; None: torch does."""
    if cuda_codecs.is_usable(values):
        return cuda_codecs.encode
    compiled = _compiled(values)
    return None if compiled is None else functools.partial(_encode_compiled, compiled)


def _encode_compiled(compiled: Any, codec: Codec, values: Tensor, keys: Keys, made: dict[str, Tensor]) -> None:
    rows = keys.rows(slice(0, len(values))).view(-1)
    _run(getattr(compiled, codec.kernel), [rows, column_keys(values.shape[1], values.device), *made.values()], values)


def _bits(keys: Keys | None, rows: slice, values: Tensor) -> Tensor | None:
    return None if keys is None else keys.bits(rows, values.shape[1])


def _compiled(values: Tensor) -> Any:
    """Return the module of compiled passes where `values` are worth one, else None."""
    if values.device.type != "cpu" or values.numel() < _COMPILED_VALUES:
        return None
    return compiled_module("speedtransfer.encoding.numba_codecs")


def _run(function: Any, others: list[Tensor], values: Tensor) -> None:
    memory = values, *others
    part = function, tuple(_array(tensor) for tensor in memory)
    run_on_threads([part], len(values), _WORK * values.nbytes, memory)


def _array(tensor: Tensor) -> Any:
    """Return the bits of a tensor of any dtype; NumPy has neither bfloat16 nor float8."""
    if tensor.element_size() == 2:
        tensor = tensor.view(torch.int16)
    return (tensor.view(torch.uint8) if tensor.dtype in FLOAT8_DTYPES else tensor).numpy()


def _chunk_rows(values: Tensor) -> int:
    return max(1, _CHUNK // max(1, values.shape[1])) if values.device.type == "cpu" else max(1, len(values))


def _chunks(values: Tensor) -> Iterator[slice]:
    step = _chunk_rows(values)
    for start in range(0, len(values), step):
        yield slice(start, start + step)
