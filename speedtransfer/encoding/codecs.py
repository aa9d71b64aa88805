"""Encode float32 values to fewer bits for a table to store, and decode them.

Every codec takes ``(n, width)`` values to encoded rows and back, one tensor for each part (the part "" is the plane itself,
".scale" or ".low" lies beside it). Rounding is stochastic where random bits are given: up or down with the probability that
makes the mean right, so that updates far below a step of the codec still add up. Without bits it is to the nearest.

What is stored comes back from a round trip bit for bit, however it is rounded: scales keep just as many digits as leave
their products with the codes exact.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # columns, at most, that share a scale, unless somebody says otherwise
# The parts beside the plane itself: of the scales of its rows, and of what its values lack.
SCALE, LOW = ".scale", ".low"


class Part(NamedTuple):
    """Width and dtype of an encoded plane."""

    width: int
    dtype: torch.dtype


class Plain:
    """The values as they are."""

    # The encoded plane is a tensor of the values, if of another dtype.
    viewable = True
    # The function of `numba_codecs` that encodes stochastically; that which decodes, also of `codecs.cu`; none: `decode` is
    # one pass.
    kernel = decoder = ""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.parts = {"": Part(width, dtype)}
        self.name = "plain"

    def encode(self, values: Tensor, bits: Tensor | None) -> dict[str, Tensor]:
        """Return the encoded rows of `values` (n, width); `bits` are random ones, (n, width) int32."""
        return {"": values.to(self.parts[""].dtype)}

    def decode(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:
        """Fill `out` (n, width) with the values of encoded rows, and return it."""
        return out.copy_(parts[""])

    def meanings(self, device: torch.device) -> Tensor | None:
        """Return the numbers, without their scale, that the 256 codes stand for, and those under a negative scale: (512,).

        None: they have no scale, or `decode` is one pass.
        """
        return None


class Cast(Plain):
    """bfloat16 or float16. What is finite stays so: beyond the largest number is the largest. Infinities and NaN stay."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__(width, dtype)
        self.name = str(dtype).removeprefix("torch.")
        self.kernel = f"encode_{self.name}"
        self._largest = torch.finfo(dtype).max
        # Bits of a float32's significand that are dropped.
        self._lost = 16 if dtype == torch.bfloat16 else 13
        # Below it float16's steps are all alike. Added to a number it makes them steps of an ordinary one.
        self._smallest = 0.0 if dtype == torch.bfloat16 else torch.finfo(dtype).smallest_normal

    def encode(self, values: Tensor, bits: Tensor | None) -> dict[str, Tensor]:  # noqa: D102
        dtype = self.parts[""].dtype
        if bits is None:
            return {"": torch.where(values.isinf(), values, values.clamp(-self._largest, self._largest)).to(dtype)}
        rounded = values.clone()
        if self._smallest:
            offset = (values.abs() < self._smallest).to(values.dtype).mul_(self._smallest).copysign_(values)
            rounded += offset
        words = rounded.view(torch.int32)
        words += (bits >> (32 - self._lost)).bitwise_and_((1 << self._lost) - 1)
        words &= -1 << self._lost
        if self._smallest:
            rounded.sub_(offset).copysign_(values)
        rounded.clamp_(-self._largest, self._largest)
        return {"": torch.where(values.isfinite(), rounded, values).to(dtype)}


class RowInt8(Plain):
    """int8 with a float32 scale for each row: the code 127 is its largest magnitude.

    A row with an infinity or a NaN becomes NaN as a whole: its scale is lost. A row of zeros is exact.
    """

    viewable = False
    kernel = "encode_int8"

    def __init__(self, width: int) -> None:
        self.parts = {"": Part(width, torch.int8), SCALE: Part(1, torch.float32)}
        self.name = "int8-row"

    def encode(self, values: Tensor, bits: Tensor | None) -> dict[str, Tensor]:  # noqa: D102
        scale = scales_of(values.abs().amax(1, keepdim=True), values.new_full((), 127.0), 7, 2.0**-126)
        codes = values / scale  # a tensor by a tensor: the same rounding on every device
        if bits is None:
            codes.round_()
        else:  # 16 bits: their sum with a code of 7 is exact, and a whole code stays
            codes += (bits >> 16).bitwise_and_(0xFFFF).to(torch.float32).mul_(2.0**-16)
            codes.floor_()
        return {"": codes.nan_to_num_(0.0).clamp_(-127, 127).to(torch.int8), SCALE: scale}

    def decode(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:  # noqa: D102
        return torch.mul(parts[""], parts[SCALE], out=out)


class Blocks(Plain):
    """The base class of codecs with a scale for each of `blocks` blocks of a row's columns, as even as can be."""

    viewable = False
    decoder = "decode_blocks"

    def __init__(self, width: int, dtype: torch.dtype, blocks: int, scale_dtype: torch.dtype = torch.float32) -> None:
        self.blocks, self.size = blocks, math.ceil(width / blocks)
        self.parts = {"": Part(width, dtype), SCALE: Part(blocks, scale_dtype)}

    def split(self, values: Tensor) -> Tensor:
        """Return ``(n, width)`` as ``(n, blocks, size)``, zeros at the end."""
        missing = self.blocks * self.size - values.shape[1]
        if missing:
            values = torch.nn.functional.pad(values, (0, missing))
        return values.view(len(values), self.blocks, self.size)

    def joined(self, values: Tensor) -> Tensor:
        """Return what `split` was given: ``(n, width)``."""
        return values.view(len(values), self.blocks * self.size)[:, : self.parts[""].width]


class Blocks8(Blocks):
    """8-bit floating point with a float32 scale for each block of up to `BLOCK` columns of a row, for optimizer state.

    As in block-wise dynamic quantization (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022) steps
    are finer near zero and a block's largest magnitude is exact (to 2**-19 of it). Codes are those of a small float: three
    bits of significand, and of exponent five where no value of the block is negative (second moments: down to 2**-32 of the
    largest), four and a sign otherwise (momenta: down to 2**-16): the square root of the first spans what the second does.
    The sign of the scale tells which.

    Where no value of a block is negative none becomes zero that was not, since others are divided by its root. A block with an
    infinity or a NaN becomes NaN as a whole.
    """

    kernel = "encode_blocks"
    # 1.0, cut to three bits of significand.
    _ONE = 0x3F800000 >> 20

    def __init__(self, width: int) -> None:
        super().__init__(width, torch.uint8, blocks_of(width, BLOCK))
        self.name = f"float8-block{self.size}"

    def encode(self, values: Tensor, bits: Tensor | None) -> dict[str, Tensor]:  # noqa: D102
        values = self.split(values)
        sizes = values.abs()
        scale = scales_of(sizes.amax(2, keepdim=True), values.new_full((), 1.0), 4, 2.0**-94)
        sizes /= scale
        sizes.nan_to_num_(0.0).clamp_(max=1.0)
        signed = values.amin(2, keepdim=True) < 0  # false for NaN
        top = torch.where(signed, 127, 255).to(torch.int32)  # the code of 1.0
        least = ((self._ONE + 1 - top) << 20).view(torch.float32)  # what the code 1 means
        if bits is None:
            added = sizes.new_full((), 1 << 19, dtype=torch.int32)
            chance = sizes.new_full((), 0.5)
        else:
            added = (self.split(bits) >> 12).bitwise_and_((1 << 20) - 1)
            chance = added.to(torch.float32).mul_(2.0**-20)
        codes = (sizes.view(torch.int32) + added >> 20).add_(top - self._ONE)
        below = torch.where(signed, sizes > chance * least, values > 0).to(torch.int32)
        codes = torch.where(sizes < least, below, codes)
        codes += (values < 0).to(torch.int32).mul_(128)
        codes *= scale.isfinite()
        return {"": self.joined(codes.to(torch.uint8)), SCALE: torch.where(signed, -scale, scale)[:, :, 0]}

    def decode(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:  # noqa: D102
        codes, scale = self.split(parts[""].to(torch.int32)), parts[SCALE][:, :, None]
        codes += (scale < 0).to(torch.int32).mul_(256)
        values = self.meanings(codes.device).index_select(0, codes.view(-1)).view(codes.shape)
        return out.copy_(self.joined(values.mul_(scale.abs())))

    def meanings(self, device: torch.device) -> Tensor:  # noqa: D102
        return _meanings(device)


Codec = Plain


def blocks_of(width: int, block: int) -> int:
    """Return how many blocks of up to `block` columns a row has, at least one."""
    return max(1, -(-width // block))


def scales_of(largest: Tensor, parts: Tensor, dropped: int, least: float) -> Tensor:
    """Return ``largest / parts`` without its last `dropped` bits, `least` or more; NaN where it is not finite.

    Rounded down, so that the largest value still gets the largest code, and the same scale the next time.
    """
    scale = (largest / parts).view(torch.int32).bitwise_and_(-1 << dropped).view(torch.float32).clamp_(min=least)
    return torch.where(largest.isfinite(), scale, math.nan)


@functools.lru_cache(maxsize=16)
def _meanings(device: torch.device) -> Tensor:
    """Return what the codes of `Blocks8` mean: 256 without a sign and 256 with one."""
    with torch.inference_mode(False):
        codes = torch.arange(256, dtype=torch.int32, device="cpu")
        words = torch.cat([codes - 255, (codes & 127) - 127]) + Blocks8._ONE << 20
        values = words.view(torch.float32).clone()
        values[384:] *= -1
        values[[0, 256, 384]] = 0
        return values.to(device)
