"""Encode and decode rows on CUDA devices by kernels: the same bits as `codecs` in one launch each."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import KernelArgument, check_not_capturing, is_trusted, launch_over
from speedtransfer.encoding.choice import codec_for
from speedtransfer.encoding.codecs import SCALE, Codec
from speedtransfer.encoding.rounding import Keys

_SOURCE = "codecs.cu"
_FORMS = {
    torch.bfloat16: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.uint8: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}


def pack_encoding(codec: Codec, values: Tensor, keys: Keys, made: dict[str, Tensor]) -> np.ndarray:
    """Return the argument of the kernel encode_rows, which fills `made` with the encoded rows of `values`."""
    count, width = values.shape
    scales = made.get(SCALE)
    pointers = (values.data_ptr(), keys.ids.data_ptr(), made[""].data_ptr(), 0 if scales is None else scales.data_ptr())
    blocks = 1 if scales is None else scales.shape[1]
    return KernelArgument("9q").pack(*pointers, count, width, blocks, keys.signed_write, _FORMS[made[""].dtype])


def pack_decoding(parts: dict[str, Tensor], values: Tensor) -> np.ndarray:
    """Return the argument of the kernel decode_blocks, which fills `values` (n, width); scales are float32."""
    codes, scales = parts[""], parts[SCALE]
    pointers = codes.data_ptr(), scales.data_ptr(), values.data_ptr()
    return KernelArgument("7q").pack(*pointers, *values.shape, scales.shape[1], _FORMS[codes.dtype])


def encode(codec: Codec, values: Tensor, keys: Keys, made: dict[str, Tensor]) -> None:
    """Fill `made` with the encoded rows of `values` (n, width), contiguous as all that is here."""
    check_not_capturing("stochastic rounding")
    keys = keys._replace(ids=keys.ids.contiguous())
    items = made[SCALE].numel() if SCALE in made else values.numel()
    launch_over(items, _SOURCE, "encode_rows", values.device, pack_encoding(codec, values, keys, made))


def decode(parts: dict[str, Tensor], values: Tensor) -> None:
    """Fill `values` (n, width) with the values of blocks of 8-bit floats."""
    parts = {**parts, SCALE: parts[SCALE].to(torch.float32)}
    launch_over(values.numel(), _SOURCE, "decode_blocks", values.device, pack_decoding(parts, values))


def is_usable(values: Tensor) -> bool:
    """Tell whether the kernels work where `values` are."""
    return values.is_cuda and is_trusted("encoded rows", values.device, functools.partial(_check, values.device))


@torch.inference_mode(False)
def _check(device: torch.device) -> bool:
    values = torch.linspace(-3, 5, 12 * 140, dtype=torch.float32, device=device).view(12, 140)
    values *= torch.logspace(-9, 4, 12, dtype=torch.float32, device=device)[:, None]
    keys, right = Keys(7, torch.arange(12, device=device)), True
    for dtype in _FORMS:
        codec = codec_for(140, torch.float32, dtype)
        expected = codec.encode(values, keys.bits(slice(0, 12), 140))
        made = {suffix: torch.empty_like(part.contiguous()) for suffix, part in expected.items()}
        encode(codec, values, keys, made)
        # torch compares no float8.
        right &= all(torch.equal(*(t.view(torch.uint8) for t in (made[s], expected[s].contiguous()))) for s in expected)
        if codec.meanings(device) is not None:
            found, out = torch.empty_like(values), torch.empty_like(values)
            decode(made, found)
            right &= torch.equal(found, codec.decode(made, out))
    return right
