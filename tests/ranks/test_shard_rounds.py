"""Lookups of several tables of several processes in one exchange: the numbers of lookups that are made one by one.

By parts of one tensor of ids, or by what the arguments of a model's forward have.
"""

import functools
import itertools
import random
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import speedtransfer as st
from ranks.pair import told
from ranks.run import on

ROWS, DIM, COLUMNS = 40, 4, 4

KINDS = {
    "lazy": {"idle": "lazy"},
    "exact": {"idle": "exact"},
    "int8": {"idle": "lazy", "storage_dtype": torch.int8, "comm_dtype": torch.int8},
    "cached": {"cache_rows": 5, "memory": "pageable"},
}
# A table for each column; a feature for each, of one table; tables that the forward of the model asks for when it begins.
FORMS = ("tables", "fused", "asked")


class Net(nn.Module):
    """Tables of a form; `apart` looks up by copies, which nothing is known of."""

    def __init__(self, kind, apart, form="tables"):
        super().__init__()
        torch.manual_seed(1)
        self.apart, self.form = apart, form
        options = {"process_group": dist.group.WORLD, **KINDS[kind]}
        if form == "fused":
            self.one = st.MultiEmbedding([ROWS] * COLUMNS, DIM, padding_idx=[None, 1, None, 2], **options)
            self.tables = list(self.one.values())
        elif form == "asked":
            self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM + number % 2) for number in range(COLUMNS))
            st.replace_embeddings(self, min_rows=0, **options)
            if apart:
                self._forward_pre_hooks.clear()
        else:
            self.tables = nn.ModuleList(
                st.EmbeddingBag(ROWS, DIM, mode="sum", **options)
                if number == 2
                else st.Embedding(ROWS, DIM, padding_idx=number or None, **options)
                for number in range(COLUMNS)
            )
        self.opt = torch.optim.AdamW(self.parameters(), lr=0.05)
        self.handle = self.tables[0]._handle

    def arguments(self, ids):
        """What the forward takes: `ids`, or those of two columns by name, and all others as rows."""
        named = {"a": ids[:, 0].clone(), "b": ids[:, 1:2].clone(), "c": ids.to_sparse()}
        return (ids,) if self.form != "asked" else (named, [ids.t() + 0])

    def look_up(self, number, *args):
        if self.form == "asked":
            named, (rest,) = args
            # The last ones are computed, so that nobody knows of them.
            ids = named["ab"[number]] if number < 2 else rest[2] if number == 2 else (rest[3] + 1) % ROWS
        else:
            ids = args[0][:, 2:3] if self.form == "tables" and number == 2 else args[0][:, number]
        return self.tables[number](ids.clone() if self.apart else ids)

    def forward(self, *args, numbers=range(COLUMNS), between=None):
        total = torch.zeros(())
        for place, number in enumerate(numbers):
            total = total + self.look_up(number, *args).sin().sum()
            if place == 1 and between is not None:
                between(self)
        return total

    def train_on(self, *args, **how):
        """Make a step, and return how many messages it took."""
        traffic = self.handle.owners.exchange.traffic
        before = traffic.calls
        self.opt.zero_grad()
        self(*args, **how).backward()
        self.opt.step()
        return traffic.calls - before

    def rows(self):
        with torch.no_grad():
            return torch.cat([table(torch.arange(ROWS)[:, None]).flatten() for table in self.tables])


def batch(step, size=6):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, ROWS, (size, COLUMNS), generator=generator)


@on(2)
def test_fewer_messages():
    """Of the steps after the first, in all forms; `Programs` compares rows."""
    for kind, form, apart in itertools.product(KINDS, FORMS, (False, True)):
        net = Net(kind, apart, form)
        # How many ids, ids, rows; who has gradients, and these. One table that is asked by computed ids asks by itself.
        wanted = 3 * COLUMNS + 2 if apart else 8 if form == "asked" else 5
        assert [net.train_on(*net.arguments(batch(step))) for step in range(4)][1:] == [wanted] * 3


# --- what people do between lookups ---------------------------------------------------------------------------------------


def write_between(net):
    net.tables[0].weight.data.mul_(0.5)
    net.tables[2].weight.data.mul_(0.5)


def step_between(net):
    net.tables[0](torch.arange(3)[:, None]).sum().backward()
    net.opt.step()


class Programs:
    """Random programs, the same in all processes, of both nets; what differs between processes is the ids."""

    def __init__(self, seed):
        self.random, self.mine = random.Random(seed), random.Random(seed * 10 + dist.get_rank())
        kind, self.form = self.random.choice([*KINDS]), FORMS[seed % len(FORMS)]
        self.nets = [Net(kind, apart, self.form) for apart in (False, True)]
        self.step = 0

    def run(self, length):
        for _ in range(length):
            self.step += 1
            self.random.choice([*[self.train] * 5, self.evaluate, self.between, self.again, self.beyond])()
        assert torch.equal(self.nets[0].rows(), self.nets[1].rows())

    def ids(self):
        # One process may have a single sample, or none.
        ids = batch(self.step, self.mine.choice([1, 0, 2, 6]) if self.random.random() < 0.4 else 6)
        # Or they lie otherwise in its memory.
        return ids.t().contiguous().t() if self.mine.random() < 0.2 else ids

    def numbers(self):
        numbers = list(range(COLUMNS))
        if self.random.random() < 0.3:
            self.random.shuffle(numbers)
        return self.random.choice([numbers, numbers, numbers, numbers[:2], [0, 0, 1, 1], [3]])

    def train(self):
        """Weights change between two lookups, or a step comes between; or one process has an id that there is not."""
        ids, numbers = self.ids(), self.numbers()
        between = self.random.choice([None, None, None, write_between, step_between])
        wrong, odd, said = self.random.random() < 0.1, self.random.randrange(2), []
        if (wrong := wrong and self.form == "asked" and numbers != [3]) and dist.get_rank() == odd:
            ids = torch.cat([ids, torch.full((1, COLUMNS), ROWS)])
        for net in self.nets:
            said.append(told(lambda net=net: net.train_on(*net.arguments(ids), numbers=numbers, between=between)))
        assert said[0] == said[1], said
        assert ("RowIndexError" in said[0] or "refused" in said[0]) == wrong, said

    def evaluate(self):
        ids, mode = self.ids(), self.random.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        between = self.random.choice([None, write_between])
        with mode():
            one, two = (net(*net.arguments(ids), between=between) for net in self.nets)
        assert torch.equal(one, two)

    def between(self):
        """The ids change between two lookups, in all processes, or are others, in one."""
        ids, how = batch(self.step, self.mine.choice([1, 6])), self.random.choice(["torch", "numpy", "others"])
        found = []
        for net in self.nets:
            mine = ids.clone()
            first = net.look_up(0, *net.arguments(mine))
            if how == "torch":
                # Which changes the values of one process alone.
                mine.clamp_(max=(ROWS, 3)[dist.get_rank()])
            elif how == "numpy":
                # Which torch does not see.
                mine.numpy().fill(3)
            else:
                mine = mine.clone().fill_(3) if dist.get_rank() else mine.clone()
            found.append(first.sum() + net.look_up(1, *net.arguments(mine)).sum())
            found[-1].backward()
            net.opt.step()
        assert torch.equal(*found)

    def again(self):
        """Lookups are made a second time in backward."""
        ids, reentrant = self.ids(), self.random.random() < 0.5
        for net in self.nets:
            net.opt.zero_grad()
            scale, given = torch.ones(1, requires_grad=True), net.arguments(ids)
            part = functools.partial(lambda net, given, scale: net(*given) * scale, net, given)
            checkpoint(part, scale, use_reentrant=reentrant).sum().backward()
            net.opt.step()

    def beyond(self):
        """An id that there is not, in a column after the first: the error comes where it is looked up."""
        ids = batch(self.step)
        ids[1, 2] = ROWS
        for net in self.nets:
            given = net.arguments(ids)
            first = net.look_up(0, *given)
            net.look_up(1, *given)
            assert "RowIndexError" in told(lambda net=net, given=given: net.look_up(2, *given)), self.step
            first.sum().backward()
            net.opt.step()


MANY = [pytest.param(range(first, first + 6), marks=pytest.mark.slow) for first in range(3, 117, 6)]


@pytest.mark.parametrize("seeds", [range(3), *MANY])
@on(2, limit=300, timeout=120)
def test_programs(seeds):
    for seed in seeds:
        Programs(seed).run(14)


@on(2)
def test_rows_that_one_process_does_not_take_are_an_error():
    net = Net("lazy", False)
    for step in range(2):
        net.train_on(batch(step))
    loss = net(batch(2)) + net(batch(3), numbers=range(COLUMNS - dist.get_rank()))
    said = told(loss.backward)
    assert said.startswith("DifferenceError: the processes differ where one brings gradients")
    assert re.search("3.weight after 2 steps, .* and 4 lookups", said)
    assert re.search("3.weight after 2 steps, .* and 3 lookups", said)
