"""Plain values as JSON and back, without loss: what JSON lacks is an object with the key "$", tensors go to a file beside it.

Only data comes back: numbers, strings, containers, arrays, tensors. Nothing names a class or a function to call.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from speedtransfer.errors import InvalidTypeError, InvalidValueError

Keep = Callable[[str, Any], str]  # (path, tensor) -> the name under which the file will hold it
Fetch = Callable[[Any], Tensor]  # that name -> the tensor

_MAX_DEPTH = 100
_MAX_INT_BITS = 10_000  # Python reads no longer integers from text
_SEQUENCES: dict[str, type] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_CONTAINERS = {kind: tag for tag, kind in (*_SEQUENCES.items(), *_MAPPINGS.items())}
# What has a text: its tag, and the text.
_TEXTS: dict[type, tuple[str, Callable[[Any], str]]] = {
    float: ("float", str),
    bytes: ("bytes", bytes.hex),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("device", str),
}
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_SCALARS = {"bool", *_INTEGERS, "float16", "float32", "float64", "complex64", "complex128"}
_ALLOWED = "numbers, strings, bytes, None, lists, tuples, dicts, sets, tensors, NumPy arrays and scalars"


def encode(value: Any, path: str, keep: Keep, depth: int = 0) -> Any:
    """Return `value` as JSON knows it, with what `keep` says for tensors.

    The path says where it comes from, for errors and as the names of tensors: ``extra['epoch']``. It raises where something is
    no plain data, nests too deep, or in itself.
    """
    if depth > _MAX_DEPTH:
        raise InvalidValueError(
            f"{path[:80]}... nests deeper than {_MAX_DEPTH} levels (or holds itself); a checkpoint takes flatter data"
        )
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_INT_BITS:
        raise InvalidValueError(f"{path} is an integer of {value.bit_length()} bits; save it as a string")
    if value is None or kind in (bool, str, int) or (kind is float and math.isfinite(value)):
        return value
    if kind in _TEXTS:
        tag, text = _TEXTS[kind]
        return {"$": tag, "v": text(value)}
    if kind is complex:
        return {"$": "complex", "v": [encode(x, path, keep, depth + 1) for x in (value.real, value.imag)]}
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, keep)
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidTypeError(f"{path} is a masked array, which a checkpoint cannot hold; save its data and its mask")
    if isinstance(value, np.ndarray):
        return {**_encode_tensor(_from_numpy(value, path), path, keep), "$": "ndarray"}
    if isinstance(value, np.generic) and value.dtype.name in _SCALARS:
        return {"$": "scalar", "dtype": value.dtype.name, "v": encode(value.item(), path, keep, depth + 1)}
    tag = _CONTAINERS.get(kind, "")
    if tag in _MAPPINGS:
        return _encode_mapping(value, tag, path, keep, depth)
    if tag or kind is list:
        items = [encode(item, f"{path}[{i}]", keep, depth + 1) for i, item in enumerate(value)]
        return {"$": tag, "v": items} if tag else items
    raise InvalidTypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; convert it to plain data "
        f"({_ALLOWED})"
    )


def _encode_mapping(value: Any, tag: str, path: str, keep: Keep, depth: int) -> Any:
    if tag == "dict" and all(type(key) is str for key in value) and "$" not in value:
        return {key: encode(item, f"{path}[{key!r}]", keep, depth + 1) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        if isinstance(key, Tensor):
            raise InvalidTypeError(
                f"{path} has a tensor as a key, which a checkpoint cannot hold; use its number or name"
            )
        where = f"{path}[{key!r}]"
        pairs.append([encode(key, f"key {where}", keep, depth + 1), encode(item, where, keep, depth + 1)])
    return {"$": tag, "v": pairs}


def _encode_tensor(value: Tensor, path: str, keep: Keep) -> dict[str, Any]:
    if is_lazy(value):
        raise InvalidValueError(
            f"{path} is uninitialized, as in lazy modules before the first batch; run the model once, or leave it out"
        )
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.device.type == "meta":
        raise InvalidTypeError(
            f"{path} is a {value.layout} tensor on {value.device} without plain values; pass it .to_dense() and materialised"
        )
    if hasattr(value, "full_tensor"):
        # A DTensor (fully_shard): all processes bring their parts together here.
        value = value.full_tensor().cpu()
    value = value.detach().resolve_conj().resolve_neg()
    if not value.is_complex():
        return {"$": "tensor", "v": keep(path, value)}
    # safetensors has no complex128: pairs of floats.
    return {"$": "tensor", "v": keep(path, torch.view_as_real(value)), "complex": True}


def _from_numpy(array: np.ndarray, path: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True))
    except TypeError:
        raise InvalidTypeError(
            f"{path} is an array of {array.dtype}, which a checkpoint cannot hold; convert it to numbers or a list"
        ) from None


def decode(node: Any, fetch: Fetch) -> Any:
    """Return the value that `encode` made `node` of. Raises ValueError, TypeError or KeyError at what it never makes."""
    if isinstance(node, list):
        return [decode(item, fetch) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: decode(item, fetch) for key, item in node.items()}
    tag, value = node["$"], node["v"]
    if tag in ("tensor", "ndarray"):
        tensor = fetch(value)
        if node.get("complex") is True:
            tensor = torch.view_as_complex(tensor)
        return tensor.numpy() if tag == "ndarray" else tensor
    if tag in _SEQUENCES or tag in _MAPPINGS or tag == "complex":
        if not isinstance(value, list):
            raise TypeError(f"a {type(value).__name__} where a list belongs")
        items = decode(value, fetch)
        if tag == "complex":
            real, imag = items
            return complex(real, imag)
        return _SEQUENCES[tag](items) if tag in _SEQUENCES else _MAPPINGS[tag](dict(items))
    if tag == "bytes":
        return bytes.fromhex(value)
    if tag == "scalar" and node["dtype"] in _SCALARS:
        return np.dtype(node["dtype"]).type(decode(value, fetch))
    if tag == "float" and value in ("nan", "inf", "-inf"):
        return float(value)
    if tag == "dtype" and value in _DTYPES:
        return _DTYPES[value]
    if tag == "device" and isinstance(value, str):
        return torch.device(value)
    raise ValueError(f"{str(value)[:40]!r} of kind {str(tag)[:40]!r} is no value that is saved")


def _stored(node: Any) -> Iterator[dict[str, Any]]:
    """Yield what in `node` names tensors of files."""
    if isinstance(node, dict) and node.get("$") in ("tensor", "ndarray", "rows"):
        yield node
    else:
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from _stored(inner)


def find_rows(node: Any) -> list[dict[str, Any]]:
    """Return what in `node` says where the rows of tables are."""
    return [found for found in _stored(node) if found["$"] == "rows"]


def set_num_rows(content: dict[str, Any], counts: Mapping[str, int]) -> None:
    """Have a manifest speak of so many rows of tables, by "model/" or "optimizer/" and the name of a tensor that has them."""
    for node in find_rows(content["model"]):
        for name in node["parts"].values():
            node["shape"][0] = counts.get(f"model/{name}", node["shape"][0])
    for optimizer in content["optimizers"].values():
        groups = decode(optimizer["rest"], lambda name: torch.zeros(2, device="cpu"))["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        shapes = dict(zip(numbers, (shape for group in optimizer["params"] for shape in group), strict=True))
        for number, saved in optimizer["state"]:
            for node in find_rows(saved["rows"]):
                for name in node["parts"].values():
                    node["shape"][0] = shapes[number][0] = counts.get(f"optimizer/{name}", node["shape"][0])


def find_shards(node: Any) -> list[tuple[str, int, list[int] | None]]:
    """Return the names of the tensors of which each process has saved a part, with the number of rows of all parts.

    And those of each, if they are not what `Partition` says.
    """
    shards = [found for found in _stored(node) if found["$"] == "rows" and "layout" in found]
    return [(name, of["shape"][0], of["layout"].get("sizes")) for of in shards for name in of["parts"].values()]


def find_tensors(node: Any) -> list[str]:
    """Return the names of the tensors that `node` refers to, without those of `find_shards`."""
    whole = [found for found in _stored(node) if found["$"] != "rows" or "layout" not in found]
    return [name for of in whole for name in (of["parts"].values() if of["$"] == "rows" else [of["v"]])]
