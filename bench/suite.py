"""Measures one suite: ``python bench/suite.py NAME PATH HEADER [--quick] [--seconds N]``.

record.py runs it in a process of its own. PATH gets the result, in the form of ``speedtransfer bench --json`` and with the
entries of HEADER (JSON), after every group, so that an interrupted run keeps what it has. After a group that fails the others
still run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from store import suites, write

from speedtransfer.benchmark.run import run_suite
from speedtransfer.benchmark.workload import default_table_bytes
from speedtransfer.cuda import resolve_device


def main() -> int:
    """Measure, and return 1 where a group failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=suites())
    parser.add_argument("path", type=Path)
    parser.add_argument("header", type=json.loads)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--seconds", type=float, help="leave out groups, but none that has time kept for it, after that"
    )
    args = parser.parse_args()

    def keep(result: dict[str, Any]) -> None:
        # The header was made before: its commit is that of the sources that were measured.
        write(
            args.path, {**args.header, **result, "environment": args.header.get("environment", result["environment"])}
        )

    console = Console(width=120, force_terminal=False)
    device = resolve_device(None)
    # Passed explicitly, so that the result records it.
    options = {"table_bytes": default_table_bytes(device, args.quick)} if args.name == "transfer" else {}
    result = run_suite(suites()[args.name], device, args.quick, console, keep, args.seconds, **options)
    keep(result)
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
