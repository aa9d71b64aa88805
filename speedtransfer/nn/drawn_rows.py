"""Tables whose rows begin as small random numbers, or as zeros that take no memory."""

from __future__ import annotations

import torch
from torch import nn

from speedtransfer.nn.table_module import TableModule


class DrawnRows(TableModule):
    """The part of a table module that draws its weight from N(0, std); a base before the one that looks rows up.

    `std` is set before the table is made.
    """

    std: float

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, std), the padding row zero."""
        if self.std:
            super().reset_parameters()
            with torch.no_grad():
                self.weight.mul_(self.std)
        elif not self._has_rows() or self._handle.table.version:
            # A table that nobody has written to has zeros, which stay without memory.
            nn.init.zeros_(self.weight)
