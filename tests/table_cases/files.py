"""Tables saved and loaded."""

from __future__ import annotations

import pytest
import torch
from cases import NO_NUMPY_DTYPES, numbers, refused

from speedtransfer.errors import (
    InvalidTypeError,
    StorageError,
)
from speedtransfer.tables import chunks as fill
from table_cases.base import TableCases


class FileCases(TableCases):
    @pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
    def test_save_and_load(self, suffix, dtype, monkeypatch):
        monkeypatch.setattr(fill, "CHUNK_BYTES", 1)  # many chunks
        values = numbers((50, 3), dtype)
        table, path = self.filled(values), self.folder / f"saved{suffix}"
        if suffix == ".npy" and dtype in NO_NUMPY_DTYPES:
            with refused(InvalidTypeError, rf"{dtype} has no .npy form .*; use .*.safetensors"):
                table.save(path)
            assert not path.exists()
            return
        table.save(path)
        loaded = self.load(path)
        assert (loaded.num_rows, loaded.dim, loaded.dtype, loaded.memory) == (50, 3, dtype, table.memory)
        self.assert_unchanged(loaded, values)

    @pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
    @pytest.mark.parametrize("shape", [(0, 3), (5, 0), (0, 0), (1, 1), (33, 16)], ids=str)
    def test_save_and_load_of_awkward_shapes(self, suffix, shape):
        values = numbers(shape, torch.float32)
        path = self.folder / f"saved{suffix}"
        path.write_bytes(b"old")
        self.filled(values).save(path)
        loaded = self.load(path)
        self.assert_unchanged(loaded, values)
        assert (loaded.num_rows, loaded.dim) == shape
        loaded.add_plane("m", 1)

    def test_whether_the_loaded_file_is_the_table(self):
        path = self.folder / "one.npy"
        self.numbered().save(path)
        before = path.read_bytes()
        loaded = self.load(path)
        loaded.fill_(9)
        loaded.flush()
        assert (path.read_bytes() != before) == self.persistent

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
    def test_failure_of_save_keeps_the_old_file(self, error, monkeypatch):
        table, path = self.numbered(100, 4), self.folder / "saved.npy"
        path.write_bytes(b"old")
        files_before = sorted(p.name for p in self.folder.iterdir())
        monkeypatch.setattr(fill, "CHUNK_BYTES", 1)
        calls = []

        def failing(plane):
            for rows in fill.plane_chunks(plane):
                calls.append(rows)
                if len(calls) == 3:
                    raise error
                yield rows

        expected = pytest.raises(KeyboardInterrupt)
        if isinstance(error, OSError):
            expected = refused(StorageError, r"cannot write .* \(No space left on device\); free some space")
        with monkeypatch.context() as patch, expected:
            patch.setattr("speedtransfer.tables.saving.plane_chunks", failing)
            table.save(path)
        assert path.read_bytes() == b"old"
        assert sorted(p.name for p in self.folder.iterdir()) == files_before

    @pytest.mark.parametrize(
        ("name", "standard", "message"),
        [
            ("table.txt", ValueError, r"ends in '.txt' but a table is .npy or .safetensors; rename it"),
            ("table", ValueError, r"has no ending but a table is .npy or .safetensors; rename it"),
            ("table.NPY", ValueError, r"ends in '.NPY' but a table is .npy or .safetensors; rename it"),
            ("missing/table.npy", OSError, r"cannot write .* \(No such file or directory\); choose a folder"),
            ("file/table.npy", OSError, r"cannot write .* \(Not a directory\); choose a folder"),
            ("folder.npy", OSError, r"cannot write .* \(Is a directory\); "),
        ],
    )
    def test_save_to_a_bad_path(self, name, standard, message):
        (self.folder / "file").write_text("x")
        (self.folder / "folder.npy").mkdir()
        table = self.numbered()
        before = sorted(p.name for p in self.folder.iterdir())
        with refused(standard, message):
            table.save(self.folder / name)
        assert sorted(p.name for p in self.folder.iterdir()) == before
