"""`make gpu` in parts of ten minutes at most, for a machine that is available for a short time: tasks, order and limits."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

FACTS, FIRST_TESTS, FIRST_LOOK = "facts", "first_tests", "first_look"  # beside the parts of store.PARTS
FIRST_FILES = [f"tests/gpu/test_{name}.py" for name in ("devices", "streams", "faults", "all_kernels")]

# What only a GPU proves, and the tests of tests/gpu that run it.
FEATURES = {
    "every kernel": "all_kernels",
    "ids found on the device (kernels/ids.cu)": "vocabulary_map",
    "new ids admitted after the step (deferred=True)": "vocabulary_map",
    "tables in page-locked memory that grow": "tables",
    "suite vocabulary": "benchmark_vocabulary",
}


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

    def environment(self) -> dict[str, str]:
        """Return environment variables to set unless they are set already."""
        from speedtransfer.system import physical_bytes

        return {
            "SPEEDTRANSFER_HOST_BYTES": f"{min(self.host_bytes, physical_bytes() or self.host_bytes):.0f}",
            "CUPY_CACHE_DIR": os.fspath(Path(tempfile.gettempdir(), "speedtransfer-cupy")),
        }


REST = 1000.0
GPU_PARTS = {
    1: Part(
        480, 110e9, (Task(FACTS, 40), Task(FIRST_TESTS, 110), Task(FIRST_LOOK, 210), Task("transfer", REST, quick=True))
    ),
    2: Part(560, 110e9, (Task("tests", REST),)),
    # With more memory the step on the largest table would not be reached.
    3: Part(560, 67e9, (Task("transfer", 240), Task("step", 230), Task("speedtorch", REST))),
    4: Part(560, 67e9, (Task("sanitizer", 200), Task("precision", 110), Task("mixed", 110), Task("memory", REST))),
}
