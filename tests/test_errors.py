"""Every error is ours and the standard one; the helpers that make messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import speedtransfer as st
from speedtransfer import errors, word2vec
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, format_bytes, suggest
from speedtransfer.word2vec import UnknownWordError

STANDARD = {
    "RowIndexError": IndexError,
    "InvalidValueError": ValueError,
    "InvalidTypeError": TypeError,
    "DeviceError": RuntimeError,
    "HostMemoryError": MemoryError,
    "StorageError": OSError,
    "OptimizerError": RuntimeError,
    "ProcessGroupError": RuntimeError,
}


@pytest.mark.parametrize(("name", "standard"), STANDARD.items())
def test_is_ours_and_the_standard_one(name, standard):
    error = getattr(errors, name)
    for kind in (errors.SpeedtransferError, standard):
        with pytest.raises(kind, match=r"^rows is -1; pass more$"):
            raise error("rows is -1; pass more")
    others = set(STANDARD.values()) - {standard}
    assert not any(issubclass(error, other) for other in others)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pined", "; did you mean 'pinned'?"),
        ("PINNED", "; did you mean 'pinned'?"),
        ("pinned", "; did you mean 'pinned'?"),
        ("adamw", "; did you mean 'AdamW' or 'Adam'?"),
        ("xyz", "; choose from 'pinned', 'pageable', 'AdamW', 'Adam'"),
        ("", "; choose from 'pinned', 'pageable', 'AdamW', 'Adam'"),
    ],
)
def test_suggest(name, expected):
    assert suggest(name, ["pinned", "pageable", "AdamW", "Adam"]) == expected


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 bytes"),
        (1, "1 bytes"),
        (999, "999 bytes"),
        (999.4, "999 bytes"),
        (1000, "1 kB"),
        (1024, "1.02 kB"),
        (123_456, "123 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (1_000_000, "1 MB"),
        (2**30, "1.07 GB"),
        (5_120_000_000, "5.12 GB"),
        (999_499_999_999, "999 GB"),
        (999_600_000_000, "1 TB"),
        (40e12, "40 TB"),
        (-1500, "-1.5 kB"),
        (np.int64(2_000_000), "2 MB"),
    ],
)
def test_format_bytes(num_bytes, expected):
    assert format_bytes(num_bytes) == expected


@pytest.mark.parametrize("value", [5, np.int8(5), np.uint64(5), torch.tensor(5), np.array(5)], ids=repr)
def test_check_size(value):
    size = check_size(value, "rows")
    assert size == 5
    assert type(size) is int


@pytest.mark.parametrize(
    ("value", "minimum", "message"),
    [
        (-1, 0, "rows is -1 but must be at least 0; pass 0 or more"),
        (0, 1, "rows is 0 but must be at least 1; pass 1 or more"),
        (2**63, 0, "rows is 9223372036854775808 but must be below 2**63; pass a smaller rows"),
    ],
)
def test_check_size_out_of_range(value, minimum, message):
    with pytest.raises(InvalidValueError) as error:
        check_size(value, "rows", minimum)
    assert str(error.value) == message


@pytest.mark.parametrize("value", [True, False, 1.0, 1.5, "10", None, [1], 1j, torch.tensor(1.0)], ids=repr)
def test_check_size_of_what_is_no_integer(value):
    with pytest.raises(InvalidTypeError) as error:
        check_size(value, "rows")
    assert str(error.value) == f"rows is {value!r} ({type(value).__name__}) but must be an integer; pass int(rows)"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00e9 \u6f22 \u200c", "plain \u00e9 \u6f22 \u200c"),
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("a\nb\x9b", r"a\nb\x9b"),
        ("\u202eturned \ud800", r"\u202eturned \ud800"),
    ],
)
def test_messages_show_what_a_terminal_would_carry_out(text, shown):
    assert errors.printable(text) == shown
    for name in STANDARD:
        # Messages of several lines are put on one by whoever shows them.
        assert str(getattr(errors, name)(text)) == shown.replace(r"\n", "\n")
    assert str(UnknownWordError(text)) == shown.replace(r"\n", "\n")


def test_suggest_among_millions_is_soon_done():
    assert "999970 more" in suggest("x", map(str, range(1_000_000)))


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///tmp/run", "gs://bucket/table.npy"])
def test_a_url_is_no_path(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    emb = st.Embedding(10, 4)
    calls = [
        lambda: st.save_checkpoint(url, emb, progress=False),
        lambda: st.load_checkpoint(url, emb, progress=False),
        lambda: emb.table.save(url),
        lambda: st.Table.load(url),
        lambda: st.Embedding(10, 4, memory="mmap", path=url),
        lambda: word2vec.Settings(memory="mmap", path=url),
    ]
    for call in calls:
        with pytest.raises(InvalidValueError, match="but must be a path of this machine"):
            call()
    assert list(tmp_path.iterdir()) == []
