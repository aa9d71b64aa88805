"""The files of a benchmark run: checked before anything is measured, each written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from speedtransfer.benchmark import html
from speedtransfer.benchmark.drawing import require_matplotlib
from speedtransfer.benchmark.report import plot
from speedtransfer.errors import StorageError
from speedtransfer.system import replace_file


class Output:
    """Writes the JSON of each suite as it grows, and pictures and report at the end.

    Parameters
    ----------
    json_path : Path, optional
        A file; a folder with `several`.
    plot_folder : Path, optional
        For pictures and report.html.
    several : bool
        There is more than one suite.

    Raises
    ------
    StorageError
        A file or folder could not be written.
    MissingPackageError
        matplotlib is not installed.
    """

    def __init__(self, json_path: Path | None, plot_folder: Path | None, several: bool) -> None:
        self._json, self._plots, self._several = json_path, plot_folder, several
        self._results: dict[str, dict[str, Any]] = {}
        self._written: dict[Path, None] = {}
        if plot_folder is not None:
            require_matplotlib()
            _check_folder(plot_folder, "--plot")
        if json_path is not None and several:
            _check_folder(json_path, "--json")
        elif json_path is not None:
            if json_path.is_dir():
                raise StorageError(f"--json {str(json_path)!r} is a folder but one suite is one file; name the file")
            _check_folder(json_path.parent, "--json", create=False)

    def keep(self, result: dict[str, Any]) -> None:
        """Take the result of a suite so far and write its JSON."""
        self._results[result["suite"]] = result
        if self._json is not None:
            path = self._json
            if self._several:
                path.mkdir(parents=True, exist_ok=True)
                path = path / f"{result['suite']}.json"
            self._write(path, (json.dumps(result, indent=1) + "\n").encode())

    def finish(self) -> list[Path]:
        """Draw what there is to draw and return the files written."""
        if self._plots is not None and self._results:
            self._plots.mkdir(parents=True, exist_ok=True)
            pictures = {}
            for result in self._results.values():
                picture = plot(result)
                if picture is not None:
                    pictures[result["suite"]] = picture
                    self._write(self._plots / f"{result['suite']}.png", picture)
            self._write(self._plots / "report.html", html.page(list(self._results.values()), pictures).encode())
        return list(self._written)

    def _write(self, path: Path, content: bytes) -> None:
        with replace_file(path) as file:
            file.write(content)
        self._written[path] = None


def _check_folder(folder: Path, option: str, create: bool = True) -> None:
    """Raise `StorageError` where nothing can be written into `folder`, or where it cannot be made."""
    present = folder
    while create and not os.path.lexists(present) and present != present.parent:
        present = present.parent
    if not present.is_dir():
        what = "is no folder" if os.path.lexists(present) else "does not exist"
        raise StorageError(f"{option}: {str(present)!r} {what}; choose a folder you may write to")
    try:
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        raise StorageError(
            f"{option}: cannot write to {str(present)!r} ({error.strerror}); choose a folder you may write to"
        ) from error
