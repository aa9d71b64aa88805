"""The generators of all processes in a file that one of them writes."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

from speedtransfer.checkpoint.objects import encode_generators
from speedtransfer.checkpoint.tensors import TensorPlan, read_chunks
from speedtransfer.checkpoint.together import Processes
from speedtransfer.dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES


def gather_generators(
    processes: Processes, objects: dict[str, Any], plans: dict[str, TensorPlan]
) -> list[dict[str, Any]]:
    """Return what `encode_generators` says of each process but the first, and have plans by role hold the tensors.

    Collective.
    """
    own, said = TensorPlan(), ""
    with processes.together():
        if not processes.is_first:
            content = encode_generators(objects, own.keep)
            tensors = [(name, SAFETENSORS_NAMES[t.dtype], *_bytes(t)) for name, t in own.tensors.items()]
            said = json.dumps([content, tensors])
    found = []
    for rank, text in enumerate(processes.texts(said)):
        if not rank:
            continue
        content, tensors = json.loads(text)
        plan = plans[f"rows-{rank}"] = TensorPlan()
        for name, dtype, shape, values in tensors:
            flat = torch.frombuffer(bytearray(base64.b64decode(values)), dtype=torch.uint8)
            plan.tensors[name] = flat.view(SAFETENSORS_DTYPES[dtype]).view(shape)
        found.append(content)
    return found


def _bytes(tensor: Any) -> tuple[list[int], str]:
    """Return the shape of a tensor, and its bytes as text."""
    flat = b"".join(chunk.contiguous().view(torch.uint8).numpy().tobytes() for chunk in read_chunks(tensor))
    return list(tensor.shape), base64.b64encode(flat).decode()
