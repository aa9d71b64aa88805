"""Rows in 24 bits: a bfloat16 that is read alone where bfloat16 is enough, and 8 bits more beside it.

As master weights are split by Ortiz et al., "FlashOptim" (arXiv 2602.23349, 2026). There the 8 bits are a share of the step
of the bfloat16; here they are the difference of the words, an integer: no value takes a rounding of its own.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from speedtransfer.encoding.codecs import LOW, Part, Plain

# In the place of a dtype: torch has none of 24 bits.
SPLIT24: Literal["split24"] = "split24"
_SIZE, _INFINITY = 0x7FFFFFFF, 0x7F800000
# The largest whose nearest bfloat16 is finite, and what says that a bfloat16 is no number.
_LARGEST, _SPECIAL = 0x7F7F7F, 0x7F80


class Split24(Plain):
    """The first 24 bits of a float32, rounded: sign, 8 bits of exponent and 16 significant bits.

    The part "" is the bfloat16 nearest to that (of two, the one of larger magnitude), ".low" what is to be added to its bits.
    What is finite stays so, signed zeros and subnormal numbers are as in float32, infinities and NaN stay.
    """

    viewable = False
    kernel, decoder = "encode_split24", "decode_split24"

    def __init__(self, width: int) -> None:
        self.parts = {"": Part(width, torch.bfloat16), LOW: Part(width, torch.int8)}
        self.name = SPLIT24

    def encode(self, values: Tensor, bits: Tensor | None) -> dict[str, Tensor]:  # noqa: D102
        words = values.contiguous().view(torch.int32)
        sizes = words & _SIZE
        # Without random bits half a step, and of two as near the even one.
        added = (sizes >> 8 & 1) + 0x7F if bits is None else bits >> 24 & 0xFF
        rounded = (sizes + added >> 8).clamp_(max=_LARGEST)
        tops = rounded + 0x80 >> 8
        low = rounded - (tops << 8)
        special = sizes >= _INFINITY
        tops = torch.where(special, (sizes > _INFINITY).to(torch.int32).mul_(0x40).add_(_SPECIAL), tops)
        tops |= words >> 16 & -0x8000
        return {"": tops.to(torch.int16).view(torch.bfloat16), LOW: low.masked_fill_(special, 0).to(torch.int8)}

    def decode(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:  # noqa: D102
        tops, low = parts[""].view(torch.int16).to(torch.int32), parts[LOW].to(torch.int32)
        sizes = tops & 0x7FFF
        # Whoever writes to the bfloat16 alone may leave what has no meaning beside zeros, infinities and NaN.
        low = torch.where(sizes < _SPECIAL, torch.where(sizes > 0, low, low.clamp(min=0)), 0)
        torch.add(tops << 16, low << 8, out=out.view(torch.int32))
        return out
