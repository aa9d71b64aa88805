"""Any sequence of calls on a table gives what the same sequence on NumPy arrays gives, in every memory."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import HOST_MEMORIES, assert_same_bits, numbers
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule
from machines import run_machine, short_and_long

from speedtransfer import Table
from speedtransfer.tables import chunks as fill

NAMES = ["exp_avg", "exp_avg_sq", "last_step"]
PLANE_DTYPES = [torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8]
PLANE = st.tuples(st.integers(0, 4), st.sampled_from(PLANE_DTYPES), st.integers(0, 100))
FORMS = {
    "tensor": torch.from_numpy,
    "int32": lambda index: torch.from_numpy(index).int(),
    "array": lambda index: index,
    "list": lambda index: index.tolist(),
    "strided": lambda index: torch.from_numpy(np.repeat(index, 2))[::2],
}


class TableMachine(RuleBasedStateMachine):
    """Tables beside dicts of arrays. A subclass sets `memory`, `suffix` and `layout`."""

    memory, suffix, layout = "pageable", None, "planes"
    tables = Bundle("tables")

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.count = 0
        self.models = {}  # id of a table -> (the table, {plane: array})
        self.chunk_bytes, fill.CHUNK_BYTES = fill.CHUNK_BYTES, 1

    def teardown(self):
        fill.CHUNK_BYTES = self.chunk_bytes
        self.models.clear()
        self.folder.cleanup()

    def path(self, suffix):
        self.count += 1
        return Path(self.folder.name) / f"{self.count}{suffix}"

    def known(self, table, planes):
        self.models[id(table)] = (table, planes)
        table.layout = self.layout
        return table

    def planes(self, table):
        return self.models[id(table)][1]

    # --- tables come about --------------------------------------------------------------------------------------------

    @initialize(target=tables, num_rows=st.integers(0, 60), dim=st.integers(1, 5), dtype=st.sampled_from(PLANE_DTYPES))
    def start(self, num_rows, dim, dtype):
        path = self.path(self.suffix) if self.suffix else None
        table = Table(num_rows, dim, dtype, self.memory, path, "cpu")
        return self.known(table, {"weight": torch.zeros(num_rows, dim, dtype=dtype).numpy()})

    @precondition(lambda self: len(self.models) < 4)
    @rule(target=tables, table=tables)
    def deepcopy(self, table):
        planes = {name: array.copy() for name, array in self.planes(table).items()}
        return self.known(copy.deepcopy(table), planes)

    @precondition(lambda self: len(self.models) < 4)
    @rule(target=tables, table=tables, suffix=st.sampled_from([".npy", ".safetensors"]), memory=st.booleans())
    def save_and_load(self, table, suffix, memory):
        path = self.path(suffix)
        table.save(path)
        where = self.memory if memory else "pageable"
        loaded = Table.load(path, where, "cpu", writable=where == "mmap")
        return self.known(loaded, {"weight": self.planes(table)["weight"].copy()})

    @precondition(lambda self: len(self.models) < 4)
    @rule(target=tables, table=tables, dtype=st.sampled_from([torch.float64, torch.float32]))
    def astype(self, table, dtype):
        weight = torch.from_numpy(self.planes(table)["weight"]).to(dtype).numpy()
        return self.known(table.astype(dtype), {"weight": weight.copy()})

    @rule(target=tables, table=tables)
    def reopen(self, table):
        if table.path is None:
            return multiple()
        table.flush()
        # The same rows: from now on both see what either writes.
        opened = Table.load(table.path, "mmap", "cpu", writable=True)
        return self.known(opened, {"weight": self.planes(table)["weight"]})

    # --- planes -------------------------------------------------------------------------------------------------------

    @rule(table=tables, specs=st.dictionaries(st.sampled_from(NAMES), PLANE, min_size=1), together=st.booleans())
    def add_planes(self, table, specs, together):
        planes = self.planes(table)
        new = {name: spec for name, spec in specs.items() if name not in planes}
        if len(new) < len(specs):
            with pytest.raises(ValueError, match="exists"):
                table.add_planes(specs)
        if together:
            table.add_planes(new)
        else:
            for name, spec in new.items():
                table.add_plane(name, *spec)
        for name, (width, dtype, value) in new.items():
            planes[name] = torch.full((table.num_rows, width), value, dtype=dtype).numpy()

    @rule(table=tables, name=st.sampled_from(NAMES))
    def drop_plane(self, table, name):
        if name in self.planes(table):
            table.drop_plane(name)
            del self.planes(table)[name]
        else:
            with pytest.raises(ValueError, match="has no plane"):
                table.drop_plane(name)

    # --- rows ---------------------------------------------------------------------------------------------------------

    @rule(table=tables, data=st.data(), form=st.sampled_from(sorted(FORMS)))
    def gather(self, table, data, form):
        planes = self.planes(table)
        names = data.draw(st.lists(st.sampled_from(sorted(planes)), min_size=1, unique=True))
        limit = 40 if table.num_rows else 0
        drawn = data.draw(st.lists(st.integers(0, max(table.num_rows - 1, 0)), max_size=limit))
        index = np.array(drawn, dtype=np.int64)
        rows = table.gather(FORMS[form](index), names)
        assert list(rows) == names
        for name in names:
            assert_same_bits(rows[name], torch.from_numpy(planes[name][index]))

    @precondition(lambda self: any(len(table) for table, _ in self.models.values()))
    @rule(table=tables, data=st.data(), form=st.sampled_from(sorted(FORMS)), seed=st.integers(0, 10**6))
    def scatter(self, table, data, form, seed):
        planes = self.planes(table)
        names = data.draw(st.lists(st.sampled_from(sorted(planes)), min_size=1, unique=True))
        limit = min(table.num_rows, 40)
        drawn = data.draw(st.lists(st.integers(0, max(table.num_rows - 1, 0)), max_size=limit, unique=True))
        index = np.array(drawn, dtype=np.int64)
        widths = {name: (len(index), planes[name].shape[1]) for name in names}
        rows = {name: numbers(shape, table.plane(name).dtype, seed) for name, shape in widths.items()}
        before = table.version
        table.scatter(FORMS[form](index), rows)
        assert table.version > before
        for name in names:
            planes[name][index] = rows[name].numpy()

    @rule(table=tables, name=st.sampled_from(["zero_", "fill_"]), value=st.integers(0, 100))
    def init(self, table, name, value):
        for rows in (table, torch.from_numpy(self.planes(table)["weight"])):
            getattr(rows, name)(*([value] if name == "fill_" else []))

    @invariant()
    def tables_are_the_arrays(self):
        for table, planes in self.models.values():
            assert set(table.planes) == set(planes)
            assert table.planes[0] == "weight"
            for name, array in planes.items():
                assert_same_bits(table.plane(name), torch.from_numpy(array))


KINDS = [*((*memory, "planes") for memory in HOST_MEMORIES), ("pageable", None, "rows"), ("mmap", ".npy", "rows")]


@short_and_long({"max_examples": 8, "stateful_step_count": 30}, {"max_examples": 150, "stateful_step_count": 60})
@pytest.mark.parametrize(("memory", "suffix", "layout"), KINDS)
def test_any_sequence_of_calls(memory, suffix, layout, options):
    name = f"TableIn{memory.title()}{(suffix or '').lstrip('.').title()}{layout.title()}"
    run_machine(type(name, (TableMachine,), {"memory": memory, "suffix": suffix, "layout": layout}), **options)
