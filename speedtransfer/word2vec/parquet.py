"""Read Parquet files, by pyarrow, a few rows at a time: texts of a corpus, and words with their counts."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from speedtransfer.errors import StorageError
from speedtransfer.lazy import import_extra
from speedtransfer.untrusted import check_file, only_storage_errors

_TEXTS = 64  # read at once: each may be a long document


class TextColumn:
    """The texts of a Parquet file as an open binary file, a line end after each.

    They are those of the column `text`, or else of the only column of strings. Raises `StorageError` where there is none, or
    the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._blocks = _text_blocks(path)

    def __enter__(self) -> TextColumn:
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.close()

    def read(self, size: int) -> bytes:
        """Return the next bytes, any number of them; none at the end."""
        return next(self._blocks, b"")


def _text_blocks(path: Path) -> Generator[bytes, None, None]:
    parquet = import_extra("pyarrow.parquet", "texts in .parquet", "pyarrow")
    check_file(path)
    with only_storage_errors(path, "a Parquet file with a column of text"), parquet.ParquetFile(path) as table:
        names = [field.name for field in table.schema_arrow if str(field.type) in ("string", "large_string")]
        if names == ["word"] and "count" in table.schema_arrow.names:
            raise StorageError(
                f"{str(path)!r} is no corpus: it is a table of words and counts, which --vocabulary takes"
            )
        if "text" not in names and len(names) != 1:
            known = ", ".join(names) or "none"
            raise StorageError(
                f"{str(path)!r} is no corpus: its columns of strings are {known}; a corpus is one named text, or one alone"
            )
        name = "text" if "text" in names else names[0]
        for batch in table.iter_batches(_TEXTS, columns=[name]):
            data = "".join(f"{text}\n" for text in batch.column(0).to_pylist() if text).encode()
            if data:  # none would be the end
                yield data


def rows_of(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place, word and count of each row of a table, or of a folder of them."""
    parquet = import_extra("pyarrow.parquet", "tables of .parquet", "pyarrow")
    # Engines of several processes write a folder, a file each.
    parts, number = sorted(path.glob("*.parquet")) if path.is_dir() else [path], 0
    for part in parts:
        with only_storage_errors(part, "a table of words and counts"):
            check_file(part)
            with parquet.ParquetFile(part) as table:
                if not {"word", "count"} <= set(table.schema_arrow.names):
                    raise ValueError(f"its columns are {', '.join(table.schema_arrow.names)}, not word and count")
                for batch in table.iter_batches(columns=["word", "count"]):
                    for word, count in zip(
                        *(batch.column(name).to_pylist() for name in ("word", "count")), strict=True
                    ):
                        number += 1
                        yield f"row {number}", word, count
