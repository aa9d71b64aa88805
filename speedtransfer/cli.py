"""The command line: ``speedtransfer info | bench | plan | follow | word2vec ...``, also as ``python -m speedtransfer``.

An error that this package raises on purpose is one line on the standard error and exit code 2, without a traceback.
torch is imported when a command runs: ``--help`` answers without it.
"""

from __future__ import annotations

import errno
import functools
import importlib
import logging
import os
import platform
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from speedtransfer.errors import InvalidValueError, SpeedtransferError, format_bytes, printable
from speedtransfer.system import check_writable, program
from speedtransfer.version import __version__, version_of
from speedtransfer.word2vec.commands import app as word2vec_app

if TYPE_CHECKING:
    from speedtransfer.cuda import CudaStatus

app = typer.Typer(
    help="Embedding tables larger than GPU memory, trained with any row-by-row torch.optim optimizer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(word2vec_app, name="word2vec")


def _add_later(name: str, module: str, help: str) -> None:
    """Add the command that is the function `name` of `module`, which is imported when the command is used."""

    class Later(TyperCommand):
        @functools.cached_property
        def loaded(self) -> Any:
            alone = typer.Typer(add_completion=False)
            alone.command(name)(getattr(importlib.import_module(module), name))
            return typer.main.get_command(alone)

        def make_context(self, *args: Any, **kwargs: Any) -> Any:
            return self.loaded.make_context(*args, **kwargs)

    app.command(name, cls=Later, help=help)(lambda: None)


_add_later("bench", "speedtransfer.benchmark.commands", "Measure how fast rows move on this machine.")
_add_later(
    "follow", "speedtransfer.checkpoint.follow_command", "List the deltas in a folder, and where one is missing."
)
_add_later("plan", "speedtransfer.planning.command", "Tell whether tables fit, where, and how long a step takes.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"speedtransfer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def info() -> None:
    """Print what this machine has: device, driver, link, memory and versions, or plainly what is missing."""
    from rich.console import Console
    from rich.table import Table

    from speedtransfer.cuda import cuda_status, resolve_device
    from speedtransfer.engines.calibration import load

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows():
        table.add_row(name, value)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    status = cuda_status()
    calibrated = status.available and load(resolve_device(None)) is not None
    step = _next_step(status, calibrated).replace("`speedtransfer ", f"`{program()} ")
    console.print(f"\nnext: {step}", markup=False)


def _next_step(status: CudaStatus, calibrated: bool) -> str:
    """Return what to do next on this machine, in a line."""
    from speedtransfer.cuda.status import cupy_package

    if status.available and calibrated:
        return "`speedtransfer plan --rows 1e9 --dim 128 --lookups 65536`, or measure: `speedtransfer bench transfer`"
    if status.available:
        return "`speedtransfer calibrate` measures which way of moving rows is fastest here, once"
    if status.devices and status.cupy is None:
        return f"`pip install '{cupy_package()}[ctk]'`, without which no table uses {status.devices[0]}"
    if status.driver is not None:  # something else is wrong with CUDA: the reason ends with what to do
        return f"{status.reason.rpartition('; ')[2]}; or stay on the CPU: `speedtransfer word2vec demo -o demo`"
    return "`speedtransfer word2vec demo -o demo` trains vectors on the CPU, in a minute or so, and draws them"


@app.command()
def calibrate(
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: CUDA where there is one.")] = None,
    show: Annotated[bool, typer.Option(help="Only show what was measured before.")] = False,
) -> None:
    """Measure which engine moves how many rows of which size fastest here, and keep it for every "pinned" table.

    A new measurement replaces an earlier one, such as one of a busy machine.
    SPEEDTRANSFER_ENGINE or `table.engine` overrides the choice. On the CPU `host`
    moves rows whatever is measured, unless one of these names `reference`.
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from speedtransfer.cuda import resolve_device
    from speedtransfer.engines import calibrate_device
    from speedtransfer.engines.calibration import REMEDY, file_of, load, machine_of

    target = resolve_device(device)
    found = load(target)
    if show and found is None:
        raise InvalidValueError(f"{target} has not been measured with these versions; run `speedtransfer calibrate`")
    if not show or found is None:
        check_writable(file_of(machine_of(target)), REMEDY)
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("measuring", total=None)
            new = calibrate_device(target, lambda point: progress.advance(task))
        found = new if found is None else found.joined(new)
    console = Console(soft_wrap=True)
    machine = ", ".join(f"{name} {value}" for name, value in found.machine.items() if value is not None)
    console.print(f"{machine}\none large copy: {found.copy_bytes_per_s / 1e9:.1f} GB/s\n", highlight=False)
    engines = list(dict.fromkeys(name for point in found.points for name in point.seconds))
    table = Table(
        "table", "direction", "row bytes", "rows", *(f"{name}, GB/s" for name in engines), "fastest", box=None
    )
    for point in found.points:
        rates = {name: point.row_bytes * point.num_rows / s / 1e9 for name, s in point.seconds.items()}
        cells = [f"{rates[name]:.2f}" if name in rates else "wrong" for name in engines]
        sizes = f"{point.row_bytes:,}", f"{point.num_rows:,}"
        table.add_row(
            format_bytes(point.plane_bytes), point.direction, *sizes, *cells, point.fastest if point.seconds else "-"
        )
    console.print(table)
    console.print(f"\nkept in {file_of(found.machine) if show else found.save()}", highlight=False)


def _threads() -> str:
    import torch

    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"


def _rows() -> list[tuple[str, str]]:
    import numpy
    import torch

    from speedtransfer.cuda import cuda_status
    from speedtransfer.system import physical_bytes

    status = cuda_status()
    built = f"for CUDA {status.torch_cuda}" if status.torch_cuda else "without CUDA"
    rows = [
        ("speedtransfer", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__} (built {built}), {_threads()}"),
        ("numpy", numpy.__version__),
        ("numba", version_of("numba") or "not installed; run: pip install numba"),
        ("cupy", status.cupy or "not installed"),
        ("driver", f"supports CUDA {status.driver}" if status.driver else "no NVIDIA driver"),
        ("host memory", f"{format_bytes(physical_bytes())}, {os.cpu_count()} CPUs"),
    ]
    if status.available:
        for number, name in enumerate(status.devices):
            free, total = torch.cuda.mem_get_info(number)
            rows.append((f"device cuda:{number}", f"{name}, {format_bytes(total)} ({format_bytes(free)} free)"))
            rows.append(("", _link(number)))
        rows.append(("memory='auto'", "pinned where a table fits, else pageable"))
    else:
        rows.append(("CUDA", f"not usable: {status.reason}"))
        rows.append(("memory='auto'", "pageable; everything runs on the CPU"))
    return rows


def _link(number: int) -> str:
    """Return what the driver says of the link between the host and CUDA device `number`."""
    import torch

    query = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    uuid = getattr(torch.cuda.get_device_properties(number), "uuid", number)  # its number may differ for the driver
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        generation, generation_max, width, width_max = (field.strip() for field in answer.strip().split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return "link: nvidia-smi does not say"
    # An idle link trains down; the maximum is what a transfer gets.
    return f"link: PCIe generation {generation_max} x{width_max} (now {generation} x{width})"


# The base of what typer raises for wrong arguments: click's class, or typer's own copy of it from 0.26 on.
_UsageProblem: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


# Why nothing more can be written to the standard output. A closed pipe is not here: typer ends the program without a word.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Warnings(logging.Handler):
    """Shows warnings of this package as lines on the standard error, above a bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        print(printable(_in_flags(record.getMessage())), file=sys.stderr)


def main() -> None:
    """Run the command line and exit."""
    log, warnings = logging.getLogger("speedtransfer"), _Warnings(logging.WARNING)
    log.addHandler(warnings)
    try:
        code = app(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except SpeedtransferError as error:
        _fail(_in_flags(str(error)))
    except _UsageProblem as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
            error.show()
            raise SystemExit(2) from None
        _fail(f"{error.format_message()} (see --help)")
    except OSError as error:
        if error.filename is not None:  # too long a name, or of a folder of somebody else
            _fail(f"cannot use {error.filename!r} ({error.strerror}); check the path and its permissions")
        if error.errno not in _NO_ROOM:
            raise
        _give_up_stdout()
        _fail(f"cannot write the output ({error.strerror}); make room, or write elsewhere")
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    finally:
        log.removeHandler(warnings)
    if code == 130:  # typer makes this of Ctrl-C by itself
        print("speedtransfer: aborted", file=sys.stderr)
    raise SystemExit(code if isinstance(code, int) else 0)


def _in_flags(message: str) -> str:
    """Return a message as the command line spells settings, where the command has such."""
    named = sys.argv[1:2] in (["bench"], ["calibrate"])
    return re.sub(r"\bdevice='([^']+)'", r"--device \1", message) if named else message


def _give_up_stdout() -> None:
    """Drop what the standard output still holds if it cannot be written, so that Python does not try again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> NoReturn:
    print(printable(f"speedtransfer: error: {' '.join(message.split())}"), file=sys.stderr)
    raise SystemExit(2)
