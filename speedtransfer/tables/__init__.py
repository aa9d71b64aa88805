"""Where rows live: named planes in one memory. A new memory is a class of `Memory` and an entry of `table.MEMORIES`."""

from speedtransfer.tables.chunks import CHUNK_BYTES, copy_plane, plane_chunks, row_chunks
from speedtransfer.tables.index import UniqueRows, as_index, unique_rows
from speedtransfer.tables.planes import PathLike, TableStats
from speedtransfer.tables.table import MEMORIES, Table

__all__ = [
    "CHUNK_BYTES",
    "MEMORIES",
    "PathLike",
    "Table",
    "TableStats",
    "UniqueRows",
    "as_index",
    "copy_plane",
    "plane_chunks",
    "row_chunks",
    "unique_rows",
]
