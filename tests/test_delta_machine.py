"""Any sequence of steps, deltas, merges, growth and eviction gives what full checkpoints say, bit for bit."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as some
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from machines import run_machine
from test_merge import CASES, World, files_of, known_by_id

import speedtransfer as st
from speedtransfer.errors import InvalidValueError


class DeltaMachine(RuleBasedStateMachine):
    """A trainer, a copy that follows it, and the files between them: of the second kind without state."""

    names = tuple(CASES)

    @initialize(number=some.integers(0, 10**6), with_state=some.booleans(), steps=some.integers(0, 2))
    def begin(self, number: int, with_state: bool, steps: int) -> None:
        self.folder, self.name, self.with_state = (
            Path(tempfile.mkdtemp()),
            self.names[number % len(self.names)],
            with_state,
        )
        self.one, self.seed, self.count = World(self.name), 0, 0
        self.one.steps(steps, 1)
        self.deltas = list[Path]()
        self.full("base")
        self.rows_saved = self.rows_of_base = 10
        self.mark = st.mark(self.one.net, self.one.opt if with_state else None)
        self.again()

    def full(self, name: str) -> None:
        if self.with_state:
            self.one.save(self.folder / name)
        else:
            st.save_checkpoint(self.folder / name, self.one.net)

    def load(self, world: World, name: str) -> None:
        if self.rows_of_base > 10:
            world.net.more.table.grow(self.rows_of_base)
        if self.with_state:
            world.load(self.folder / name)
        else:
            st.load_checkpoint(self.folder / name, world.net)

    def apply(self, path: Path) -> None:
        known = self.known if self.seed % 2 else None
        if self.with_state:
            self.known = self.copy.apply(path, known)
        else:
            self.known = st.apply_delta(path, self.copy.net, known)

    @rule(steps=some.integers(1, 3), first=some.integers(0, 60))
    def step(self, steps: int, first: int) -> None:
        self.seed += 1
        self.one.steps(steps, self.seed, first)

    @rule(row=some.integers(0, 9), value=some.floats(-2, 2, width=32))
    def write(self, row: int, value: float) -> None:
        with torch.no_grad():
            self.one.net.more.weight[row] = value

    @rule(more=some.integers(1, 9))
    def grow(self, more: int) -> None:
        table = self.one.net.more.table
        table.grow(min(table.num_rows + more, 200))

    @precondition(lambda self: "vocabulary" in self.name)
    @rule(count=some.integers(1, 9))
    def forget(self, count: int) -> None:
        vocabulary = self.one.net.emb.vocabulary
        self.one.opt.zero_grad()
        vocabulary.forget(vocabulary.ids()[:count])

    @rule()
    def save(self) -> None:
        path = self.folder / f"{self.count:04}.safetensors"
        if self.with_state:
            self.mark = self.one.save_delta(path, self.mark)
        else:
            self.mark = st.save_delta(path, self.one.net, self.mark)
        self.count += 1
        self.deltas.append(path)
        self.full(f"full{self.count}")
        self.rows_saved = self.one.net.more.num_embeddings
        self.apply(path)
        self.check(self.copy)

    def check(self, copy: Any) -> None:
        with_state = self.with_state
        assert st.mark(copy.net, copy.opt if with_state else None).fingerprints == self.mark.fingerprints
        assert not with_state or copy.digest() == self.one.digest()

    @rule()
    def again(self) -> None:
        """Let another copy follow from the base on: the one before was killed."""
        self.copy, self.known = World(self.name), None
        self.load(self.copy, "base")
        for path in self.deltas:
            self.apply(path)

    @precondition(lambda self: self.deltas)
    @rule(as_base=some.booleans())
    def merge(self, as_base: bool) -> None:
        out = self.folder / "merged"
        st.merge(self.folder / "base", self.deltas, out)
        if "vocabulary" in self.name and not self.with_state:
            # Ids may have other rows.
            merged = World(self.name)
            merged.net.more.table.grow(self.rows_saved)
            st.load_checkpoint(out, merged.net)
            assert st.mark(merged.net).fingerprints == self.mark.fingerprints
            assert known_by_id(merged.net) == known_by_id(self.copy.net)
        else:
            assert files_of(out) == files_of(self.folder / f"full{self.count}")
        if as_base:
            shutil.rmtree(self.folder / "base")
            out.rename(self.folder / "base")
            self.deltas, self.rows_of_base = [], self.rows_saved

    @precondition(lambda self: len(self.deltas) > 1)
    @rule(at=some.integers(0, 9))
    def leave_one_out(self, at: int) -> None:
        at %= len(self.deltas) - 1
        left = self.deltas[:at] + self.deltas[at + 1 :]
        if self.known is None or "vocabulary" in self.name:
            return
        try:
            st.merge(self.folder / "base", left, self.folder / "none")
        except InvalidValueError:
            assert not (self.folder / "none").exists()
        else:
            # The first one, and it has brought no rows; of others each says what it follows.
            assert at == 0
            shutil.rmtree(self.folder / "none")

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


def test_any_sequence() -> None:
    run_machine(DeltaMachine, max_examples=6, stateful_step_count=8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_long_sequence() -> None:
    run_machine(DeltaMachine, max_examples=200, stateful_step_count=20, derandomize=False)
