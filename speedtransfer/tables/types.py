"""Names for types that a class with attributes called `torch`, `device` and `dtype` cannot spell out inside its body."""

from __future__ import annotations

import os
from typing import TypeAlias

import torch

DType: TypeAlias = torch.dtype
TorchDevice: TypeAlias = torch.device
Device: TypeAlias = torch.device | str | int | None
Generator: TypeAlias = torch.Generator
PathLike: TypeAlias = str | os.PathLike[str]
