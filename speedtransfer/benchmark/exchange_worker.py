"""What each process of suite `exchange` does: it trains on its part of every batch and counts the bytes that it sends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speedtransfer.benchmark.exchange_methods import COMM_DTYPES, EIGHT_BITS, Sent, send_by
from speedtransfer.nn import Embedding, table_parameters
from speedtransfer.ranks import exchange_of

_INPUTS, _TEACHER, _EXAMPLES = 8, 8, 1024
_FIELDS = 8


class Sizes(NamedTuple):
    """What is trained: a network `width` wide, or a table of `rows` rows with `dim` columns, on batches of `examples`."""

    width: int
    rows: int
    dim: int
    examples: int
    lr: float
    table_lr: float
    seed: int


# --- what is trained ----------------------------------------------------------------------------------------------------


class Regression:
    """A network that learns what another one answers. Batches are sorted: each process sees inputs of its own."""

    def __init__(self, sizes: Sizes) -> None:
        self._draw = torch.Generator().manual_seed(sizes.seed)
        self._into = torch.randn(_INPUTS, _TEACHER, generator=self._draw) * 1.5 / _INPUTS**0.5
        self._out = torch.randn(_TEACHER, 1, generator=self._draw) / _TEACHER**0.5
        self._sizes = sizes

    def model(self) -> nn.Module:
        """Return the network, with the same first weights each time."""
        torch.manual_seed(self._sizes.seed)
        width = self._sizes.width
        layers = [nn.Linear(_INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)]
        return nn.Sequential(*layers)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of all methods."""
        return torch.optim.SGD(model.parameters(), lr=self._sizes.lr)

    def batch(self, examples: int) -> tuple[Tensor, Tensor]:
        """Return inputs ``(examples, 8)`` sorted by their first number, and targets ``(examples, 1)``."""
        inputs = torch.randn(examples, _INPUTS, generator=self._draw)
        inputs = inputs[inputs[:, 0].argsort()]
        return inputs, torch.tanh(inputs @ self._into) @ self._out


class Values(nn.Module):
    """The mean of the rows of an example in a table whose gradients are sent as `method` says, and a linear layer."""

    def __init__(self, method: str, sizes: Sizes) -> None:
        super().__init__()
        torch.manual_seed(sizes.seed)
        group, comm_dtype = dist.group.WORLD, COMM_DTYPES[method]
        self.emb = Embedding(sizes.rows, sizes.dim, idle="lazy", process_group=group, comm_dtype=comm_dtype)
        self.head = nn.Linear(sizes.dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return predictions ``(examples, 1)`` for ids ``(examples, 8)``."""
        values: Tensor = self.head(self.emb(ids).mean(1))
        return values


class Lookups:
    """A table that learns a number for each id."""

    def __init__(self, method: str, sizes: Sizes) -> None:
        self._draw = torch.Generator().manual_seed(sizes.seed)
        self._values = torch.randn(sizes.rows, 1, generator=self._draw)
        self._method, self._sizes = method, sizes

    def model(self) -> nn.Module:
        """Return the model, with the same first rows each time."""
        return Values(self._method, self._sizes)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of all methods."""
        return torch.optim.AdamW(model.parameters(), lr=self._sizes.table_lr)

    def batch(self, examples: int) -> tuple[Tensor, Tensor]:
        """Return ids ``(examples, 8)``, small ones more frequent, and targets ``(examples, 1)``."""
        ids = (torch.rand(examples, _FIELDS, generator=self._draw) ** 3 * self._sizes.rows).long()
        return ids, self._values[ids].mean(1)


# --- the process --------------------------------------------------------------------------------------------------------


class Training:
    """A model whose gradients are sent by one method, in one of `ranks` processes."""

    def __init__(self, method: str, sizes: Sizes, rank: int, ranks: int) -> None:
        self.cuda = "cuda:nccl" in dist.get_backend_config()
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.task: Any = Lookups(method, sizes) if method in COMM_DTYPES else Regression(sizes)
        self.held_out = [values.to(self.device) for values in self.task.batch(_EXAMPLES)]
        self.net: nn.Module = self.task.model().to(self.device)
        # In one bucket: on gloo, PowerSGD and the quantization hooks hang with several.
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=1000)
        self.optimizer = send_by(method, self.model, self.task.optimizer(self.net))
        each = sizes.examples // ranks
        self._examples, self._part = sizes.examples, slice(rank * each, (rank + 1) * each)
        self._sent = Sent(nested=method == EIGHT_BITS and not self.cuda)
        self._before = self._of_tables()

    def steps(self, count: int) -> None:
        """Take training steps."""
        with self._sent:
            for _ in range(count):
                inputs, targets = (values[self._part].to(self.device) for values in self.task.batch(self._examples))
                self.optimizer.zero_grad()
                (self.model(inputs) - targets).square().mean().backward()
                self.optimizer.step()
        if self.cuda:
            torch.cuda.synchronize()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean square error on examples that no one trains on, of the model of this process."""
        inputs, targets = self.held_out
        return float((self.net(inputs) - targets).square().mean())

    def sent(self) -> float:
        """Return the bytes sent so far to other processes, for gradients and, of tables, for ids and rows."""
        return self._sent.bytes + self._of_tables() - self._before

    def parameters(self) -> Any:
        """Return all parameters but the rows of tables, as a flat array."""
        tables = table_parameters(self.net)
        found = [p.detach().cpu() for p in self.net.parameters() if p not in tables]
        return nn.utils.parameters_to_vector(found).numpy()

    def _of_tables(self) -> int:
        traffic = exchange_of(dist.group.WORLD).traffic
        return traffic.control + traffic.ids + traffic.rows + traffic.gradients


class Worker:
    """What a process does when it is told: each method, and each of its training, is a command."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._make: Callable[[str, Sizes], Training] = functools.partial(Training, rank=rank, ranks=ranks)
        self._training: Training | None = None

    def begin(self, method: str, sizes: Sizes) -> None:
        """Make a new model in place of the one before."""
        self._training = None
        self._training = self._make(method, sizes)

    def __getattr__(self, command: str) -> Any:
        """Return a command of the training: ``steps``, ``loss``, ``sent`` or ``parameters``."""
        return getattr(self._training, command)
