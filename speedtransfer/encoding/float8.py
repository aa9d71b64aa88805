"""Rows of torch's 8-bit floats with a scale for each block of columns, as published tables have them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from speedtransfer.dtypes import FLOAT8_DTYPES, SCALE_DTYPES
from speedtransfer.encoding.codecs import SCALE, Blocks, Codec, scales_of
from speedtransfer.errors import InvalidTypeError, InvalidValueError


class BlocksFloat8(Blocks):
    """float8_e4m3fn or float8_e5m2: the largest code is the largest magnitude of a block of columns.

    Values are ``codes.to(float32) * scale``. A block with an infinity or a NaN becomes NaN as a whole: its scale is lost.
    Zeros keep their sign. Where the largest magnitude is below 2**-108 (e4m3fn) or 2**-94 (e5m2), steps are those of that
    magnitude: products with smaller scales would not be exact.

    Scales in bfloat16 or float8_e8m0fnu, which published tables have, are powers of two where this makes them, rounded up.

    Parameters
    ----------
    width : int
    dtype : torch.dtype
        Of the codes.
    blocks : int
        Of a row.
    scale_dtype : torch.dtype
        float32, bfloat16 or float8_e8m0fnu.
    """

    def __init__(self, width: int, dtype: torch.dtype, blocks: int, scale_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(width, dtype, blocks, scale_dtype)
        self.name = f"{_name(dtype)}-block{self.size}"
        if scale_dtype == torch.float32:
            self.kernel = f"encode_{_name(dtype)}"
        else:
            self.name += f"-{_name(scale_dtype)}"
        about = torch.finfo(dtype)
        self._largest, self._smallest = about.max, about.smallest_normal
        # Bits of a significand, without the one that goes unsaid.
        self._digits = round(-math.log2(about.eps))
        # The scale at which the smallest code is an ordinary float32.
        self._least = 2.0**-126 / (about.smallest_normal * about.eps)

    def encode(self, values: Tensor, bits: Tensor | None) -> dict[str, Tensor]:  # noqa: D102
        values = self.split(values)
        scale = self._scale(values.abs().amax(2, keepdim=True))
        shares = (values / scale).clamp_(-self._largest, self._largest)
        if bits is None:
            codes = shares.to(self.parts[""].dtype).view(torch.uint8)
        else:
            # Below the smallest ordinary number steps are all alike. Added to it they are those of an ordinary one.
            sizes, lost = shares.abs(), 23 - self._digits
            below = sizes < self._smallest
            sizes.add_(below.to(sizes.dtype).mul_(self._smallest))
            words = sizes.view(torch.int32).add_((self.split(bits) >> 9 + self._digits).bitwise_and_((1 << lost) - 1))
            first = int(math.log2(self._smallest)) + 126  # the exponent of float32 that is zero here
            words = (words >> lost).sub_(first << self._digits).sub_(below.to(torch.int32).mul_(1 << self._digits))
            codes = (words + shares.signbit().to(torch.int32).mul_(128)).to(torch.uint8)
        codes = codes * scale.isfinite()
        return {"": self.joined(codes).view(self.parts[""].dtype), SCALE: scale[:, :, 0].to(self.parts[SCALE].dtype)}

    def adopt(self, codes: Tensor) -> dict[str, Tensor]:
        """Return the encoded rows whose values are `codes`, (n, width) of the dtype stored, themselves: all scales are 1."""
        scale = torch.ones(len(codes), self.blocks, dtype=torch.float32, device=codes.device)
        return {"": codes, SCALE: scale.to(self.parts[SCALE].dtype)}

    def _scale(self, largest: Tensor) -> Tensor:
        top = largest.new_full((), self._largest)
        if self.parts[SCALE].dtype == torch.float32:
            return scales_of(largest, top, self._digits + 1, self._least)
        # Rounded up, so that no value is beyond the largest code. A block whose largest code is half of that may get half
        # the scale and twice the codes the next time: the values stay.
        words = (largest / top).view(torch.int32).add_((1 << 23) - 1).bitwise_and_(-1 << 23)
        return torch.where(largest.isfinite(), words.view(torch.float32).clamp_(min=self._least), math.nan)

    def decode(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:  # noqa: D102
        scale = parts[SCALE].to(torch.float32)
        out.copy_(parts[""])
        if out.shape[1] == self.blocks * self.size:
            self.split(out).mul_(scale[:, :, None])
            return out
        return out.mul_(scale.repeat_interleave(self.size, 1)[:, : out.shape[1]])

    def meanings(self, device: torch.device) -> Tensor:  # noqa: D102
        return _meanings(self.parts[""].dtype, device)


@functools.lru_cache(maxsize=16)
def _meanings(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        values = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32)
        return torch.cat([values, -values]).to(device)


def codec_of_planes(width: int, dtype: torch.dtype, blocks: int, scale_dtype: torch.dtype) -> Codec:
    """Return the codec of float8 rows of `width` columns beside which there are `blocks` scales a row.

    Raises
    ------
    InvalidTypeError
        No codec has codes of `dtype`, or scales of `scale_dtype`.
    InvalidValueError
        The blocks of columns are not all as wide: which columns share a scale cannot be told.
    """
    for what, found, known in (("codes", dtype, FLOAT8_DTYPES), ("scales", scale_dtype, SCALE_DTYPES)):
        if found not in known:
            names = ", ".join(map(str, known))
            raise InvalidTypeError(f"{what} of rows are {found} but must be one of {names}; convert them")
    if blocks < 1 or width % blocks:
        raise InvalidValueError(
            f"rows of {width} columns have {blocks} scales each, but the columns must divide evenly among the scales; pass "
            "scales of blocks of columns, all as wide"
        )
    return BlocksFloat8(width, dtype, blocks, scale_dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
