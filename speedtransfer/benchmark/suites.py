"""The suites of ``speedtransfer bench``: a line here and a module of the same name for each.

The module declares what is compared and how it is shown; whatever has a default may be left out.

- ``groups(device, quick, rows=None, seed=0, **others)``: the list of :class:`~speedtransfer.benchmark.measure.Group` to
  compare on a compute device, with small sizes if `quick`; `rows` are those of the table, and other options are ignored;
- ``NOTE``: what a reader of the figures should know;
- ``BY = (key, label)``: the parameter by which groups of a series are put side by side, in tables and as lines;
- ``series(group)``: the title of the series of a group, "" for one that stands alone; by default all groups are one series
  where there is a ``BY``, else each stands alone and has a sentence, a table and bars;
- ``COLUMNS = {title: show}``: what the tables of a series show of a case, by default its time; without a ``BY`` what the
  table of a group shows, by default all figures;
- ``describe(group, case)``: what is said of a case beside its time, by default its rate and share of the roof;
- ``VALUE = (function, label)``: the figure of a case that the picture shows, by default milliseconds; None: no picture;
- ``CURVES = {key: (title, scale)}``: which `values` of cases, by step, the picture shows as lines in place of bars;
- ``picture(make_figure, groups)``: the figure, where it is to be another than lines or bars;
- ``about(groups)``: further sentences.
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
    """Groups that are measured together; its `module`, by default that of its name here, is imported when it is used."""

    name: str
    title: str
    package: str = "speedtransfer.benchmark"

    @property
    def module(self) -> Any:
        """The module that declares it."""
        return importlib.import_module(f"{self.package}.{self.name}")

    def groups(self, device: torch.device, quick: bool, **options: Any) -> list[Group]:
        """Make the groups of the suite."""
        found: list[Group] = self.module.groups(device, quick, **options)
        return found

    def declared(self, name: str, default: Any) -> Any:
        """Return what the module declares by a name."""
        return getattr(self.module, name, default)


# Those of the command; bench/store.py adds experiments.
SUITES = {
    suite.name: suite
    for suite in (
        Suite("transfer", "Rows to the compute device and back"),
        Suite("step", "A training step, by the size of the table"),
        Suite("memory", "Memory that a table takes"),
        Suite("precision", "A training step, by how the table is stored"),
        Suite("lookup", "Frozen lookups of a few ids"),
        Suite("prefetch", "Waiting for rows of a file, and how much of it is hidden"),
        Suite("cache", "Rows that a cache of hot rows serves"),
    )
}
