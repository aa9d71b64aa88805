"""Run the notebooks and write their outputs into them, in place: `make notebooks`.

Every notebook runs from a fresh kernel in an empty folder, so that it cannot lean on what an earlier run has left there, and
without the user's settings of IPython, Jupyter and matplotlib. What is written is small and steady: no times of cells, no
versions of the kernel, cells numbered from 1.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
MOST_BYTES = 150_000  # of a notebook with its outputs: a repository keeps every version
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
KERNEL_ARGUMENTS = ["--IPKernelApp.log_level=ERROR", "--InteractiveShell.colors=nocolor"]

_DISK = "/var/tmp"  # where a large table goes to: the system's temporary folder is memory itself on some systems
_WORK = _DISK if os.access(_DISK, os.W_OK) else tempfile.gettempdir()
_FOLDERS = (Path.home(), ROOT, tempfile.gettempdir(), _DISK, "/tmp", "/home", "/root")
_PLACES = {f"{str(folder).rstrip('/')}/" for folder in _FOLDERS} - {"/"}  # a home may be the root, which says nothing


def notebooks() -> list[Path]:
    """Return every notebook of this folder."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path, small: bool, timeout_s: int) -> nbformat.NotebookNode:
    """Run the notebook at `path` and return it with its outputs.

    Parameters
    ----------
    path : Path
    small : bool
        At the sizes of the tests, and with the data that come along or are made up.
    timeout_s : int
        Longest time of a cell.

    Raises
    ------
    CellExecutionError, CellTimeoutError, DeadKernelError
        A cell raises, takes too long, or ends the kernel.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="speedtransfer-notebook-", dir=_WORK) as folder:
        work, ipython, runtime = (Path(folder, name) for name in ("work", "ipython", "runtime"))
        for each in (work, ipython, runtime):
            each.mkdir()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        env |= {"IPYTHONDIR": str(ipython), "JUPYTER_RUNTIME_DIR": str(runtime)}
        env.pop("SPEEDTRANSFER_SMALL", None)
        if small:
            env["SPEEDTRANSFER_SMALL"] = "1"
            env.pop("SPEEDTRANSFER_DATA", None)  # the same run on every machine
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


def list_fonts(folder: str) -> None:
    """Have matplotlib keep its files in `folder`, its list of fonts among them, in this process and in kernels from now on.

    The list is made here and now: a kernel without one would make it in every run, and say so on standard error.
    """
    os.environ["MPLCONFIGDIR"] = folder
    importlib.import_module("matplotlib.font_manager")


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Leave only metadata that is the same on every machine, and return the notebook."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        # What the site says of a picture.
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in cell.metadata if key == "mystnb"})
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
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", nargs="*", type=Path, help="default: all of this folder")
    parser.add_argument("--small", action="store_true", help="at the sizes of the tests, without data of your own")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write there instead of in place")
    parser.add_argument(
        "--timeout", type=int, default=600, metavar="SECONDS", help="longest time of a cell (%(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.small and arguments.output is None:
        parser.error("--small without --output would replace the outputs that readers see; pass a folder")
    if arguments.output is not None:
        try:
            arguments.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output cannot be made ({error}); pass another folder")
    paths = arguments.notebook or notebooks()
    if missing := [str(path) for path in paths if not path.is_file()]:
        parser.error(f"there is no file {missing[0]!r}; pass the path of a notebook, or none for all")
    with tempfile.TemporaryDirectory(prefix="speedtransfer-matplotlib-") as folder:
        if any("matplotlib" in path.read_text(encoding="utf-8") for path in paths):
            list_fonts(folder)
        return run(paths, arguments)


def run(paths: list[Path], arguments: argparse.Namespace) -> int:
    """Run the notebooks at `paths` and write them, up to the first that must not be shown; return the exit code."""
    for path in paths:
        started = time.perf_counter()
        try:
            notebook = execute(path, arguments.small, arguments.timeout)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
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
