"""The suites of ``speedtransfer bench``: a line here and a module of the same name for each.

The module defines

- ``groups(device, quick, rows=None, seed=0, **others)``: the list of :class:`~speedtransfer.benchmark.measure.Group` to
  compare on a compute device, with small sizes if `quick`; `rows` are those of the table, and other options are ignored;
- ``sentences(groups)``: the results of groups that ran, as a list of str;
- ``draw(make_figure, groups)``: their picture, or None if there is nothing to draw;
- ``tables(groups)``: compact tables of them; without it all figures of each group are shown;
- ``NOTE``: what a reader of the figures should know.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from speedtransfer.benchmark.measure import Group

MIN_TABLE_BYTES = 1 << 16  # of suite `transfer`


@dataclass(frozen=True)
class Suite:
    """Groups that are measured together; `options` are those of "rows" and "table_bytes" that apply to it.

    Its `module`, by default that of its name here, is imported when it is used.
    """

    name: str
    title: str
    options: frozenset[str] = frozenset()
    package: str = "speedtransfer.benchmark"

    @property
    def module(self) -> Any:
        """The module that declares it."""
        return importlib.import_module(f"{self.package}.{self.name}")

    def groups(self, device: torch.device, quick: bool, **options: Any) -> list[Group]:
        """Make the groups of the suite."""
        found: list[Group] = self.module.groups(device, quick, **options)
        return found

    @property
    def note(self) -> str:
        """What a reader of the figures should know."""
        return str(getattr(self.module, "NOTE", ""))


# Those of the command; bench/store.py adds experiments.
SUITES = {
    suite.name: suite
    for suite in (
        Suite("transfer", "Rows to the compute device and back", frozenset({"rows", "table_bytes"})),
        Suite("step", "A training step, by the size of the table", frozenset({"rows"})),
        Suite("memory", "Memory that a table takes", frozenset({"rows"})),
        Suite("precision", "A training step, by how the table is stored", frozenset({"rows"})),
        Suite("lookup", "Frozen lookups of a few ids", frozenset({"rows"})),
        Suite("prefetch", "Waiting for rows of a file, and how much of it is hidden", frozenset({"rows"})),
        Suite("cache", "Rows that a cache of hot rows serves", frozenset({"rows"})),
    )
}
