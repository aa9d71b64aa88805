"""`make gpu` in parts of ten minutes at most, for a machine that is available for a short time: tasks, order and limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from store import EXPERIMENTS

FACTS = "facts"  # beside the parts of store.PARTS

# Tests in a process of their own beside the others: of kernels whose waits could last for ever, and of much memory.
ALONE = tuple(f"tests/gpu/test_{name}.py" for name in ("all_kernels", "bulk", "cuda", "large"))


class Task(NamedTuple):
    """Something to run, its time limit, and whether to run its quick form."""

    name: str
    limit_s: float
    quick: bool = False


class Part(NamedTuple):
    """Tasks that share `seconds`: time that one leaves goes to the next. Sized for `host_bytes` of memory at most."""

    seconds: float
    host_bytes: float
    tasks: tuple[Task, ...]

    def scaled(self, seconds: float) -> Part:
        """Return the same for a shorter or longer time."""
        factor = seconds / self.seconds
        tasks = (task._replace(limit_s=task.limit_s * factor) for task in self.tasks)
        return Part(seconds, self.host_bytes, tuple(tasks))

    def environment(self, folder: Path) -> dict[str, str]:
        """Return environment variables to set unless they are set; what is calibrated and compiled goes to `folder`."""
        from speedtransfer.system import physical_bytes

        return {
            "SPEEDTRANSFER_HOST_BYTES": f"{min(self.host_bytes, physical_bytes() or self.host_bytes):.0f}",
            "SPEEDTRANSFER_CACHE": os.fspath(folder),
            "CUPY_CACHE_DIR": os.fspath(folder / "cupy"),
        }


REST = 1000.0
QUICK_SUITES = (Task("step", 60, True), Task("transfer", 45, True), Task("cache", 35, True), Task("prefetch", 35, True))
GPU_PARTS = {
    1: Part(540, 110e9, (Task(FACTS, 30), Task("tests", 220), Task(EXPERIMENTS, REST))),
    # With more memory the step on the largest table would not be reached.
    2: Part(540, 67e9, (*QUICK_SUITES, Task("step", 190), Task("transfer", REST))),
    3: Part(
        540,
        67e9,
        (
            Task("sanitizer", 200),
            Task("precision", 80),
            Task("mixed", 120),
            Task("memory", REST),
        ),
    ),
}
