"""Records tests and benchmarks: `gpu` runs both on a CUDA device, `here` the benchmarks on whatever this machine has, and
`status` tells which GPU results exist and which still hold.

Results go to ``bench/results/<device>/{tests,benchmarks}.json``. Each names the device, versions, commit and a digest of
the sources it depends on; where the digest has changed since, the result is stale. Needs only what the tests need.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHAT = ("tests", "benchmarks")
NO_TESTS_COLLECTED = 5  # pytest's exit code
PACKAGE = ("speedtransfer/**/*.py", "speedtransfer/**/*.cu", "speedtransfer/**/*.cuh")
# What only runs the benchmarks or shows them is no part of what they measure.
SOURCES = {
    "tests": (*PACKAGE, "tests/gpu/**/*.py", "tests/engine_cases.py"),
    "benchmarks": (*PACKAGE, "bench/**/*.py", "!bench/record.py", "!bench/readme.py"),
}


def digest(root: Path, what: str) -> str:
    """Return the SHA-256 of the names and contents of the files that the result `what` depends on."""
    patterns = SOURCES[what]
    chosen = {path for pattern in patterns if pattern[0] != "!" for path in root.glob(pattern)}
    chosen -= {root / pattern[1:] for pattern in patterns if pattern[0] == "!"}
    result = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in chosen):
        content = path.read_bytes()
        result.update(f"{name}\0{len(content)}\0".encode() + content)
    return result.hexdigest()


def commit_of(root: Path) -> tuple[str, bool | None]:
    """Return the commit of the working tree and whether it has changes; ("unknown", None) outside of git."""
    try:
        git = ["git", "-C", str(root)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", ".", ":!bench/results", ":!README.md"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown", None
    return head.stdout.strip(), bool(changes.stdout.strip())


def slug(device: str) -> str:
    """Return the name of a device as the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def cpu_name() -> str:
    """Return what the system calls its processor, and how many threads torch uses of it."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"CPU {names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def environment(root: Path, what: str) -> dict[str, Any]:
    """Return what every result says about where it comes from."""
    import torch

    from speedtransfer.device import cuda_status
    from speedtransfer.version import __version__

    status = cuda_status()
    commit, dirty = commit_of(root)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": status.torch_cuda,
        "cupy": status.cupy,
        "numpy": importlib.metadata.version("numpy"),
        "speedtransfer": __version__,
    }
    return {
        "what": what,
        "device": status.devices[torch.cuda.current_device()] if status.available else cpu_name(),
        "cuda": status.available,
        "driver": status.driver,
        "versions": versions,
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "digest": digest(root, what),
    }


def summary(junit: Path) -> dict[str, Any]:
    """Return the counts, seconds and failures in a JUnit file of pytest."""
    cases = list(ElementTree.parse(junit).iter("testcase"))
    failures = {}
    for case in cases:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            name = f"{case.get('classname')}.{case.get('name')}"
            failures[name] = (problem.get("message") or "").strip().splitlines()[:1]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "seconds": sum(float(case.get("time", 0)) for case in cases),
        "failures": failures,
    }


def run(root: Path = ROOT, suites: tuple[str, ...] = WHAT) -> int:
    """Run `suites` and write their results; return 0, 1 after failures or 2 where the tests want CUDA in vain."""
    sys.path.insert(0, str(root))  # also where the package is not installed
    from speedtransfer.device import cuda_status

    reason = cuda_status().reason
    if reason and "tests" in suites:
        print(f"error: the GPU tests and benchmarks need CUDA, but {reason}", file=sys.stderr)
        return 2
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        junit, samples = Path(folder, "junit.xml"), Path(folder, "benchmark.json")
        arguments = {
            "tests": ["tests/gpu", "-m", "gpu"],
            "benchmarks": ["bench", "--benchmark-enable", f"--benchmark-json={samples}"],
        }
        for what in suites:
            result = environment(root, what)  # before: the sources as they are when it starts
            command = [sys.executable, "-m", "pytest", "-q", *arguments[what], f"--junitxml={junit}"]
            code = subprocess.run(command, cwd=root, check=False).returncode
            if code == NO_TESTS_COLLECTED:
                print(f"{what}: there are none yet")
                continue
            if code not in (0, 1):
                print(f"error: pytest stopped with exit code {code}; no {what} were recorded", file=sys.stderr)
                failed = True
                continue
            result.update(summary(junit))
            if what == "benchmarks":
                recorded = json.loads(samples.read_text()) if samples.exists() and samples.stat().st_size else {}
                result.update(machine=recorded.get("machine_info"), benchmarks=recorded.get("benchmarks", []))
            failed = failed or result["failed"] > 0
            path = root / "bench" / "results" / slug(result["device"]) / f"{what}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(f"{what}: {result['passed']} passed, {result['failed']} failed; wrote {path.relative_to(root)}")
    return int(failed)


def status(root: Path = ROOT) -> int:
    """Print every result and whether it is current."""
    paths = [path for what in WHAT for path in (root / "bench" / "results").glob(f"*/{what}.json")]
    lines = [("device", "what", "date", "commit", "passed", "failed", "state")]
    for path in sorted(paths):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if not result["cuda"]:
                continue
            changed = result["digest"] != digest(root, path.stem)
            commit = result["commit"][:12] + ("+changes" if result["dirty"] else "")
            state = "STALE (sources changed since)" if changed else "current"
            counts = str(result["passed"]), str(result["failed"])
            lines.append((result["device"], path.stem, result["date"], commit, *counts, state))
        except (KeyError, TypeError, ValueError) as error:
            problem = f"unreadable ({type(error).__name__}: {error}); run `make gpu` again"
            lines.append((path.parent.name, path.stem, "-", "-", "-", "-", problem))
    if len(lines) == 1:
        print("no GPU results yet; run `make gpu` on a machine with a CUDA device")
        return 0
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench/record.py", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("gpu", help="run the GPU tests and the benchmarks and write their results")
    commands.add_parser(
        "here", help="run the benchmarks on this machine, with or without a GPU, and write their results"
    )
    commands.add_parser("status", help="list the GPU results and which are stale")
    command = parser.parse_args(arguments).command
    return status() if command == "status" else run(suites=WHAT if command == "gpu" else ("benchmarks",))


if __name__ == "__main__":
    sys.exit(main())
