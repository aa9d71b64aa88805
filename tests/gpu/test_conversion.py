"""Rows in small forms have the bits of the CPU. Rows converted on the way: tests/engine_cases.py."""

import math

import pytest
import torch

from speedtransfer.dtypes import SCALE_DTYPES
from speedtransfer.encoding.codecs import Blocks8, Cast, RowInt8
from speedtransfer.encoding.convert import decode_rows, encode_rows
from speedtransfer.encoding.float8 import BlocksFloat8
from speedtransfer.encoding.rounding import Keys, write_key
from speedtransfer.encoding.split24 import Split24

CODECS = [Cast(100, torch.bfloat16), Cast(100, torch.float16), RowInt8(100), Blocks8(100), Blocks8(300)]
CODECS += [Split24(100), Split24(131)]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
CODECS += [BlocksFloat8(width, dtype, blocks) for dtype in FLOAT8 for width, blocks in ((100, 1), (96, 3), (131, 2))]
CODECS += [BlocksFloat8(96, dtype, 3, scale) for dtype in FLOAT8 for scale in SCALE_DTYPES[1:]]


def ints(part):
    return part.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[part.element_size()])


@pytest.mark.parametrize("trusted", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_codecs_give_the_bits_of_the_cpu(codec, trusted, device, monkeypatch):
    if not trusted:
        monkeypatch.setattr("speedtransfer.encoding.cuda_codecs.is_trusted", lambda *_: False)
    width = codec.parts[""].width
    values = torch.randn(500, width, generator=torch.Generator().manual_seed(0)) * torch.logspace(-44, 38, 500)[:, None]
    values[::3] = values[::3].abs()
    values[5], values[6, 0] = 0.0, math.inf
    ids = torch.randperm(500)
    found = []
    for where in (torch.device("cpu"), torch.device(device)):
        keys = Keys(write_key(7, 3, "weight"), ids.to(where))
        found.append(encode_rows(codec, values.to(where), keys))
        found.append(encode_rows(codec, values.to(where), None))
    for here, there in zip(found[:2], found[2:], strict=True):
        for suffix, part in here.items():
            wide = part.is_floating_point() and part.element_size() > 1
            known = ~part.isnan() if wide else torch.ones(part.shape, dtype=torch.bool)
            assert torch.equal(ints(part)[known], ints(there[suffix])[known])
        decoded = decode_rows(codec, here), decode_rows(codec, there).cpu()
        torch.testing.assert_close(*decoded, rtol=0, atol=0, equal_nan=True)
