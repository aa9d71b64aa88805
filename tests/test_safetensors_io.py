"""Headers of safetensors files, against the library of that name; damaged ones are in test_tables_files.py."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from speedtransfer.dtypes import SAFETENSORS_DTYPES
from speedtransfer.errors import StorageError
from speedtransfer.safetensors_io import METADATA, check_entry, header_bytes, make_header, read_header

TENSORS = {name: torch.zeros(3, 2).to(dtype) for name, dtype in SAFETENSORS_DTYPES.items()}


def read(path):
    with open(path, "rb") as file:
        return read_header(file, path)


def test_the_library_reads_what_we_write(tmp_path):
    values = {name: torch.randint(0, 100, (3, 2)).to(tensor.dtype) for name, tensor in TENSORS.items()}
    header = make_header(((name, value.dtype, value.shape) for name, value in values.items()), {"made by": "us"})
    content = header_bytes(header)
    assert len(content) % 64 == 0
    for value in values.values():
        content += value.view(torch.uint8).numpy().tobytes()
    (tmp_path / "ours").write_bytes(content)
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"made by": "us"}
        assert set(file.keys()) == set(values)
        for name, value in values.items():
            read_value = file.get_tensor(name)
            assert read_value.dtype == value.dtype
            assert torch.equal(read_value.view(torch.uint8), value.view(torch.uint8))


def test_we_read_what_the_library_writes(tmp_path):
    save_file(TENSORS, tmp_path / "theirs", metadata={"made by": "them"})
    header, begin = read(tmp_path / "theirs")
    assert header.pop(METADATA) == {"made by": "them"}
    assert set(header) == set(TENSORS)
    ends = 0
    for name, entry in header.items():
        found = check_entry(entry)
        assert (found.dtype, found.shape) == (TENSORS[name].dtype, (3, 2))
        ends = max(ends, found.end)
    assert begin + ends == (tmp_path / "theirs").stat().st_size


@pytest.mark.parametrize("content", [b"", b"1234567", (9).to_bytes(8, "little") + b"{}", b"\xff" * 16])
def test_a_header_longer_than_its_file(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StorageError, match=rf"file' is no .safetensors file or is truncated \({len(content)} bytes\)"):
        read(tmp_path / "file")


@pytest.mark.parametrize("text", [b"[]", b"1", b"{", b"[" * 100_000])
def test_a_header_that_is_no_object(tmp_path, text):
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises((ValueError, TypeError, RecursionError)):
        read(tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [0, 12]}, "does not match its bytes"),
        ({"data_offsets": [-16, 0]}, "does not match its bytes"),
        ({"shape": [True, 4]}, "does not match its bytes"),
        ({"shape": [-2, -2]}, "does not match its bytes"),
        ({"shape": [2**62, 0, 2**62], "data_offsets": [0, 0]}, "a shape that no tensor has"),
        ({"shape": [1] * 63 + [2, 2]}, "a shape that no tensor has"),
    ],
)
def test_an_entry_that_is_no_tensor(change, message):
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    assert check_entry(entry) == (torch.float32, (2, 2), 0, 16)
    with pytest.raises(ValueError, match=message):
        check_entry({**entry, **change})
