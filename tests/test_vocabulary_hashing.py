"""Ids of strings and the mixing of integers: golden values, since ids are stored in checkpoints, and every kind of input."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.jit import compiled_module
from speedtransfer.vocabulary.mixing import mix64
from speedtransfer.vocabulary.string_ids import hash_ids

TEXT = some.text(max_size=12) | some.binary(max_size=12)
GOLDEN = [
    ("", "", -5426141060434712860),
    ("apple", "", -2328654269316264298),
    (b"apple", "", -2328654269316264298),
    ("apple", "fruit", -6787676497828802969),
    ("größe", "", -1613921676148213516),
    (("user 7", "item 3"), "", 7450864085141587317),
    (("user 7", "item 3"), "x", 6508598057590139181),
]


class Column:
    """As a pandas Series: no sequence of NumPy's, but something that becomes one."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype=object)


def oracle(value, salt=""):
    """The definition, in one line of the standard library for each kind."""
    options = {"salt": hashlib.blake2b(salt.encode(), digest_size=16).digest()} if salt else {}
    if isinstance(value, tuple):
        parts = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in value]
        data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        options["person"] = b"tuple"
    else:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, **options).digest(), "little", signed=True)


@pytest.mark.parametrize(("value", "salt", "expected"), GOLDEN)
def test_golden_ids(value, salt, expected):
    assert hash_ids([value], salt).tolist() == [expected] == [oracle(value, salt)]


@settings(max_examples=100, deadline=None)
@given(some.lists(TEXT | some.tuples(TEXT, TEXT) | some.tuples(TEXT)), some.text(max_size=3))
def test_ids_are_those_of_the_definition(values, salt):
    ids = hash_ids(values, salt)
    assert (ids.dtype, ids.device.type, ids.shape) == (torch.int64, "cpu", (len(values),))
    assert ids.tolist() == [oracle(value, salt) for value in values]


def test_kinds_of_input_agree():
    names = ["b", "a", "", "b", "größe", "7"]
    ids = hash_ids(names)
    assert len(set(ids.tolist())) == 5
    same = [
        tuple(names),  # what the collate function of a data loader returns
        np.array(names),
        np.array(names, dtype=object),
        Column(names),
        [name.encode() for name in names],
        np.array([name.encode() for name in names]),
        [np.str_(name) for name in names],
    ]
    for values in same:
        assert torch.equal(hash_ids(values), ids)
    assert hash_ids("b").shape == ()
    assert hash_ids(b"b").item() == ids[0].item()


def test_shapes():
    names = np.array([["a", "b", "c"], ["d", "e", "f"]])
    ids = hash_ids(names)
    assert ids.shape == (2, 3)
    assert torch.equal(hash_ids(names.tolist()), ids)
    assert torch.equal(hash_ids(names.T), ids.T)
    assert torch.equal(hash_ids(names.reshape(1, 2, 3, 1).tolist()), ids.reshape(1, 2, 3, 1))
    assert hash_ids([]).shape == (0,)
    assert hash_ids([[], []]).shape == (2, 0)
    assert hash_ids(np.empty((0, 4), dtype="U3")).shape == (0, 4)
    assert hash_ids([("a", "b"), ("c", "d")]).shape == (2,)


def test_what_differs_has_another_id():
    values = [("a",), "a", ("a", ""), ("", "a"), ("aa",), "aa", ("a", "a"), ("aa", ""), (), "tuple"]
    salts = ["", "a", "aa", "a name of more than sixteen bytes", "a name of more than sixteen bytes!"]
    ids = [hash_ids([value], salt).item() for value in values for salt in salts]
    assert len(set(ids)) == len(ids)


BAD = [
    (["a", None], InvalidTypeError, r"values\[1\] is None \(NoneType\) .* replace missing values"),
    (["a", float("nan")], InvalidTypeError, r"values\[1\] is nan \(float\) .* replace missing values"),
    ([["a", "b"], ["c", 3]], InvalidTypeError, r"values\[1\]\[1\] is 3 \(int\) .* pass them to the module directly"),
    (7, InvalidTypeError, r"values is 7 \(int\) .* pass them to the module directly"),
    (None, InvalidTypeError, "values is None"),
    ({"a": 1}, InvalidTypeError, r"\(dict\)"),
    ([bytearray(b"a")], InvalidTypeError, r"values\[0\] is bytearray"),
    ([("a", 1)], InvalidTypeError, r"values\[0\] is \('a', 1\)"),
    ([("a", ("b", "c"))], InvalidTypeError, r"values\[0\]"),
    ([("a", ["b"])], InvalidTypeError, r"values\[0\]"),
    (Column(["a", None]), InvalidTypeError, r"values\[1\] is None"),
    (np.array([["a", 2]], dtype=object), InvalidTypeError, r"values\[0\]\[1\] is 2"),
    (np.arange(3), InvalidTypeError, "dtype int64 .* pass them to the module directly"),
    (np.zeros(3), InvalidTypeError, "dtype float64 .* replace missing values"),
    (torch.arange(3), InvalidTypeError, r"dtype torch.int64 .* pass them to the module directly"),
    ([["a"], ["b", "c"]], InvalidValueError, "lists of 1 and of 2"),
    (["a", ["b"]], InvalidValueError, "a list beside a value"),
]


@pytest.mark.parametrize(("values", "error", "message"), BAD)
def test_other_values_are_refused(values, error, message):
    with pytest.raises(error, match=message):
        hash_ids(values)


def test_a_salt_is_a_name():
    with pytest.raises(InvalidTypeError, match=r"salt is 3 \(int\)"):
        hash_ids(["a"], 3)


def test_mix64_golden():
    x = np.array([0, 1, 2, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15], dtype=np.uint64)
    expected = [
        0x0,
        0x3C02AA47758292BD,
        0x946F086BBB956C5D,
        0x965C78486206422D,
        0x78A9666A39C1A1B5,
        0xB70FB2CC55AF013F,
    ]
    assert mix64(x).tolist() == expected
    compiled = compiled_module("speedtransfer.vocabulary.numba_index")
    if compiled is not None:
        from numba import njit

        mix = compiled.mix64
        compiled_mix = njit(lambda x: mix(x))
        assert [compiled_mix(word) for word in x] == expected


def test_mix64_flips_half_of_the_bits():
    """One bit of the number changes each bit of the result in about half of the cases."""
    x = np.random.default_rng(0).integers(0, 2**64, 4000, dtype=np.uint64)
    for bit in range(64):
        changed = mix64(x) ^ mix64(x ^ np.uint64(1 << bit))
        flips = np.unpackbits(changed.view(np.uint8)).reshape(4000, 64).mean(0)
        assert abs(flips - 0.5).max() < 0.06  # 7 standard deviations
