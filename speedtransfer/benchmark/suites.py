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
    """A set of groups that are measured together; `options` are those of "rows" and "table_bytes" that apply to it."""

    name: str
    title: str
    options: frozenset[str] = frozenset()

    def groups(self, device: torch.device, quick: bool, **options: Any) -> list[Group]:
        """Make the groups of the suite."""
        found: list[Group] = self._module().groups(device, quick, **options)
        return found

    @property
    def note(self) -> str:
        """What a reader of the figures should know."""
        return str(getattr(self._module(), "NOTE", ""))

    def _module(self) -> Any:
        return module_of(self.name)


def module_of(suite: str) -> Any:
    """Return the module of a suite."""
    return importlib.import_module(f"speedtransfer.benchmark.{suite}")


SUITES = {
    suite.name: suite
    for suite in (
        Suite("transfer", "Rows to the compute device and back", frozenset({"rows", "table_bytes"})),
        Suite("speedtorch", "SpeedTorch's own benchmark", frozenset({"rows"})),
        Suite("tax", "Compute against transfer"),
        Suite("step", "A training step, by the size of the table", frozenset({"rows"})),
        Suite("precision", "A training step, by how the table is stored", frozenset({"rows"})),
        Suite("mixed", "Mixed precision by batch size: time, memory, accuracy"),
        Suite("memory", "Memory that a table takes", frozenset({"rows"})),
        Suite("prefetch", "Waiting for rows of a file, and how much of it is hidden", frozenset({"rows"})),
        Suite("cache", "Rows that a cache of hot rows serves", frozenset({"rows"})),
        Suite("lookup", "Frozen lookups of a few ids", frozenset({"rows"})),
        Suite("vocabulary", "Ids without a bound beside a plain table", frozenset({"rows"})),
        Suite("ranks", "The same steps in several processes", frozenset({"rows"})),
        Suite("exchange", "Gradients in fewer bytes: to the same loss"),
        Suite("ngram", "A language model with n-gram tables", frozenset({"rows"})),
    )
}
