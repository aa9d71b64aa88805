"""The configurations of a plan: what each takes, whether it fits, how long a step is, and the code that makes it."""

from __future__ import annotations

import keyword
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speedtransfer.planning.estimate import Estimate
from speedtransfer.planning.footprint import (
    DENSE,
    DEVICE,
    MMAP,
    PAGEABLE,
    PINNED,
    SPARSE,
    Footprint,
    Form,
    Moved,
    SparseWay,
    footprint,
    misfit,
    moved,
    sparse_way,
)
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.workload import MULTI, Workload

MEASURED, ESTIMATED = "measured", "estimated"
# What replace_embeddings leaves alone by itself.
_MIN_ROWS = 10_000


@dataclass(frozen=True)
class Option:
    """One configuration of all tables.

    The `memory` is "device", "pinned", "pageable" or "mmap"; or "nn.Embedding" or "nn.Embedding(sparse=True)", as torch trains
    them. `form` is how rows and state are stored, `need` the bytes of each memory, `moved` those that a step reads from the
    tables and writes to them, `reason` why it does not fit ("" where it does), `code` the Python that makes it. Where it does
    not train with the optimizer that was asked for (`same`), its numbers are others, and it is not recommended. `estimate` are
    the seconds of a step, where they are known, and `dense_s` those of the rest of the model, as given.
    """

    memory: str
    form: Form
    need: Footprint
    moved: Moved
    reason: str
    code: str
    same: bool = True
    estimate: Estimate | None = None
    dense_s: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether every memory has room for it."""
        return not self.reason

    @property
    def is_table(self) -> bool:
        """Whether it is a table of this package."""
        return self.memory not in (DENSE, SPARSE)

    @property
    def level(self) -> int:
        """How much is lost, see `Form.level`; 3: files."""
        return 3 if self.memory == MMAP else self.form.level

    @property
    def how(self) -> str:
        """Where the time of a step is from: "measured", "estimated", both, or nothing."""
        if self.estimate is None or not self.estimate.measured_s:
            return "" if self.estimate is None else ESTIMATED
        return f"{MEASURED} and {ESTIMATED}" if self.estimate.disk_s else MEASURED

    @property
    def step_s(self) -> float | None:
        """Seconds of a step without reading ahead, with the rest of the model as it was given."""
        return None if self.estimate is None else self.estimate.seconds + self.dense_s

    @property
    def ahead_s(self) -> float | None:
        """Seconds of a step while the rows of the next are read; None where that was not estimated."""
        if self.estimate is None or self.estimate.measured_s or not self.is_table:
            return None
        return max(self.estimate.ahead_s, self.estimate.compute_s + self.dense_s)

    @property
    def bound(self) -> str:
        """What a step waits for longest: "host", "bus", "copies", "compute" or "disk"; empty where that is not known."""
        return "" if self.estimate is None else self.estimate.bound

    @property
    def total_bytes(self) -> float:
        """Bytes of all memories."""
        return self.need.device + self.need.host + self.need.disk

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        own = ("memory", "level", "fits", "reason", "step_s", "how", "bound", "code")
        return {
            **{name: getattr(self, name) for name in own},
            "storage_dtype": self.form.storage,
            "state_dtype": self.form.state,
            "bytes": self.need._asdict(),
            "step_bytes": self.moved._asdict(),
            "prefetched_s": self.ahead_s,
            "same_numbers": self.same,
        }


def make_options(workload: Workload, forms: Sequence[Form], machine: Machine, dense_s: float = 0.0) -> list[Option]:
    """Return all configurations with what they take, without times; raise if the memory for rows of a step is unknown."""
    machine.figure("host_bytes" if machine.device is None else "device_bytes")
    sparse = sparse_way(workload)
    torchs = [DENSE] * (not workload.trainer.wants_sparse) + [SPARSE] * (sparse is not None)
    memories = [DEVICE, PINNED] * (machine.device is not None) + [PAGEABLE, MMAP]
    ways = [(Form(), memory) for memory in torchs] + [(form, memory) for form in forms for memory in memories]
    found = []
    for form, memory in ways:
        need = footprint(workload, form, memory, machine)
        # The rows of torch's modules do not travel: they are in the memory that they are computed in.
        step = Moved(0.0, 0.0) if memory in torchs else moved(workload, form)
        same = sparse is None or sparse.same or memory != SPARSE
        code = _torch_code(workload, memory, sparse) if memory in torchs else code_for(workload, form, memory)
        found.append(Option(memory, form, need, step, misfit(need, machine), code, same, dense_s=dense_s))
    return found


# Where no time is known: nothing to look up in other memory first.
_ORDER = (DENSE, SPARSE, DEVICE, PINNED, PAGEABLE)


def best_option(options: Sequence[Option]) -> Option | None:
    """Return the configuration to use: of those that fit and lose least, the fastest; None where none fits.

    Levels are float32 rows and state; fewer bits of rows or state; rows in 8 bits; files. One that trains with another
    optimizer than was asked for is left out. Of equally fast ones the first takes precedence, which is torch's own module.
    """
    fitting = [option for option in options if option.fits and option.same]
    if not fitting:
        return None
    level = min(option.level for option in fitting)
    return min((option for option in fitting if option.level == level), key=_slowness)


def smallest_option(options: Sequence[Option]) -> Option | None:
    """Return the one that takes the fewest bytes of memory, of those that fit; files only where nothing else does."""
    fitting = [option for option in options if option.fits and option.same]
    return min(fitting, key=lambda o: (o.level == 3, o.total_bytes), default=None)


def _slowness(option: Option) -> tuple[float, float, int]:
    seconds = option.ahead_s or option.step_s
    place = _ORDER.index(option.memory) if option.memory in _ORDER else len(_ORDER)
    return (math.inf if seconds is None else seconds, float(option.form.level), place)


# --- code -----------------------------------------------------------------------------------------------------------------


def code_for(workload: Workload, form: Form, memory: str, shared: bool = False) -> str:
    """Return the Python that makes the tables: of a model a call of ``replace_embeddings``, of sizes the modules.

    Those that are `shared` have their rows in all processes of a group.
    """
    options = ['process_group="world"'] * shared + [f"memory={memory!r}"]
    # A table that is not trained has no state.
    given = form.arguments if workload.trainer.make is not None else {**form.arguments, "state_dtype": None}
    options += [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if workload.idle != "auto":
        options.append(f"idle={workload.idle!r}")
    lines: list[str] = []
    names = _variables(workload)
    replaced = [table for table in workload.tables if table.names and not table.is_table]
    few = ["min_rows=1"] if min((table.rows for table in replaced), default=_MIN_ROWS) < _MIN_ROWS else []
    for table in replaced if memory == MMAP else replaced[:1]:
        of = [f"names={list(table.names)!r}"] if memory == MMAP and len(workload.tables) > 1 else []
        path = [f"path='{names[table.name]}.safetensors'"] if memory == MMAP else []
        lines.append(f"st.replace_embeddings({', '.join(['model', *few, *of, *options, *path])})")
    for table in workload.tables:
        if table in replaced:
            continue
        path = [f"path='{names[table.name]}.safetensors'"] if memory == MMAP else []
        sparse = ["sparse=True"] if workload.trainer.wants_sparse and not table.is_table else []
        rows = [size for size, _ in table.features] if table.kind in MULTI else table.rows
        own = [str(rows), str(table.dim), *sparse, *options, *path]
        about = f"  # with the other arguments of {table.name!r}" if table.names else ""
        lines.append(f"{names[table.name]} = st.{table.kind}({', '.join(own)}){_frozen(workload)}{about}")
    return "\n".join(lines)


def _torch_code(workload: Workload, memory: str, sparse: SparseWay | None) -> str:
    more = ["sparse=True"] * (memory == SPARSE)
    lines = ["model = st.to_dense(model)"] * any(table.is_table for table in workload.tables)
    for table, variable in zip(workload.tables, _variables(workload).values(), strict=True):
        if not table.names:
            made = f"torch.nn.Embedding({', '.join([str(table.rows), str(table.dim), *more])})"
            lines.append(f"{variable} = {made}{_frozen(workload)}")
        elif memory == SPARSE:
            lines += [f"model.get_submodule({name!r}).sparse = True" for name in table.names]
    if memory == SPARSE and sparse is not None and not sparse.same:
        lines.append(f"# trained by torch.optim.{sparse.name}, whose numbers are others")
    return "\n".join(lines) or "# the model as it is"


def _frozen(workload: Workload) -> str:
    return ".requires_grad_(False)" if workload.trainer.make is None else ""


def _variables(workload: Workload) -> dict[str, str]:
    """Return a name of Python for each table, by its name."""
    found: dict[str, str] = {}
    for table in workload.tables:
        text = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in table.name)
        text = text if text.isidentifier() and not keyword.iskeyword(text) else f"table_{text}"
        while text in found.values():
            text += "_"
        found[table.name] = text
    return found
