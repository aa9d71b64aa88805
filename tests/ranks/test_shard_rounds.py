"""Lookups in tables of several processes by parts of one tensor of ids: in one exchange, and the numbers of one by one."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import speedtransfer as st
from ranks.pair import told

ROWS, DIM, COLUMNS = 40, 4, 4

KINDS = {
    "lazy": {"idle": "lazy"},
    "exact": {"idle": "exact"},
    "int8": {"idle": "lazy", "storage_dtype": torch.int8, "comm_dtype": torch.int8},
    "cached": {"cache_rows": 5, "memory": "pageable"},
}


class Net(nn.Module):
    """A table for each column, or, as `fused`, a feature of one; `apart` looks up by copies, which nothing is known of."""

    def __init__(self, kind: str, apart: bool, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        options: Any = {"process_group": dist.group.WORLD, **KINDS[kind]}
        if fused:
            self.one: Any = st.MultiEmbedding([ROWS] * COLUMNS, DIM, padding_idx=[None, 1, None, 2], **options)
            self.tables = list(self.one.values())
        else:
            self.tables = nn.ModuleList(
                st.EmbeddingBag(ROWS, DIM, mode="sum", **options)
                if number == 2
                else st.Embedding(ROWS, DIM, padding_idx=number or None, **options)
                for number in range(COLUMNS)
            )
        self.copied, self.bags = {*range(COLUMNS)} if apart else set(), () if fused else (2,)
        self.opt = torch.optim.AdamW(self.parameters(), lr=0.05)
        self.handle = self.tables[0]._handle

    def look_up(self, number: int, ids: torch.Tensor, column: int) -> torch.Tensor:
        some = ids[:, column : column + 1] if number in self.bags else ids[:, column]
        return self.tables[number](some.clone() if number in self.copied else some)

    def forward(self, ids: torch.Tensor, numbers: Any = range(COLUMNS)) -> torch.Tensor:
        return sum(self.look_up(number, ids, number).sin().sum() for number in numbers)

    def train_on(self, ids: torch.Tensor, numbers: Any = range(COLUMNS)) -> int:
        """Make a step, and return how many messages it took."""
        traffic = self.handle.owners.exchange.traffic
        before = traffic.calls
        self.opt.zero_grad()
        self(ids, numbers).backward()
        self.opt.step()
        return traffic.calls - before

    def rows(self) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([table(torch.arange(ROWS)[:, None]).view(ROWS, DIM) for table in self.tables])


def batch(step: int, size: int = 6) -> torch.Tensor:
    return torch.randint(
        0, ROWS, (size, COLUMNS), generator=torch.Generator().manual_seed(100 * step + dist.get_rank())
    )


def calls_of_steps() -> list[list[int]]:
    """How many messages the steps after the first take, of all forms; `Programs` compares rows."""
    nets = [Net(kind, apart, fused) for kind in KINDS for fused in (False, True) for apart in (False, True)]
    return [[net.train_on(batch(step)) for step in range(4)][1:] for net in nets]


def test_fewer_messages(two):
    # How many ids, ids, rows; who has gradients, and these.
    assert two(calls_of_steps) == [[[5] * 3, [3 * COLUMNS + 2] * 3] * 2 * len(KINDS)] * 2


# --- what people do between lookups ---------------------------------------------------------------------------------------


class Programs:
    """Random programs, the same in all processes, of both nets; what differs between processes is the ids."""

    def __init__(self, seed: int) -> None:
        self.random, self.mine = random.Random(seed), random.Random(seed * 10 + dist.get_rank())
        kind, fused = self.random.choice([*KINDS]), self.random.random() < 0.5
        self.nets = [Net(kind, apart, fused) for apart in (False, True)]
        self.step = 0

    def run(self, length: int) -> None:
        for _ in range(length):
            self.step += 1
            others = [self.evaluate, self.write, self.between, self.again, self.beyond]
            self.random.choice([*[self.train] * 3, *others])()
        assert torch.equal(self.nets[0].rows(), self.nets[1].rows())

    def ids(self) -> torch.Tensor:
        # One process may have a single sample, or none.
        ids = batch(self.step, self.mine.choice([1, 0, 2, 6]) if self.random.random() < 0.4 else 6)
        # Or they lie otherwise in its memory.
        return ids.t().contiguous().t() if self.mine.random() < 0.2 else ids

    def numbers(self) -> list[int]:
        numbers = list(range(COLUMNS))
        if self.random.random() < 0.3:
            self.random.shuffle(numbers)
        return numbers[: self.random.choice([COLUMNS, COLUMNS, 2])]

    def train(self) -> None:
        ids, numbers = self.ids(), self.numbers()
        for net in self.nets:
            net.train_on(ids, numbers)

    def evaluate(self) -> None:
        ids, mode = self.ids(), self.random.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        with mode():
            one, two = (net(ids) for net in self.nets)
        assert torch.equal(one, two)

    def write(self) -> None:
        """The weights change between two lookups, or a step comes between."""
        ids, number, how = self.ids(), self.random.randrange(1, COLUMNS), self.random.choice(["data", "step"])
        found = []
        for net in self.nets:
            before = net.look_up(0, ids, 0).sum()
            if how == "data":
                net.tables[0].weight.data.mul_(0.5)
                net.tables[number].weight.data.mul_(0.5)
            else:
                before.backward()
                net.opt.step()
            found.append(net.look_up(number, ids, number).detach())
        assert torch.equal(*found)

    def between(self) -> None:
        """The ids change between two lookups, in all processes, or are others, in one."""
        ids, how = batch(self.step, self.mine.choice([1, 6])), self.random.choice(["torch", "numpy", "others"])
        found = []
        for net in self.nets:
            mine = ids.clone()
            first = net.look_up(0, mine, 0)
            if how == "torch":
                # Which changes the values of one process alone.
                mine.clamp_(max=(ROWS, 3)[dist.get_rank()])
            elif how == "numpy":
                # Which torch does not see.
                mine.numpy().fill(3)
            else:
                mine = mine.clone().fill_(3) if dist.get_rank() else mine.clone()
            found.append(first.sum() + net.look_up(1, mine, 1).sum())
            found[-1].backward()
            net.opt.step()
        assert torch.equal(*found)

    def again(self) -> None:
        """Lookups are made a second time in backward."""
        ids, reentrant = self.ids(), self.random.random() < 0.5
        for net in self.nets:
            net.opt.zero_grad()
            scale = torch.ones(1, requires_grad=True)
            checkpoint(lambda scale, net=net: net(ids) * scale, scale, use_reentrant=reentrant).sum().backward()
            net.opt.step()

    def beyond(self) -> None:
        """An id that there is not, in a column after the first: the error comes where it is looked up."""
        ids = batch(self.step)
        ids[1, 2] = ROWS
        for net in self.nets:
            first = net.look_up(0, ids, 0)
            net.look_up(1, ids, 1)
            assert "RowIndexError" in told(lambda net=net: net.look_up(2, ids, 2)), self.step
            first.sum().backward()
            net.opt.step()


def run_programs(seeds: Iterable[int], length: int) -> None:
    for seed in seeds:
        Programs(seed).run(length)


def test_some_programs(two):
    two(run_programs, range(2), 14)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3, 57, 6))
def test_programs(two, first):
    two(run_programs, range(first, first + 6), 14, limit=300, timeout=120)


def look_up_on_one_rank() -> str:
    net = Net("lazy", False)
    for step in range(2):
        net.train_on(batch(step))
    loss = net(batch(2)) + net(batch(3), range(COLUMNS - dist.get_rank()))
    return told(loss.backward)


def test_rows_that_one_process_does_not_take_are_an_error(two):
    for said in two(look_up_on_one_rank):
        assert said.startswith("DifferenceError: the processes differ where one brings gradients")
        assert re.search("3.weight after 2 steps, .* and 4 lookups", said)
        assert re.search("3.weight after 2 steps, .* and 3 lookups", said)


# --- models whose forward asks for all tables when it begins --------------------------------------------------------------


class Model(nn.Module):
    """Tables of two widths, which `batch` has ids for by name, and `rest` as rows; one is looked up by other ids."""

    def __init__(self, apart: bool, kind: str = "lazy") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tables = nn.ModuleDict({name: nn.Embedding(ROWS, 2 + number % 2) for number, name in enumerate("abcdef")})
        st.replace_embeddings(self, min_rows=0, process_group=dist.group.WORLD, **KINDS[kind])
        self.apart = apart
        if apart:
            self._forward_pre_hooks.clear()
        self.opt = torch.optim.AdamW(self.parameters(), lr=0.05)
        self.between: Any = None

    def forward(self, batch: dict[str, torch.Tensor], rest: torch.Tensor, order: str = "abcdef") -> torch.Tensor:
        total = torch.zeros(())
        for number, name in enumerate(order):
            ids = rest["ef".index(name)] if name in "ef" else batch[name]
            if name == "d":
                ids = (ids + 1) % ROWS
            total = total + self.tables[name](ids.clone() if self.apart else ids).sin().sum()
            if number == 1 and self.between is not None:
                self.between(self)
        return total


def model_batch(step: int, size: int = 6) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    batch = {name: torch.randint(0, ROWS, (size, 1 + number), generator=draw) for number, name in enumerate("abcd")}
    return batch, torch.randint(0, ROWS, (2, size), generator=draw)


def train_model(model: Model, *args: Any, **options: Any) -> int:
    traffic = model.tables["a"]._handle.owners.exchange.traffic
    before = traffic.calls
    model.opt.zero_grad()
    model(*args, **options).backward()
    model.opt.step()
    return traffic.calls - before


def same_rows(models: list[Model]) -> bool:
    with torch.no_grad():
        found = [[table(torch.arange(ROWS)) for table in model.tables.values()] for model in models]
    return all(map(torch.equal, *found))


def calls_of_model() -> list[list[int]]:
    models = [Model(apart) for apart in (False, True)]
    return [[train_model(model, *model_batch(step)) for step in range(3)][1:] for model in models]


def test_a_model_asks_for_all_that_its_arguments_have(two):
    # How many ids, ids, rows; d by itself; who has gradients, and these.
    assert two(calls_of_model) == [[[8, 8], [20, 20]]] * 2


def write_between(model: Model) -> None:
    model.tables["c"].weight.data.mul_(0.5)


def step_between(model: Model) -> None:
    model.tables["a"](torch.arange(3)).sum().backward()
    model.opt.step()


def run_models(seeds: Iterable[int], length: int) -> None:
    for seed in seeds:
        rng, mine = random.Random(seed), random.Random(seed * 10 + dist.get_rank())
        kind = rng.choice([*KINDS])
        models = [Model(apart, kind) for apart in (False, True)]
        for step in range(length):
            size = mine.choice([0, 1, 3]) if rng.random() < 0.3 else 6
            order = rng.choice(["abcdef", "abcdef", "abcdef", "fedcba", "dabc", "ab", "abcadef", "aabb", "d"])
            between = rng.choice([None, None, None, write_between, step_between])
            evaluates, beyond, hollow, one = *(rng.random() < part for part in (0.2, 0.1, 0.2)), rng.randrange(2)
            said = []
            for model in models:
                given = model_batch(step, size)
                if beyond and dist.get_rank() == one:
                    given[0]["b"] = torch.full((2, 2), ROWS)
                if hollow and dist.get_rank() == one:
                    given[0]["c"] = given[0]["c"][:0]
                model.between = None if evaluates and between is step_between else between
                with torch.set_grad_enabled(not evaluates):
                    use = model if evaluates else functools.partial(train_model, model)
                    said.append(told(functools.partial(use, *given, order=order)))
            assert said[0] == said[1]
            assert ("RowIndexError" in said[0] or "refused" in said[0]) == (beyond and "b" in order), said
        assert same_rows(models)


def test_some_models(two):
    two(run_models, range(1), 14)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2, 62, 6))
def test_models(two, first):
    two(run_models, range(first, first + 6), 14)
