"""Where rows live. `base` is the contract; a new memory is a class in a file of its own and a line in `base.MEMORIES`."""

from speedtransfer.tables.chunks import row_chunks
from speedtransfer.tables.index import UniqueRows, as_index, unique_rows
from speedtransfer.tables.stats import TableStats
from speedtransfer.tables.table import MEMORIES, Table

__all__ = ["MEMORIES", "Table", "TableStats", "UniqueRows", "as_index", "row_chunks", "unique_rows"]
