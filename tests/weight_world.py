"""Runs the cases of weight_cases.py: the same model on ``torch.nn`` and on ours, and all that can be seen of it after."""

import ast
import copy
import dataclasses
import functools
import io
import linecache
import operator
import pickle
import warnings
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import speedtransfer
from speedtransfer.optim import Handle

ROWS, ITEMS, DIM = 40, 30, 6


class LinearHead(torch.autograd.Function):
    """As fused linear cross-entropies are: given the weight itself, which no function of torch then sees."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ hidden


LIBRARIES = {"copy": copy, "io": io, "operator": operator, "pickle": pickle, "np": np, "torch": torch, "nn": nn, "F": F}
LIBRARIES |= {"checkpoint": checkpoint, "LinearHead": LinearHead}


class Model(nn.Module):
    """Two embeddings and a parameter."""

    def __init__(self, embedding):
        super().__init__()
        self.emb = embedding(ROWS, DIM)
        self.items = embedding(ITEMS, DIM)
        self.query = nn.Parameter(torch.randn(3, DIM))


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where the embeddings of a world come from, how they are made, and which optimizer trains them.

    `module` are arguments that torch.nn has too, `table` those of ours. `copies`: as where no tensor can be over the memory of
    the table, on CUDA. Idle rows that are lazy equal dense ones under Adagrad and SGD: a gradient of zero changes neither rows
    nor state.
    """

    name: str
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    module: dict[str, Any] = dataclasses.field(default_factory=dict)
    table: dict[str, Any] = dataclasses.field(default_factory=dict)
    copies: bool = False

    def __str__(self):
        return self.name

    def model(self, make, ours):
        """Return a model: of torch.nn, of our modules, or of torch.nn with the embeddings replaced."""
        replaces = "replaced" in self.name
        if ours and not replaces:
            return make(functools.partial(speedtransfer.Embedding, **self.module, **self.table))
        model = make(functools.partial(nn.Embedding, **self.module))
        if ours:
            speedtransfer.replace_embeddings(model, min_rows=0, **self.table)
        return model

    def hidden(self):
        """Hide the memory of tables from tensors, where they are to have copies."""
        hides = mock.patch.object(Handle, "aliased", mock.PropertyMock(return_value=False))
        return hides if self.copies else nullcontext()


ADAMW = (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1})
EXACT, REPLACED = Setting("exact", *ADAMW), Setting("replaced", *ADAMW)
LAZY = Setting("lazy", torch.optim.Adagrad, {"lr": 0.1}, table={"idle": "lazy"})
COPIES = Setting("copies", *ADAMW, copies=True)


@contextmanager
def defaults(dtype):
    """One seed and one dtype, for a model and for the case; put back at the end."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


class World:
    """The names that cases use, and what is to be seen after one.

    Parameters
    ----------
    setting : Setting
    ours : bool
        Whether the modules are ours, or those of torch.nn.
    dtype : torch.dtype
        Of everything.
    moment : {"fresh", "trained", "between"}
        When cases run: before the first step, after some steps, or after these and a backward. One world serves one case after
        another as long as these leave the modules and the optimizer in place.
    """

    def __init__(self, setting, ours, dtype, moment):
        self.dtype, self.device, self.moment = dtype, setting.table.get("device", "cpu"), moment
        self.seen = []
        with defaults(dtype):
            model, modules = setting.model(Model, ours).to(self.device), speedtransfer if ours else nn
            draw = torch.Generator().manual_seed(5)
            self.target = torch.randn(2, 4, DIM, generator=draw).to(self.device)
            given = {
                "ids": torch.tensor([[1, 7, 7, 12], [0, 39, 7, 3]]),
                "index": torch.tensor([3, 12, 3, 30]),
                "offsets": torch.tensor([0, 3, 5]),
                "mask": torch.arange(ROWS) % 3 == 0,
                "rows": torch.randn(4, DIM, generator=draw),
                "full": torch.randn(ROWS, DIM, generator=draw),
                "bias": torch.randn(ROWS, generator=draw),
            }
            self.names = {
                **LIBRARIES,
                **{name: value.to(self.device) for name, value in given.items()},
                "make_opt": lambda params: setting.optimizer(params, **copy.deepcopy(setting.options)),
            }
            self.names |= {"Embedding": modules.Embedding, "EmbeddingBag": modules.EmbeddingBag, "model": model}
            self.names |= {"emb": model.emb, "items": model.items, "query": model.query}
            self.names |= {"step": self.step, "loss": self.loss, "opt": self.names["make_opt"](model.parameters())}
            self._names, self._values = dict(self.names), copy.deepcopy(model.state_dict())
            if moment != "fresh":
                for shift in (0, 20, 5):
                    self.step(shift)

    def loss(self, shift=0):
        """Return a loss of eight rows of each embedding, different ones for another `shift`, and of `query`."""
        emb, items, query, ids = (self.names[name] for name in ("emb", "items", "query", "ids"))
        rows = emb((ids + shift) % ROWS)
        others = items((ids * 3 + shift) % ITEMS)
        return (rows.sin() * self.target).sum() + (rows * others).mean() + query.square().sum()

    def step(self, shift=0):
        opt = self.names["opt"]
        opt.zero_grad()
        value = self.loss(shift)
        value.backward()
        opt.step()
        self.seen.append(("loss", value.detach().clone()))

    def reset(self):
        """Give every parameter its first value; the optimizer goes on."""
        self.names = dict(self._names)
        self.names["opt"].zero_grad()
        self.names["model"].load_state_dict(self._values)

    def run(self, case, grad, steps):
        """Run `case`, with or without gradients, then train on for some steps, and return what is seen."""
        self.seen = []
        with defaults(self.dtype), torch.device(self.device):
            for number, part in enumerate(case.parts):
                if number:
                    self.reset()
                self._run(case.id, part, grad, steps)
            for shift in range(1, steps):
                self.step(3 * shift)
            self.see("at the end")
        return self.seen

    def _run(self, name, code, grad, steps):
        torch.manual_seed(17)
        self.see("before")
        if self.moment == "between":
            self.loss(9).backward()
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = run_code(name, code, self.names)
            # Of a view of a leaf torch says that it wants gradients even where it was made without any.
            self.seen.append((f"result of {code}", snapshot(result, grad)))
        self.see("after the case")
        self.use(result)
        if steps:
            self.names["opt"].step()
            self.names["opt"].zero_grad()
            self.see("after the next step")

    def use(self, result):
        """Go back from all results that want gradients and, where there is no gradient yet, from rows that are looked up."""
        wanting = [it for it in tensors(result) if it.requires_grad and it.is_floating_point()]
        used = sum((it * torch.linspace(-1, 1, it.numel(), device=it.device).view(it.shape)).sum() for it in wanting)
        if self.moment != "between":
            self.names["opt"].zero_grad()
            used = used + self.loss(2)
        if isinstance(used, Tensor):
            used.backward()
        for name, param in self.names["model"].named_parameters():
            self.seen.append((f"gradient of {name}", snapshot(param.grad)))

    def see(self, when):
        """Note all values of the model, and of the optimizer's state, wherever they are."""
        for name, value in self.names["model"].state_dict().items():
            self.seen.append((f"{name} {when}", value.detach().cpu().clone()))
        for number, state in self.names["opt"].state_dict()["state"].items():
            for name, value in state.items():
                there = value.cpu() if isinstance(value, Tensor) else value
                self.seen.append((f"state {number}.{name} {when}", snapshot(there)))


def run_code(name, code, names):
    """Run `code` and return the value of its last line, or None where that is a statement."""
    file = f"<{name}>"
    linecache.cache[file] = (len(code), None, [line + "\n" for line in code.splitlines()], file)
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), file, "eval"), names)


def tensors(value):
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [it for part in value for it in tensors(part)] if isinstance(value, list | tuple) else []


def snapshot(value, grad=False):
    """Return a copy of a nested value as it is now; with `grad` tensors want gradients where they did."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(grad and value.requires_grad)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: snapshot(part, grad) for key, part in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [snapshot(part, grad) for part in value]
    return type(value) if isinstance(value, nn.Module) else value


def assert_equal(ours, expected, tolerance, what):
    """Compare two nested values: kinds, shapes, dtypes, what wants gradients, and numbers."""
    assert type(ours) is type(expected) or isinstance(ours, Tensor), f"{what}: {type(ours)} and not {type(expected)}"
    if isinstance(expected, Tensor):
        assert ours.requires_grad == expected.requires_grad, f"{what}: requires_grad is {ours.requires_grad}"
        assert ours.is_sparse == expected.is_sparse, f"{what}: layout is {ours.layout}"
        ours, expected = (it.detach().to_dense() if expected.is_sparse else it for it in (ours, expected))
    if isinstance(expected, Tensor | np.ndarray | float):
        torch.testing.assert_close(
            ours, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )
    elif isinstance(expected, dict):
        assert list(ours) == list(expected), what
        for key, value in expected.items():
            assert_equal(ours[key], value, tolerance, f"{what}[{key!r}]")
    elif isinstance(expected, list):
        assert len(ours) == len(expected), f"{what}: {len(ours)} items and not {len(expected)}"
        for number, value in enumerate(expected):
            assert_equal(ours[number], value, tolerance, f"{what}[{number}]")
    else:
        assert ours == expected, f"{what}: {ours!r} and not {expected!r}"
