"""A folder in an object store for a checkpoint: s3://, gs:// and whatever else fsspec has a file system for."""

from __future__ import annotations

import contextlib
import functools
import io
import posixpath
from collections.abc import Iterator
from typing import Any, BinaryIO

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.folder import NewFiles
from speedtransfer.errors import InvalidValueError, SpeedtransferError, StorageError
from speedtransfer.tables import CHUNK_BYTES


class Store:
    """A folder by its URL, with the methods of `Folder`.

    An object is there whole, once it is closed, or not at all; the manifest comes last and replaces the one before in one go.
    There are no locks: what a save that was killed has left stays.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self._url = url.rstrip("/")
        self.name = posixpath.basename(self._url)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self._url)
        except (ImportError, ValueError) as error:  # the package of the store, which fsspec names, or no such store
            raise InvalidValueError(
                f"path {url!r} cannot be opened by fsspec ({_said(error)}); see its remedy"
            ) from error

    def __str__(self) -> str:
        return self._url

    def file(self, name: str) -> str:
        """Return the URL of a file in it."""
        return f"{self._url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Raise `StorageError` where the store raises anything: each has exceptions of its own."""
        try:
            yield
        except (SpeedtransferError, MemoryError):
            raise
        except Exception as error:
            raise StorageError(
                f"cannot {doing} {str(self)!r} ({_said(error)}); check the URL, the rights and the network"
            ) from error

    def _names(self) -> list[str]:
        """Return the names of what is in it, none if there is nothing."""
        self._fs.invalidate_cache()
        try:
            return [posixpath.basename(path.rstrip("/")) for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def exists(self) -> bool:
        """Tell whether there is anything."""
        with self._told("list"):
            return bool(self._names())

    def check_target(self) -> None:
        """Raise `InvalidValueError` where there is other content than a checkpoint."""
        with self._told("list"):
            names = self._names()
            if self._fs.isfile(self._root):
                raise InvalidValueError(
                    f"path {str(self)!r} exists and is no folder; choose another path for the checkpoint"
                )
        manifest.check_target(self, names, self.read_manifest)

    def read_manifest(self) -> bytes:
        """Return the bytes of the manifest, unchecked. StorageError: there is none, or none of such a size."""
        path = self._path(manifest.NAME)
        with self._told("read"):
            try:
                self._fs.invalidate_cache()
                with self._fs.open(path, "rb") as file:
                    return manifest.limited(file.read(manifest.MAX_BYTES + 1), self.file(manifest.NAME))
            except FileNotFoundError:
                raise StorageError(
                    f"{str(self)!r} holds no {manifest.NAME}, so no finished checkpoint; check the path"
                ) from None

    def named(self) -> set[str] | None:
        """Return the data files that the manifest names, none without a manifest; None if it cannot be read."""
        try:
            with self._told("list"):
                return manifest.names_in(self.read_manifest()) if manifest.NAME in self._names() else set()
        except StorageError:
            return None

    def open(self, name: str) -> BinaryIO:
        """Open a file, which no save changes, but a later one removes. StorageError if that cannot be done."""
        with self._told(f"open {name!r} of"):
            # Each read asks for what it needs.
            return _Told(self, self._fs.open(self._path(name), "rb", block_size=CHUNK_BYTES, cache_type="none"))  # type: ignore[return-value]

    def stamp(self, name: str, file: BinaryIO) -> object:
        """Return what is the same in processes that have opened the same file, in JSON."""
        return self._fs.ukey(self._path(name))

    def check_room(self, need_bytes: int) -> None:
        """Do nothing: a store says when it is full."""

    def scratch(self) -> None:
        """Return None: there are no other files than those of a checkpoint."""

    def check_sees(self, name: str) -> None:
        """Do nothing: `commit` looks whether all files are there, which are not before they are whole."""

    @contextlib.contextmanager
    def new_files(self, names: dict[str, str], need_bytes: int, made: bool) -> Iterator[NewFiles]:
        """Begin a file for each role; where the block raises, remove them."""
        files = NewFiles()
        try:
            with self._told("write to"):
                for role, name in names.items():
                    files[role] = _Told(self, self._begun(name))
            yield files
        except BaseException as error:
            current = self.named()
            for role, name in names.items():
                if role in files:
                    files[role].discard()
                if not files.stay(error) and current is not None and name not in current:
                    with contextlib.suppress(Exception):
                        self._fs.rm_file(self._path(name))
            raise

    def _begun(self, name: str) -> Any:
        """Return a file to write."""
        begin = functools.partial(self._fs.open, self._path(name), "wb", block_size=CHUNK_BYTES)
        try:
            return begin()
        except FileNotFoundError:
            # Not before: it would make a bucket of a name that is mistyped.
            self._fs.makedirs(self._root, exist_ok=True)
            return begin()

    def finish(self, file: BinaryIO) -> None:
        """Have the store take a file."""
        file.close()

    def commit(self, content: dict[str, Any]) -> None:
        """Put the manifest in place: from here on this is the checkpoint. Then remove the files of the one before."""
        with self._told("write to"):
            self._fs.invalidate_cache()
            for facts in content["files"].values():
                path = self._path(facts["name"])
                if not self._fs.exists(path) or self._fs.size(path) != facts["bytes"]:
                    raise StorageError(
                        f"{self.file(facts['name'])!r} is not there as it was written; give all processes a store that they "
                        "share"
                    )
            previous = self.named() or set()
            self._fs.pipe_file(self._path(manifest.NAME), manifest.to_bytes(content))
            for name in previous - {facts["name"] for facts in content["files"].values()}:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(self._path(name))


class _Told:
    """A file of a store whose exceptions become `StorageError`."""

    def __init__(self, store: Store, file: Any) -> None:
        self._store, self._file = store, file

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, *error: object) -> None:
        with self._store._told("read"):
            self._file.close()

    @property
    def name(self) -> str:
        return str(self._file.path)

    def write(self, data: Any) -> None:
        with self._store._told("write to"):
            self._file.write(data)

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        with self._store._told("write to"):
            self._file.close()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with self._store._told("read"):
            return int(self._file.seek(offset, whence))

    def readinto(self, target: memoryview) -> int:
        with self._store._told("read"):
            return int(self._file.readinto(target))

    def discard(self) -> None:
        """Leave a file that is being written, without making an object of what it has."""
        from fsspec.spec import AbstractBufferedFile

        with contextlib.suppress(Exception):
            if isinstance(self._file, AbstractBufferedFile) and not self._file.closed:
                self._file.discard()
                # Else it would be made when it is freed.
                self._file.closed = True
            else:
                self._file.close()


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
