"""Random programs over an embedding, its weight, its gradient and optimizers, run on ``torch.nn`` and on ours.

A program is a list of statements; each is drawn from a vocabulary, with numbers in place of ``{k}``. What is seen after every
statement must be equal.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cases import saved
from midway import elsewhere
from torch import Tensor, nn
from weight_statements import TRAINING, VOCABULARY
from weight_world import Setting, assert_equal, run_code

from speedtransfer.errors import SpeedtransferError

ROWS, DIM = 12, 3


class PlannedError(Exception):
    """Raised in a step on purpose."""


class Model(nn.Module):
    """Two embeddings and a layer."""

    def __init__(self, embedding: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.emb, self.other = (embedding(ROWS, DIM, dtype=torch.float64) for _ in range(2))
        self.lin = nn.Linear(DIM, 2, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lin(self.emb(ids)).tanh()


class World:
    """The names that a program uses."""

    def __init__(self, setting: Setting, ours: bool) -> None:
        self.names: dict[str, Any] = {}
        self.planned: str | None = None
        torch.manual_seed(3)

        model = setting.model(Model, ours)
        self.setting = setting
        make = lambda params: setting.optimizer(params, **setting.options)  # noqa: E731
        opt = make(model.parameters())
        self.names.update(
            model=model, emb=model.emb, other=model.other, lin=model.lin, opt=opt, make_opt=make, kept={}, hooks=[],
            seen=[], torch=torch, nn=nn, F=F, copy=copy, pickle=pickle, operator=operator, DIM=DIM, ROWS=ROWS,
            ids=self.ids, loss=self.loss, full=self.full, backward=self.backward, closure=self.closure,
            attempt=self.attempt, attempt_backward=self.attempt_backward,
            failing=self.failing, through=saved, in_thread=elsewhere, init=self.init,
            scaler=torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2),
            ema=torch.optim.swa_utils.AveragedModel(model),
            swap=lambda state: self.names["model"].load_state_dict(state),
            decay=self.decay,
        )  # fmt: skip
        self.names["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

    # What programs call.

    @staticmethod
    def ids(k: int) -> Tensor:
        return torch.randint(0, ROWS, (4,), generator=torch.Generator().manual_seed(k))

    @staticmethod
    def full(k: int) -> Tensor:
        draw = torch.Generator().manual_seed(k)
        return torch.randn(ROWS, DIM, generator=draw, dtype=torch.float64)

    def loss(self, k: int) -> Tensor:
        return (self.names["model"](self.ids(k)) - 0.3).pow(2).sum()

    @staticmethod
    def backward(loss: Tensor | None) -> None:
        if loss is not None and loss.requires_grad:
            loss.backward()

    def attempt_backward(self, loss: Tensor) -> str | None:
        """Go back through a graph that a step may have made useless."""
        if self.names["opt"].param_groups[0].get("fused"):  # of which torch does not tell autograd, and we do
            return None
        try:
            loss.backward()
        except RuntimeError as error:
            return "modified by an inplace operation" * ("inplace" in str(error))
        return "works"

    def closure(self, k: int) -> Tensor:
        with torch.enable_grad():
            self.names["opt"].zero_grad()
            loss = self.loss(k)
            loss.backward()
        return loss

    def decay(self, factor: float) -> None:
        if self.setting.table.get("idle") != "lazy":
            self.names["opt"].param_groups[0]["weight_decay"] = factor

    def failing(self, where: str) -> None:
        self.planned = where

    def attempt(self, step: Any) -> None:
        """Take a step that fails before, in, or after the work of the optimizer."""
        opt, where = self.names["opt"], self.planned
        if where == "in":  # before any row has changed
            step()  # the first state, of which torch may leave a part
            kind = type(opt)
            name = "_init_group"
            original = getattr(kind, name)

            def raising(self: Any, *args: Any, **kwargs: Any) -> Any:
                found = original(self, *args, **kwargs)
                if self is opt:  # and not the trial of an optimizer like it
                    raise PlannedError
                return found

            setattr(kind, name, raising)
            try:
                step()
            except PlannedError:
                pass
            finally:
                setattr(kind, name, original)
            # What torch leaves of a first state made by a step that failed is not compared.
            return
        register = opt.register_step_pre_hook if where == "before" else opt.register_step_post_hook

        def raising_hook(*_: Any) -> None:
            raise PlannedError

        hook = register(raising_hook)
        try:
            step()
        except PlannedError:
            pass
        finally:
            hook.remove()

    @staticmethod
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.mul_(0.5)

    # What is seen.

    def run(self, statement: str) -> Any:
        """Run a statement; the value of its last part, where that is an expression."""
        return run_code(statement, statement, self.names)

    def state(self) -> dict[str, Any]:
        """Return all that can be seen of the model and the optimizer; to look brings idle rows up to date."""
        model, opt = self.names["model"], self.names["opt"]
        found: dict[str, Any] = {}
        for name, param in model.named_parameters():
            found[name] = param.detach().clone()
            found[name + ".grad"] = None if param.grad is None else plain(param.grad)
            found[name + ".requires_grad"] = param.requires_grad
        found["opt"] = plain(copy.deepcopy(opt.state_dict()["state"]))
        found["seen"] = plain(self.names["seen"])
        return found


def plain(value: Any) -> Any:
    """Return `value` with tensors that are dense, ordinary and apart from their sources; None for what is not compared."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value.to_dense().clone() if value.layout != torch.strided else value.clone()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | np.ndarray) else None


def difference(expected: Any, got: Any, where: str = "") -> str | None:
    """Tell where two values differ, or None."""
    try:
        assert_equal(got, expected, 1e-9, where)
    except AssertionError as error:
        return str(error)
    return None


@dataclass
class Outcome:
    """What came of a program: `kind` is "equal", "refused" or "differs"."""

    kind: str
    at: int = 0
    text: str = ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        yield


def run(program: list[str], setting: Setting, watch: bool) -> Outcome:
    """Run a program on both; `watch` looks at everything after every statement, else only at the end."""
    with _quiet(), setting.hidden():
        worlds = World(setting, False), World(setting, True)
        for number, statement in enumerate(program):
            results: list[Any] = []
            errors: list[BaseException | None] = []
            for world in worlds:
                torch.manual_seed(number)
                try:
                    results.append(plain(world.run(statement)))
                    errors.append(None)
                except Exception as error:
                    results.append(None)
                    errors.append(error)
            theirs, ours = errors
            if ours is not None and theirs is None:
                refused = isinstance(ours, SpeedtransferError) or "read-only" in str(ours)
                return Outcome("refused" if refused else "differs", number, f"{type(ours).__name__}: {ours}")
            if theirs is not None and ours is None:
                return Outcome("differs", number, f"torch raises {type(theirs).__name__}: {theirs}")
            if theirs is not None:
                continue
            apart = difference(results[0], results[1], "result")
            if apart is None and (watch or number == len(program) - 1):
                apart = difference(worlds[0].state(), worlds[1].state(), "state")
            if apart is not None:
                return Outcome("differs", number, apart)
        apart = difference(worlds[0].state(), worlds[1].state(), "state")
    return Outcome("equal") if apart is None else Outcome("differs", len(program), apart)


def draw(seed: int, length: int) -> list[str]:
    """Return a random program."""
    chance = random.Random(seed)
    few = chance.sample(VOCABULARY, 5)
    program = []
    for _ in range(length):
        statement = chance.choice(TRAINING if chance.random() < 0.5 else few)
        program.append(statement.format(k=chance.randrange(10)))
    return program


def shrink(program: list[str], setting: Setting, watch: bool, kind: str) -> list[str]:
    """Return a shorter program of the same outcome."""
    shorter = True
    while shorter:
        shorter = False
        for i in range(len(program)):
            less = program[:i] + program[i + 1 :]
            if less and run(less, setting, watch).kind == kind:
                program, shorter = less, True
                break
    return program


SETTINGS = (
    Setting("exact-adamw", torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    Setting("exact-adam-coupled", torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    Setting("exact-adamw-fused", torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1, "fused": True}),
    Setting("exact-adamw-foreach", torch.optim.AdamW, {"lr": 0.05, "amsgrad": True, "foreach": True}),
    Setting("exact-sgd", torch.optim.SGD, {"lr": 0.1}),
    Setting("exact-sgd-momentum", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    Setting("exact-adagrad", torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    Setting("exact-rmsprop", torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    Setting("exact-rprop", torch.optim.Rprop, {"lr": 0.01}),
    Setting("exact-nadam", torch.optim.NAdam, {"lr": 0.05, "weight_decay": 0.1}),
    Setting("exact-asgd", torch.optim.ASGD, {"lr": 0.05}),
    Setting("lazy-adagrad", torch.optim.Adagrad, {"lr": 0.1}, {}, {"idle": "lazy"}),
    Setting("lazy-sgd", torch.optim.SGD, {"lr": 0.1}, {}, {"idle": "lazy"}),
    Setting("padded-adamw", torch.optim.AdamW, {"lr": 0.05}, {"padding_idx": 2}),
    Setting("normed-adamw", torch.optim.AdamW, {"lr": 0.05}, {"max_norm": 0.8}),
    Setting("normed-sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, {"max_norm": 0.8}),
    Setting("freq-adamw", torch.optim.AdamW, {"lr": 0.05}, {"scale_grad_by_freq": True}),
    Setting("copies-adamw", torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}, copies=True),
    Setting("copies-sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, copies=True),
    Setting("copies-lazy-adagrad", torch.optim.Adagrad, {"lr": 0.1}, {}, {"idle": "lazy"}, copies=True),
    Setting("replaced-adamw", torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    Setting("tensor-adamw", torch.optim.AdamW, {"lr": torch.tensor(0.05, dtype=torch.float64), "weight_decay": 0.1}),
    Setting("device-adamw", torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}, {}, {"memory": "device"}),
    Setting("adamw-single", torch.optim.AdamW, {"lr": 0.05, "foreach": False}),
)  # fmt: skip
