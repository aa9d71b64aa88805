"""Where rows live: named planes in one memory. A new memory is a class of `Memory` and an entry of `table.MEMORIES`."""

from speedtransfer.tables.chunks import CHUNK_BYTES, copy_plane, plane_chunks, row_chunks
from speedtransfer.tables.index import UniqueRows, as_index, unique_rows
from speedtransfer.tables.page_advice import read_ahead
from speedtransfer.tables.planes import PathLike, TableStats, check_dtype
from speedtransfer.tables.row_values import as_rows, overlap, tensor_of
from speedtransfer.tables.table import MEMORIES, Table

__all__ = [
    "CHUNK_BYTES",
    "MEMORIES",
    "PathLike",
    "Table",
    "TableStats",
    "UniqueRows",
    "as_index",
    "as_rows",
    "check_dtype",
    "copy_plane",
    "overlap",
    "plane_chunks",
    "read_ahead",
    "row_chunks",
    "tensor_of",
    "unique_rows",
]
