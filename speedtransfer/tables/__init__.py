"""Where rows live: named planes in one memory. A new memory is a class of `Memory` and an entry of `saving.MEMORIES`."""

from speedtransfer.tables.chunks import CHUNK_BYTES, copy_plane, plane_chunks, row_chunks
from speedtransfer.tables.index import as_index, refuse_layout
from speedtransfer.tables.memories import Memory, check_room
from speedtransfer.tables.padded import kept, padded_anew, padded_unique, sum_rows, trimmed
from speedtransfer.tables.page_advice import read_ahead
from speedtransfer.tables.placement import Placement
from speedtransfer.tables.planes import PathLike, check_dtype
from speedtransfer.tables.records import check_layout
from speedtransfer.tables.row_values import as_rows, overlap, tensor_of
from speedtransfer.tables.same_file import have_same_rows
from speedtransfer.tables.saving import MEMORIES
from speedtransfer.tables.stats import TableStats
from speedtransfer.tables.table import Table
from speedtransfer.tables.unfinished import loading, refuse
from speedtransfer.tables.unique import NOTHING, Known, UniqueRows, move_together, unique_rows
from speedtransfer.tables.write_back import overlay
from speedtransfer.tables.write_log import WriteLog

__all__ = [
    "CHUNK_BYTES",
    "MEMORIES",
    "NOTHING",
    "Known",
    "Memory",
    "PathLike",
    "Placement",
    "Table",
    "TableStats",
    "UniqueRows",
    "WriteLog",
    "as_index",
    "as_rows",
    "check_dtype",
    "check_layout",
    "check_room",
    "copy_plane",
    "have_same_rows",
    "kept",
    "loading",
    "move_together",
    "overlap",
    "overlay",
    "padded_anew",
    "padded_unique",
    "plane_chunks",
    "read_ahead",
    "refuse",
    "refuse_layout",
    "row_chunks",
    "sum_rows",
    "tensor_of",
    "trimmed",
    "unique_rows",
]
