"""Weigh what was looked up by how well it fits the hidden state."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ZeroConv1d(nn.Conv1d):
    """A convolution that starts as zeros."""

    def reset_parameters(self) -> None:
        """Set the weight to zeros."""
        nn.init.zeros_(self.weight)


class EngramGate(nn.Module):
    """Weigh a value at each position by how well a key fits the hidden state, as Engram does (arXiv:2601.07372, section 2.3).

    With x what was looked up, v the value and h the hidden state::

        s = <rms_norm(key(x)), rms_norm(h)> / sqrt(width),  y = sigmoid(sign(s) * sqrt(|s|)) * v,  y + silu(conv(rms_norm(y)))

    The convolution is causal, over positions `dilation` apart, for each channel alone; it starts as zeros.

    Parameters
    ----------
    in_dim, width : int
        Values of x, and of v and h.
    conv : int
        Positions that the convolution sees; 0: there is none.
    dilation : int
    **place
        `device` and `dtype` of the parameters.
    """

    def __init__(self, in_dim: int, width: int, conv: int, dilation: int, **place: Any) -> None:
        super().__init__()
        self.width, self.reach = width, (conv - 1) * dilation
        self.key = nn.Linear(in_dim, width, bias=False, **place)
        self.key_norm, self.hidden_norm = nn.RMSNorm(width, **place), nn.RMSNorm(width, **place)
        self.conv = None
        if conv:
            self.conv_norm = nn.RMSNorm(width, **place)
            self.conv = ZeroConv1d(width, width, conv, groups=width, bias=False, dilation=dilation, **place)

    def forward(self, x: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        """Return the weighed `value`, ``(..., time, width)`` as `hidden` is, where x is ``(..., time, in_dim)``."""
        fit = (self.key_norm(self.key(x)) * self.hidden_norm(hidden)).sum(-1, keepdim=True) / math.sqrt(self.width)
        # The root of zero has no gradient.
        value = torch.sigmoid(fit.abs().clamp_min(1e-6).sqrt() * fit.sign()) * value
        if self.conv is None or not value.numel():
            return value
        series = self.conv_norm(value).reshape(-1, *value.shape[-2:]).transpose(-1, -2)
        return value + F.silu(self.conv(F.pad(series, (self.reach, 0)))).transpose(-1, -2).reshape(value.shape)
