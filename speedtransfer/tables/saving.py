"""Write the weights of a table to a file, in chunks."""

from __future__ import annotations

from pathlib import Path

from speedtransfer.dtypes import FLOAT8_DTYPES
from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.tables import files
from speedtransfer.tables.chunks import plane_chunks, row_chunks
from speedtransfer.tables.opened_files import SCALES
from speedtransfer.tables.opening import SCALE_BLOCK, Opening
from speedtransfer.tables.planes import PathLike


class Saving(Opening):
    """The part of a :class:`~speedtransfer.Table` that saves it; `load` and `open` read what this writes."""

    def save(self, path: PathLike) -> None:
        """Write the weights to a ``.npy`` or ``.safetensors`` file, streamed; an old file stays whole until the end.

        float8 rows that have scales ("weight.scale") are written with them, which `load` and `open` find again; where blocks
        of columns are not all as wide that raises `InvalidValueError`.
        """
        path = Path(path)
        for own in [*self._place.files, self.path]:
            if own is not None and path.exists() and path.samefile(own):
                remedy = (
                    "which has every change; use flush()" if self.writable else "which is read in place; choose another"
                )
                raise StorageError(f"{str(path)!r} is the table's own file, {remedy}")
        if self.in_parts:
            rows = row_chunks(self.num_rows, self.dim * self.dtype.itemsize)
            chunks = (self.chunk("weight", part) for part in rows)
        else:
            weight = self.plane("weight")
            chunks = (weight[rows].cpu() for rows in plane_chunks(weight))
        metadata = dict[str, str]()
        tensors: list[files.Written] = [("weight", self.dtype, (self.num_rows, self.dim), chunks)]
        if self.dtype in FLOAT8_DTYPES and SCALES in self.planes:
            scales = self.stored(SCALES)
            if scales.shape[1] and self.dim % scales.shape[1]:
                raise InvalidValueError(
                    f"rows of {self.dim} values have {scales.shape[1]} scales, whose blocks are not all as wide, which "
                    "load and open refuse; make the rows with a scale_block that divides them, or use save_checkpoint"
                )
            rows = row_chunks(self.num_rows, scales.shape[1] * scales.element_size())
            chunks = (self.chunk(SCALES, part).cpu() for part in rows)
            tensors.append((SCALES, scales.dtype, tuple(scales.shape), chunks))
            # Columns that share a scale: their number does not follow from that of the scales.
            metadata = {SCALE_BLOCK: str(-(-self.dim // max(scales.shape[1], 1)))}
        files.write(path, tensors, metadata, grows=self.max_rows is not None)
