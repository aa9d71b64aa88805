"""Run the notebooks and write their outputs into them, in place: `make notebooks`.

Every notebook runs from a fresh kernel in an empty folder, so that it cannot lean on what an earlier run has left there. What
is written is small and steady: no times of cells, no versions of the kernel, cells numbered from 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
MOST_BYTES = 150_000  # of a notebook with its outputs: a repository keeps every version
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
KERNEL_ARGUMENTS = ["--IPKernelApp.log_level=ERROR", "--InteractiveShell.colors=nocolor"]

_PLACES = {
    f"{str(place).rstrip('/')}/" for place in (Path.home(), ROOT, tempfile.gettempdir(), "/tmp", "/home", "/root")
}


def notebooks() -> list[Path]:
    """Return every notebook of this folder."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path, small: bool, timeout_s: int) -> nbformat.NotebookNode:
    """Run the notebook at `path` and return it with its outputs.

    Parameters
    ----------
    path : Path
    small : bool
        At the sizes of the tests.
    timeout_s : int
        Longest time of a cell.

    Raises
    ------
    CellExecutionError, CellTimeoutError
        A cell raises, or takes too long.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="speedtransfer-notebook-") as folder:
        work, settings = Path(folder, "work"), Path(folder, "ipython")
        work.mkdir()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Not the user's own settings and startup files of IPython.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "IPYTHONDIR": str(settings)}
        env.pop("SPEEDTRANSFER_SMALL", None)
        if small:
            env["SPEEDTRANSFER_SMALL"] = "1"
        client = NotebookClient(
            notebook,
            timeout=timeout_s,
            kernel_name=KERNEL["name"],
            allow_errors=False,
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=KERNEL_ARGUMENTS,
            resources={"metadata": {"path": str(work)}},
        )
        client.execute(env=env)
    return clean(notebook)


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Leave only metadata that is the same on every machine, and return the notebook."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return notebook


def faults(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what must not be in the outputs of a notebook: errors, warnings, paths of a machine, cells out of order."""
    found = []
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("its cells were not run once each, in order")
    for number, cell in enumerate(cells, start=1):
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"cell {number} has an error or a warning: {_shown(output)[:300]!r}")
            found += [
                f"cell {number} shows a path of this machine, {place!r}" for place in _PLACES if place in _shown(output)
            ]
    if not any(cell.outputs for cell in cells):
        found.append("it has no outputs")
    return found


def _shown(output: nbformat.NotebookNode) -> str:
    """Return all that an output says in letters; pictures are none."""
    shown = [value for kind, value in output.get("data", {}).items() if not kind.startswith("image/png")]
    return "\n".join(map(str, [output.get("text", ""), *output.get("traceback", []), *shown]))


def text_of(notebook: nbformat.NotebookNode) -> str:
    """Return the file of a notebook."""
    return nbformat.writes(notebook) + "\n"


def main() -> int:
    """Run the notebooks named on the command line, or all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", nargs="*", type=Path, help="default: all of this folder")
    parser.add_argument("--small", action="store_true", help="at the sizes of the tests")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write there instead of in place")
    parser.add_argument(
        "--timeout", type=int, default=600, metavar="SECONDS", help="longest time of a cell (%(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.small and arguments.output is None:
        parser.error("--small without --output would replace the outputs that readers see; pass a folder")
    for path in arguments.notebook or notebooks():
        started = time.perf_counter()
        try:
            notebook = execute(path, arguments.small, arguments.timeout)
        except CellExecutionError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        found = faults(notebook)
        text = text_of(notebook)
        if len(text.encode()) > MOST_BYTES:
            found.append(f"it has {len(text.encode()):,} bytes but may have {MOST_BYTES:,}; draw smaller pictures")
        if found:
            print(f"{path.name}: " + "; ".join(found), file=sys.stderr)
            return 1
        target = (arguments.output or path.parent) / path.name
        target.write_text(text, encoding="utf-8")
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, {len(text.encode()):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
