"""Encode and decode rows on CUDA devices by kernels: the same bits as `codecs` in one launch each."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import KernelArgument, check_not_capturing, is_trusted, launch_over
from speedtransfer.encoding.choice import StorageDtype, codec_for
from speedtransfer.encoding.codecs import LOW, SCALE, Codec
from speedtransfer.encoding.rounding import Keys
from speedtransfer.encoding.split24 import SPLIT24

_SOURCE = "codecs.cu"
_FORMS: dict[StorageDtype, int] = {
    torch.bfloat16: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.uint8: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    SPLIT24: 6,
}


def pack_encoding(codec: Codec, values: Tensor, keys: Keys, made: dict[str, Tensor]) -> np.ndarray:
    """Return the argument of the kernel encode_rows, which fills `made` with the encoded rows of `values`."""
    count, width = values.shape
    beside = _beside(made)
    pointers = (values.data_ptr(), keys.ids.data_ptr(), made[""].data_ptr(), 0 if beside is None else beside.data_ptr())
    return KernelArgument("9q").pack(*pointers, count, width, _blocks(made), keys.signed_write, _form(made))


def pack_decoding(parts: dict[str, Tensor], values: Tensor) -> np.ndarray:
    """Return the argument of the kernels that fill `values` (n, width); scales are float32."""
    beside = _beside(parts)
    assert beside is not None
    pointers = parts[""].data_ptr(), beside.data_ptr(), values.data_ptr()
    return KernelArgument("7q").pack(*pointers, *values.shape, _blocks(parts), _form(parts))


def _beside(parts: dict[str, Tensor]) -> Tensor | None:
    """Return the part beside the codes, if there is one."""
    return parts.get(SCALE, parts.get(LOW))


def _blocks(parts: dict[str, Tensor]) -> int:
    """Return how many scales a row has; 1 where it has none."""
    return parts[SCALE].shape[1] if SCALE in parts else 1


def _form(parts: dict[str, Tensor]) -> int:
    return _FORMS[SPLIT24 if LOW in parts else parts[""].dtype]


def encode(codec: Codec, values: Tensor, keys: Keys, made: dict[str, Tensor]) -> None:
    """Fill `made` with the encoded rows of `values` (n, width), contiguous as all that is here."""
    check_not_capturing("stochastic rounding")
    keys = keys._replace(ids=keys.ids.contiguous())
    items = made[SCALE].numel() if SCALE in made else values.numel()
    launch_over(items, _SOURCE, "encode_rows", values.device, pack_encoding(codec, values, keys, made))


def decode(codec: Codec, parts: dict[str, Tensor], values: Tensor) -> None:
    """Fill `values` (n, width) with the values of encoded rows, by the kernel `Codec.decoder`."""
    if SCALE in parts:
        parts = {**parts, SCALE: parts[SCALE].to(torch.float32)}
    launch_over(values.numel(), _SOURCE, codec.decoder, values.device, pack_decoding(parts, values))


def is_usable(values: Tensor) -> bool:
    """Tell whether the kernels work where `values` are."""
    return values.is_cuda and is_trusted("encoded rows", values.device, functools.partial(_check, values.device))


@torch.inference_mode(False)
def _check(device: torch.device) -> bool:
    values = torch.linspace(-3, 5, 12 * 140, dtype=torch.float32, device=device).view(12, 140)
    values *= torch.logspace(-9, 4, 12, dtype=torch.float32, device=device)[:, None]
    keys, right = Keys(7, torch.arange(12, device=device)), True
    for stored in _FORMS:
        codec = codec_for(140, torch.float32, stored)
        expected = codec.encode(values, keys.bits(slice(0, 12), 140))
        made = {suffix: torch.empty_like(part.contiguous()) for suffix, part in expected.items()}
        encode(codec, values, keys, made)
        # torch compares no float8.
        right &= all(torch.equal(*(t.view(torch.uint8) for t in (made[s], expected[s].contiguous()))) for s in expected)
        if codec.decoder:
            found, out = torch.empty_like(values), torch.empty_like(values)
            decode(codec, made, found)
            right &= torch.equal(found, codec.decode(made, out))
    return right
