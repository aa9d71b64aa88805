"""Any sequence of steps, deltas, merges, growth and eviction gives what full checkpoints say, bit for bit."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as some
import torch
from delta_cases import CASES, World, files_of, known_by_id
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from machines import run_machine, short_and_long

import speedtransfer as st
from speedtransfer.errors import InvalidValueError


class DeltaMachine(RuleBasedStateMachine):
    """A trainer, a copy that follows it, and the files between them."""

    @initialize(name=some.sampled_from(sorted(CASES)), with_state=some.booleans(), steps=some.integers(0, 2))
    def begin(self, name, with_state, steps):
        self.folder = Path(tempfile.mkdtemp())
        self.new = lambda: World(name, with_state, self.folder)
        self.one, self.seed, self.count, self.ids = self.new(), 0, 0, "vocabulary" in name
        self.one.steps(steps, 1)
        self.deltas = list[Path]()
        self.one.save(self.folder / "base")
        self.rows_saved = self.rows_of_base = 10
        self.mark = self.one.mark()
        self.again()

    @rule(steps=some.integers(1, 3), first=some.integers(0, 60))
    def step(self, steps, first):
        self.seed += 1
        self.one.steps(steps, self.seed, first)

    @rule(row=some.integers(0, 9), value=some.floats(-2, 2, width=32))
    def write(self, row, value):
        with torch.no_grad():
            self.one.net.more.weight[row] = value

    @rule(more=some.integers(1, 9))
    def grow(self, more):
        table = self.one.net.more.table
        table.grow(min(table.num_rows + more, 200))

    @precondition(lambda self: self.ids)
    @rule(count=some.integers(1, 9))
    def forget(self, count):
        self.one.forget(slice(count))

    @rule()
    def save(self):
        self.deltas.append(self.folder / f"{self.count:04}.safetensors")
        self.mark = self.one.save_delta(self.deltas[-1], self.mark)
        self.count += 1
        self.one.save(self.folder / f"full{self.count}")
        self.rows_saved = self.one.net.more.num_embeddings
        self.apply(self.deltas[-1])
        assert self.copy.mark().fingerprints == self.mark.fingerprints
        assert self.copy.digest() == self.one.digest()

    def apply(self, path):
        self.known = self.copy.apply(path, self.known if self.seed % 2 else None)

    @rule()
    def again(self):
        """Let another copy follow from the base on: the one before was killed."""
        self.copy, self.known = self.new(), None
        self.copy.net.more.table.grow(self.rows_of_base)
        self.copy.load(self.folder / "base")
        for path in self.deltas:
            self.apply(path)

    @precondition(lambda self: self.deltas)
    @rule(as_base=some.booleans())
    def merge(self, as_base):
        out = self.folder / "merged"
        st.merge(self.folder / "base", self.deltas, out)
        if self.one.by_id:
            # Ids may have other rows.
            merged = self.new()
            merged.net.more.table.grow(self.rows_saved)
            merged.load(out)
            assert merged.mark().fingerprints == self.mark.fingerprints
            assert known_by_id(merged.net) == known_by_id(self.copy.net)
        else:
            assert files_of(out) == files_of(self.folder / f"full{self.count}")
        if as_base:
            shutil.rmtree(self.folder / "base")
            out.rename(self.folder / "base")
            self.deltas, self.rows_of_base = [], self.rows_saved

    @precondition(lambda self: len(self.deltas) > 1 and self.known is not None and not self.ids)
    @rule(at=some.integers(0, 9))
    def leave_one_out(self, at):
        at %= len(self.deltas) - 1
        left = self.deltas[:at] + self.deltas[at + 1 :]
        try:
            st.merge(self.folder / "base", left, self.folder / "none")
        except InvalidValueError:
            assert not (self.folder / "none").exists()
        else:
            # The first one, and it has brought no rows; of others each says what it follows.
            assert at == 0
            shutil.rmtree(self.folder / "none")

    def teardown(self):
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


@short_and_long({"max_examples": 6, "stateful_step_count": 8}, {"max_examples": 200, "stateful_step_count": 20})
def test_any_sequence(options):
    run_machine(DeltaMachine, **options)
