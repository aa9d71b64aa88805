"""What an engine says of a row that does not exist."""

from __future__ import annotations

from torch import Tensor

from speedtransfer.errors import RowIndexError


def out_of_range(where: str, value: int, num_rows: int) -> RowIndexError:
    """Return the error for `value`, found at `where` ("index[3]"), of a table of `num_rows` rows."""
    have = f"{num_rows} rows (0 to {num_rows - 1})" if num_rows else "no rows"
    rule = "but rows count from 0, negative ones do not exist" if value < 0 else f"but the table has {have}"
    return RowIndexError(f"{where} is {value} {rule}; clamp or filter the index")


def check_host_index(index: Tensor, num_rows: int) -> None:
    """Raise for the first value of `index`, (n,) int64 on the CPU, outside ``[0, num_rows)``."""
    array = index.numpy()
    if not len(array) or (int(array.min()) >= 0 and int(array.max()) < num_rows):
        return
    first = int(((array < 0) | (array >= num_rows)).argmax())
    raise out_of_range(f"index[{first}]", int(array[first]), num_rows)
