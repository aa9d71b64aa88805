"""Read text from files, folders and standard input in pieces of whole words; never a whole file, nor a whole line.

Also which files are whose, where several processes read a part of a corpus each.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import itertools
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
from speedtransfer.lazy import import_extra
from speedtransfer.ranks import Exchange
from speedtransfer.untrusted import check_file, only_storage_errors

CHUNK_BYTES = 1 << 20
LINE_BYTES = 1 << 26  # that `iter_lines` holds at once; cut into words they take many times as much
_TEXTS = 64  # of a Parquet file, read at once: each may be a long document
SUFFIXES = (".txt", ".gz", ".xz", ".parquet")
POINT = "reads a corpus"  # of `ranks.POINTS`
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# What str.split() splits at, as UTF-8. A match of this ends behind the last white space: ".*" looks from the end.
_TO_LAST_SPACE = re.compile(
    rb".*(?:[\t-\r\x1c-\x20]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)",
    re.DOTALL,
)

T = TypeVar("T")
Source: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | BinaryIO


class Piece(NamedTuple):
    """A stretch of a file that begins and ends between words, not yet checked (see `decode` and `check`)."""

    data: bytes
    name: str  # of the file, for messages
    position: int  # of the first byte in the file
    last: bool  # whether the file ends here


def name_of(source: Source) -> str:
    """Return the name of `source` for messages."""
    if isinstance(source, str | os.PathLike):
        return "standard input" if os.fspath(source) == "-" else repr(os.fspath(source))
    return repr(str(getattr(source, "name", "the given file")))


def find_files(source: Any) -> list[Path]:
    """Return the files that a file, folder, pattern or list of these stands for, in reading order; raise if there are none."""
    if isinstance(source, str | list | tuple) and not source:  # of a shell variable that is not set, for one
        raise InvalidValueError(f"corpus is {source!r} but must be a path; pass a text file, a folder of them, or -")
    if isinstance(source, list | tuple):
        return [file for one in source for file in find_files(one)]
    if not isinstance(source, str | os.PathLike):
        raise InvalidTypeError(
            f"corpus is a {type(source).__name__} but must be a path, a list of them, '-' or a binary file; pass one"
        )
    if source == "-":
        raise InvalidValueError("corpus is '-', standard input, beside other files; pass it alone (cat FILE - | ...)")
    path = Path(source)
    if not os.path.isdir(path):  # which takes too long a name, or a text itself
        found = [path] if os.path.exists(path) else sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not found:
            raise StorageError(f"{str(path)[:200]!r} does not exist; pass a text file, a folder of them, or -")
        return [file for file in found if not file.is_dir()]
    names = (file.relative_to(path) for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    # What is hidden, or in a hidden folder, is a copy that an editor or notebook keeps.
    files = sorted(path / name for name in names if not any(part.startswith(".") for part in name.parts))
    if not files:
        raise InvalidValueError(f"folder {str(path)!r} holds no {', '.join(SUFFIXES)} file; pass the files' own folder")
    return files


def in_all(exchange: Exchange | None, do: Callable[[], T], about: Callable[[T], str] = lambda _: "") -> T:
    """Return what `do` returns, as `Exchange.in_all` where there are several processes."""
    return do() if exchange is None else exchange.in_all(POINT, do, about)


def own_part(source: Source, exchange: Exchange) -> Source:
    """Return the files that this process reads of those of all, about as many bytes as others; an open file is its own.

    From the largest on each file goes to the process that has the fewest bytes.
    """
    if hasattr(source, "read"):
        return source
    if source == "-":
        raise InvalidValueError("divide is for files but the corpus is '-'; pass a folder or a pattern of files")

    def about(files: list[tuple[int, str]]) -> str:
        told = repr([(size, os.path.basename(name)) for size, name in files])
        return f"{len(files)} files to divide, {hashlib.sha256(told.encode()).hexdigest()[:12]}"

    files = in_all(exchange, lambda: [(-os.stat(file).st_size, str(file)) for file in find_files(source)], about)
    if len(files) < exchange.ranks:
        raise InvalidValueError(
            f"{name_of(source)} has {len(files)} files but {exchange.ranks} processes are to divide them; split them into as "
            "many, or drop divide: then each reads all"
        )
    taken, own = [0] * exchange.ranks, []
    for place in sorted(range(len(files)), key=files.__getitem__):
        rank = taken.index(min(taken))
        taken[rank] -= files[place][0]
        if rank == exchange.rank:
            own.append(place)
    return [files[place][1] for place in sorted(own)]


def iter_pieces(source: Source, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Piece]:
    """Yield `source` in pieces of about `chunk_bytes` bytes, in order, cut at white space.

    Raises as :class:`Corpus`, with the name of the file, and `InvalidTypeError` where `source` is no path and no binary file.
    """
    for name, file in _files(source):
        try:
            yield from _cut(_blocks_of(file, chunk_bytes), name, chunk_bytes)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise StorageError(f"{name} is damaged, or not packed as its name says ({error}); get it again") from error
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"cannot read {name} ({error.strerror or error}); check its permissions") from error


def _files(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield the name of each file of `source`, and its path or the open file."""
    if hasattr(source, "read"):
        yield name_of(source), source
    elif source != "-":
        yield from ((repr(str(path)), path) for path in find_files(source))
    elif sys.stdin is None:
        raise StorageError("the corpus is '-' but the standard input is closed; pipe a text into it, or pass a path")
    else:
        yield name_of(source), sys.stdin.buffer


def _blocks_of(file: Any, chunk_bytes: int) -> Iterator[bytes]:
    """Yield what an open file holds, or the one that a path names, unpacked."""
    if not isinstance(file, Path):
        yield from iter(partial(file.read, chunk_bytes), b"")
    elif file.suffix == ".parquet":
        yield from _texts(file)
    else:
        opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
        with opener(file, "rb") as opened:
            yield from _blocks_of(opened, chunk_bytes)


def _texts(path: Path) -> Iterator[bytes]:
    """Yield the texts of a Parquet file, a line end after each, some at a time; read by pyarrow."""
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
        for batch in table.iter_batches(_TEXTS, columns=["text" if "text" in names else names[0]]):
            if data := "".join(f"{text}\n" for text in batch.column(0).to_pylist() if text).encode():
                yield data


def iter_lines(source: Source, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[str, list[str]]]:
    """Yield for each block of `source` the name of its file and the lines that end in it (blank ones too).

    Raises what `iter_pieces` and `decode` do, and `InvalidValueError` for a line of more than `LINE_BYTES`.
    """
    begun: list[str] = []  # a line may continue over many pieces
    begun_bytes = 0
    for piece in iter_pieces(source, chunk_bytes):
        first, *lines = decode(piece).split("\n")
        begun.append(first)
        begun_bytes = 0 if lines or piece.last else begun_bytes + len(piece.data)
        if begun_bytes > LINE_BYTES:
            raise InvalidValueError(
                f"{piece.name} has a line of more than {LINE_BYTES:,} bytes, up to byte {piece.position + len(piece.data)}: "
                "too long for memory; a line of a graph is an edge, or a node and neighbours, which may be in several lines"
            )
        if lines or piece.last:
            whole = ["".join(begun), *lines]
            begun = [] if piece.last else [whole.pop()]
            yield piece.name, whole


def decode(piece: Piece, whole: bool = True) -> str:
    """Return the text of `piece`; `InvalidValueError`, which names the byte, where it has a NUL or is not UTF-8.

    With `whole` False its last character may be cut in two.
    """
    if b"\0" in piece.data:
        at = piece.position + piece.data.index(b"\0")
        raise InvalidValueError(f"{piece.name} is no text: byte {at} is NUL; pass UTF-8 text (unpack it, or use iconv)")
    try:
        return codecs.utf_8_decode(piece.data, "strict", whole)[0]
    except UnicodeDecodeError as error:
        raise InvalidValueError(
            f"{piece.name} is no UTF-8 text: {error.reason} at byte {piece.position + error.start}; convert it with iconv"
        ) from None


def _cut(blocks: Iterator[bytes], name: str, chunk_bytes: int) -> Iterator[Piece]:
    data, position = b"", 0
    for block in itertools.chain(blocks, [b""]):  # none: the end
        if not isinstance(block, bytes):
            raise InvalidTypeError(f"{name} gives {type(block).__name__} but a corpus is bytes; open it in mode 'rb'")
        data += block
        match = _TO_LAST_SPACE.match(data) if block else None
        if block and match is None:  # the word may continue in the next block
            if len(data) > chunk_bytes:
                decode(Piece(data, name, position, False), whole=False)
                raise InvalidValueError(f"{name} holds a word of over {chunk_bytes} bytes; put spaces between words")
            continue
        end = len(data) if match is None else match.end()
        # A byte order mark is no part of the first word.
        begin = len(_BYTE_ORDER_MARK) if position == 0 and data.startswith(_BYTE_ORDER_MARK) else 0
        yield Piece(data[begin:end], name, position + begin, not block)
        data, position = data[end:], position + end
