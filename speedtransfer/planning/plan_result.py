"""A plan: what fits where, how long a step takes in each memory, and which configuration to use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedtransfer.planning.findings import Findings
from speedtransfer.planning.plan_data import as_data
from speedtransfer.planning.plan_text import as_text


@dataclass(frozen=True)
class Plan(Findings):
    """What :func:`speedtransfer.plan` has found; ``print`` shows it.

    Attributes
    ----------
    workload : Workload
        The tables, with the lookups and expected distinct rows of a step.
    machine : Machine
        What was planned for.
    here : bool
        Whether that is this machine.
    bytes : dict of Form to Bytes
        Bytes of weights, state, last steps and scales, by form.
    options : tuple of Option
        All configurations.
    best, smallest : Option or None
        The one to use, and the one that takes the least; None where none fits.
    cache : tuple of CacheSize
        Caches of several sizes for the best configuration with rows in host memory, or for the first that there is.
    dense_bytes : float
        Bytes of all other parameters of the model, with gradients and state.
    """

    def __str__(self) -> str:
        return as_text(self)

    def data(self) -> dict[str, Any]:
        """Return the plan as plain data, as ``speedtransfer plan --json`` writes it."""
        return as_data(self)

    def draw(self, path: str | Path) -> None:
        """Draw the time of a step against the size of the tables, by memory, as a PNG.

        Parameters
        ----------
        path : path-like

        Raises
        ------
        StorageError
            It cannot be written.
        MissingPackageError
            matplotlib is not installed.
        """
        # Drawing is loaded where a picture is wanted.
        from speedtransfer.planning.plan_picture import save

        save(self, Path(path))
