"""Processes that do not do the same are told so, by name and in all, and never hang for longer than the group's timeout."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from interrupt import Interrupt
from torch import nn

import speedtransfer as st
from ranks.pair import DIM, ids, table, told, wrap
from ranks.run import DeadRankError
from ranks.test_uses import Raising

STEPS, ODD = 5, 2


class Tables(nn.Module):
    """One table or two, of which a batch may lack one."""

    def __init__(self, kind, count):
        super().__init__()
        self.tables = nn.ModuleList(table(kind) for _ in range(count))
        self.out = nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, ids, count=2):
        return self.out(sum(emb(ids) for emb in self.tables[:count])).square().sum()


class Run:
    """Tables in training; under DistributedDataParallel if `wrapped`."""

    def __init__(self, kind, wrapped, optimizer=torch.optim.AdamW, rate=0.05):
        self.net, wraps = Tables(kind, 1 + wrapped), wrapped or kind == "replicas"
        self.emb = self.net.tables[0]
        self.model = wrap(self.net, find_unused_parameters=wrapped) if wraps else self.net
        self.opt = optimizer(self.net.parameters() if wraps else self.emb.parameters(), lr=rate)

    def step(self, number, leaves=""):
        def reach(place):
            if leaves == f"killed at {place}":
                # When the other one has made its steps.
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)

        if leaves != "zero_grad":
            self.opt.zero_grad()
        reach("lookup")
        loss = self.model(ids(number), 1 if leaves == "a lookup" else 2)
        reach("backward")
        if leaves == "backward that raises":
            assert "no gradient" in told(Raising.apply(loss).backward)
        elif leaves not in ("backward", "all"):
            loss.backward()
        reach("step")
        if leaves not in ("step", "all", "backward that raises"):
            self.opt.step()

    def steps(self, *numbers):
        for number in numbers:
            self.step(number)


def at_odds(kind, wrapped, what, folder):
    """Train; in the third step rank 1 does something else, leaves something out, is interrupted or killed."""
    optimizer = torch.optim.Adam if what == "optimizer" and dist.get_rank() else torch.optim.AdamW
    run = Run(kind, wrapped, optimizer, torch.tensor(0.1) if what == "rate in a tensor" else 0.1)
    run.steps(*range(ODD))
    if dist.get_rank() == 0:
        run.step(ODD)
    elif what.startswith("interrupted"):
        assert Interrupt(4, within="_enter").during(lambda: run.step(ODD))
    elif what != "lookup":
        if what == "rate":
            run.opt.param_groups[0]["lr"] = 0.2
        if what == "rate in a tensor":
            run.opt.param_groups[0]["lr"].fill_(0.2)
        if what == "one lookup more":
            run.emb(ids(ODD))
        run.emb.weight.requires_grad_(what != "frozen")
        run.step(ODD, what)
    if what.endswith("then saves"):
        st.save_checkpoint(folder, run.emb, run.opt)
    run.steps(*range(ODD + 1, STEPS))


# Kinds of tables, whether two of them are wrapped, what one process does, and what all say.
TOLD = r"""
sharded | one lookup more | out of step|differ where one looks up
sharded | frozen | without gradients
sharded | backward that raises | out of step: rank 0: brings gradients .* rank 1: looks up rows
shared | backward that raises | 1 failed backwards
shared | frozen | out of step|differ
shared | step | out of step
sharded replicas | step | after 3 steps.* after 2 steps
sharded shared replicas | zero_grad | with a gradient
sharded shared replicas | rate | 'lr': 0.1,.*'lr': 0.2,
sharded shared replicas | rate in a tensor | 'lr': 0.1.*'lr': 0.2
sharded shared replicas | optimizer | by AdamW .* by Adam\x20
sharded shared replicas | interrupted | the processes are out of step: |after 3 steps
sharded | interrupted, then saves | the processes are out of step: |after 3 steps
sharded | killed at lookup | ^rank 0 of 2, process \d+ on \S+, could not reach the others where it looks up rows \(
sharded | killed at step | could not reach the others where it looks up rows
shared | killed at backward | could not reach the others where it brings gradients
wrapped sharded | a lookup | out of step
wrapped sharded shared replicas | backward | out of step
wrapped sharded shared replicas | step | .
wrapped sharded | all | .
"""
CASES = [
    (kind, kinds.startswith("wrapped"), what, words)
    for kinds, what, words in (line.split(" | ") for line in TOLD.strip().split("\n"))
    for kind in kinds.removeprefix("wrapped ").split()
]


@pytest.mark.sweep("wrapped", "what", strength=2)
@pytest.mark.parametrize(
    ("kind", "wrapped", "what", "words"), [pytest.param(*case, id="-".join(map(str, case[:3]))) for case in CASES]
)
def test_told_in_all(two, kind, wrapped, what, words, tmp_path):
    begin = time.monotonic()
    found = two.fails(at_odds, kind, wrapped, what, tmp_path, timeout=60, limit=50, fresh=False)
    # None of them waits for the time limit of the group, also beside the messages of DistributedDataParallel.
    assert time.monotonic() - begin < 40
    if what.startswith("killed"):
        assert isinstance(found[1], DeadRankError)
        assert re.search(words, str(found[0])), found
        return
    for each in found:
        assert type(each).__name__ in ("ProcessGroupError", "DifferenceError"), found
        assert re.search(words, str(each)), each
        assert wrapped or re.search(r"; (give all the same|each must make the same)", str(each)), each
        assert re.search("rank 0(.|\n)*rank 1", str(each))


def test_who_goes_on_alone_waits_no_longer_than_the_group_does(two, tmp_path):
    found = two.fails(at_odds, "sharded", False, "lookup", tmp_path, timeout=2, limit=30, fresh=False)
    assert any("Error" in type(each).__name__ for each in found)
