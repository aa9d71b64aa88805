"""Turn strings into 64-bit ids by a hash that is the same on every machine and in every process and version."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError

_DIGEST_BYTES = 8
_TUPLE = b"tuple"  # so that the id of a tuple is not that of a string


def hash_ids(values: Any, salt: str = "") -> Tensor:
    """Return an int64 id for each string, to look up in a table with a vocabulary.

    The id is BLAKE2b of the bytes of the value, 8 bytes long and read as a little-endian signed integer: two different values
    have the same id with probability 2**-64 (of 100 million values, any two with probability 1 in 3,700). A str is hashed as
    its UTF-8 bytes, and so has the id of these bytes. Of a tuple, such as ("user 7", "item 3") for a crossed feature, each
    part follows its length in bytes (as 8 bytes, little-endian), and BLAKE2b gets ``person=b"tuple"``. A salt, if there is
    one, is passed as ``salt=blake2b(salt, digest_size=16)``.

    Parameters
    ----------
    values : str, bytes, list, tuple, array or anything that `numpy.asarray` takes
        A list, also of lists, or an array of strings, bytes or objects, as of NumPy and pandas. A tuple is read as a list
        where it is `values` itself, as a batch of a data loader is; a tuple within a list or an array is one value.
    salt : str
        Name of the feature. Equal strings have different ids with different salts, so features can share a table.

    Returns
    -------
    Tensor
        int64, on the CPU, of the shape of `values`: a single str or bytes gives a tensor without dimensions.

    Raises
    ------
    InvalidTypeError
        A value is neither str nor bytes nor a tuple of them, or `salt` no str.
    InvalidValueError
        Lists within `values` have different lengths.
    """
    if not isinstance(salt, str):
        raise InvalidTypeError(f"salt is {salt!r} ({type(salt).__name__}) but must be a str; pass str(salt)")
    flat, shape = _flat(values)
    mixed = hashlib.blake2b(_encoded(salt), digest_size=16).digest() if salt else b""
    plain = hashlib.blake2b(digest_size=_DIGEST_BYTES, salt=mixed)
    crossed = hashlib.blake2b(digest_size=_DIGEST_BYTES, salt=mixed, person=_TUPLE)
    digests: dict[Any, bytes] = {}  # strings are often repeated, and looking one up is much faster
    result = bytearray()
    for at, value in enumerate(flat):
        try:
            digest = digests.get(value)
        except TypeError:
            raise _refused(value, at) from None
        if digest is None:
            if isinstance(value, (str, bytes)):
                hashed = plain.copy()
                hashed.update(_encoded(value))
            elif isinstance(value, tuple) and all(isinstance(part, (str, bytes)) for part in value):
                hashed = crossed.copy()
                for part in map(_encoded, value):
                    hashed.update(len(part).to_bytes(8, "little") + part)
            else:
                raise _refused(value, at)
            digest = digests[value] = hashed.digest()
        result += digest
    return torch.from_numpy(np.frombuffer(result, "<i8").astype(np.int64).reshape(shape))


def _encoded(value: str | bytes) -> bytes:
    # A str may hold halves of surrogate pairs, from the names of files for one.
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")


def _flat(values: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return the values in a row, and the shape that they have."""
    if isinstance(values, (str, bytes)):
        return [values], ()
    if not isinstance(values, (list, tuple)):
        if not hasattr(values, "__array__"):
            raise _refused(values, 0)
        array = np.asarray(values, dtype=object)
        return array.ravel().tolist(), array.shape
    shape: tuple[int, ...] = (len(values),)
    values = list(values)
    while values and any(isinstance(value, list) for value in values):
        lengths = {len(value) if isinstance(value, list) else -1 for value in values}
        if len(lengths) > 1:
            raise InvalidValueError(
                "values has lists of different lengths, or values beside lists, but must be as regular as a tensor; pad the "
                "lists, or hash them one after the other and pass offsets"
            )
        shape = (*shape, lengths.pop())
        values = list(itertools.chain.from_iterable(values))
    return values, shape


def _refused(value: Any, at: int) -> InvalidTypeError:
    """Return the error for a value, which is the number `at` of all."""
    remedy = "replace missing values by a string of your own, and pass others through str()"
    if isinstance(value, (int, np.integer)):
        remedy = "integers are ids as they are: pass them to the module directly"
    what = f"value {at} is {value!r} ({type(value).__name__})"
    return InvalidTypeError(f"{what} but must be str, bytes, or a tuple of them; {remedy}")
