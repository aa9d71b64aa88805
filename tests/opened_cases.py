"""Tables as others publish them: written by hand, split over files whose headers are of any length."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch

from speedtransfer.dtypes import SAFETENSORS_NAMES


def write_file(path, tensors, pad=0):
    """Write a safetensors file of `tensors` by name, whose header ends `pad` bytes after a multiple of 8."""
    header, content = {}, b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        offsets = [len(content), len(content) + len(data)]
        header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        content += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def cuts_of(num_rows, parts):
    """Return where each of some parts of rows ends, among them parts without rows and of one row."""
    ends = sorted({min(1, num_rows), num_rows // 3, num_rows // 3 + 1, *range(0, num_rows, max(num_rows // parts, 1))})
    return [0, 0, *[end for end in ends if end <= num_rows], num_rows]


def write_parts(folder, values, parts=4, key="shard_{}.weight", pads=(0,), beside=()):
    """Write the rows of `values` to several files, and return (file, key) pairs."""
    cuts, pairs = cuts_of(len(values), parts), []
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        name, path = key.format(number), Path(folder, f"part-{number:03d}.safetensors")
        tensors = dict(beside) | {name: values[start:stop]}
        write_file(path, tensors, pads[number % len(pads)])
        pairs.append((path, name))
    return pairs
