"""Models with tables under DistributedDataParallel and fully_shard: the numbers of one process, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st
from ranks.small import DIM, distance, ids, table, told

KINDS = ["sharded", "shared", "replicas"]
needs_ignored_params = pytest.mark.skipif(torch.__version__ < "2.7", reason="fully_shard takes no ignored_params")


class Model(nn.Module):
    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb, self.outer = emb, nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, batch: torch.Tensor, uses_rows: bool = True) -> torch.Tensor:
        rows = self.emb(batch)
        return self.outer(rows if uses_rows else torch.ones(1, DIM, dtype=torch.float64))


def models(kind: str, **options: Any) -> tuple[Model, Model]:
    return Model(table("one" if kind == "replicas" else kind, **options)), Model(table("one", **options))


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
        return DistributedDataParallel(model, **options)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def whole(param: torch.Tensor) -> torch.Tensor:
    return param.detach().full_tensor() if hasattr(param, "full_tensor") else param.detach()


def compare(
    model: Model,
    wrapped: nn.Module,
    one: Model,
    uses: Callable[[int, int], bool] = lambda step, rank: True,
    backwards: int = 1,
    clip: float | None = None,
) -> float:
    opt, one_opt = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, one))
    ranks = range(dist.get_world_size())
    for step in range(3):
        opt.zero_grad()
        one_opt.zero_grad()
        for turn in range(backwards):
            place = 10 * turn + step
            with wrapped.no_sync() if turn < backwards - 1 else contextlib.nullcontext():
                wrapped(ids(place), uses(step, dist.get_rank())).square().sum().backward()
            parts = [one(ids(place, rank), uses(step, rank)).square().sum() for rank in ranks]
            (sum(parts) / len(ranks)).backward()
        if clip is not None:
            wanted = nn.utils.clip_grad_norm_(one.parameters(), clip)
            assert abs(st.clip_grad_norm_(model.parameters(), clip) - wanted) < 1e-12
        opt.step()
        one_opt.step()
    pairs = zip(model.outer.parameters(), one.outer.parameters(), strict=True)
    return max(distance(model.emb, one.emb), *(float((whole(a) - whole(b)).abs().max()) for a, b in pairs))


def compiled(kind: str) -> dict[str, float]:
    found = {}
    # Of torch, for what comes from one graph into the next.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    for name, around, backwards in (("inside", False, 1), ("around", True, 1), ("no_sync", False, 2)):
        model, one = models(kind)
        wrapped = wrap(model if around else torch.compile(model, backend="aot_eager"))
        wrapped = torch.compile(wrapped, backend="aot_eager") if around else wrapped
        found[name] = compare(model, wrapped, one, backwards=backwards)
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_models(two, kind):
    for found in two(compiled, kind, limit=180, timeout=60):
        assert {name: value for name, value in found.items() if not value < 1e-12} == {}


# --- ways to wrap a model: each is given it, and the one beside it --------------------------------------------------------


def ignored_by_the_user(model: Model, one: Model) -> nn.Module:
    model._ddp_params_and_buffers_to_ignore = ["emb.weight"]
    return wrap(model)


def frozen(model: Model, one: Model) -> nn.Module:
    for each in (model, one):
        each.emb.requires_grad_(False)
    return wrap(model)


def in_two_models(model: Model, one: Model) -> nn.Module:
    wrapped = wrap(model)
    wrap(nn.Sequential(model.emb, nn.Linear(DIM, 1)))
    return wrapped


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def hooked(model: Model, one: Model) -> nn.Module:
    for each in (model, one):
        each.emb.weight.register_hook(lambda grad: grad.clamp(-0.2, 0.2))
    return wrap(model)


def more_groups(model: Model, one: Model) -> nn.Module:
    """One process has more groups than the other: those of pipelines, or of the processes of a host."""
    dist.new_group([0])
    return wrap(model)


WAYS: dict[str, Callable[[Model, Model], nn.Module]] = {
    "plain": lambda model, one: wrap(model),
    "unused": lambda model, one: wrap(model, find_unused_parameters=True),
    "static": lambda model, one: wrap(model, static_graph=True),
    "mesh": lambda model, one: wrap(model, device_mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
    "bucket view": lambda model, one: wrap(model, gradient_as_bucket_view=True),
    "nested": lambda model, one: wrap(Outer(model)),
}
WAYS |= {way.__name__: way for way in (ignored_by_the_user, frozen, in_two_models, hooked, more_groups)}
if torch.__version__ >= "2.7":
    WAYS["no init_sync"] = lambda model, one: wrap(model, init_sync=False)


def ways(kind: str) -> dict[str, float]:
    found = {}
    for name, way in WAYS.items():
        model, one = models(kind)
        found[name] = compare(model, way(model, one), one)
    model, one = models(kind)
    # Rows that one rank looks up and does not use.
    uses = lambda step, rank: rank == 0 or step == 1  # noqa: E731
    found["unused by one"] = compare(model, wrap(model, find_unused_parameters=True), one, uses)
    if kind == "replicas":
        model, one = models(kind)
        with torch.no_grad():
            # Rank 0 wins.
            model.emb.weight.add_(dist.get_rank())
        found["different rows"] = compare(model, wrap(model), one)
        # Rows and, in one process, the whole weight: the gradient is dense, as in one process.
        model, one = models(kind, sparse=True)
        wrapped = wrap(model)
        (wrapped(ids()).sum() + (model.emb.weight.square().sum() if dist.get_rank() else 0)).backward()
        (sum(one(ids(0, rank)).sum() for rank in range(2)) + one.emb.weight.square().sum()).backward()
        grad, expected = model.emb.weight.grad, one.emb.weight.grad / 2
        assert grad.layout == expected.layout == torch.strided
        found["whole by one, sparse"] = float((grad - expected).abs().max())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_distributed_data_parallel(two, kind):
    for found in two(ways, kind):
        assert {name: value for name, value in found.items() if not value < 1e-12} == {}


def refused(kind: str) -> dict[str, str]:
    model, _ = models(kind)
    wrapped = wrap(model)

    def join() -> None:
        with wrapped.join():
            pass

    def zero() -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = {"join": told(join), "zero": told(zero)}
    found["tables alone"] = told(lambda: wrap(models(kind)[0].emb))
    if kind == "replicas":
        duplicate = copy.deepcopy(wrapped)
        found["copy"] = told(lambda: duplicate(ids()))
        found["max_norm"] = told(lambda: wrap(models(kind, max_norm=1.0)[0]))
    else:
        group = dist.new_group([0])
        if dist.get_rank() == 0:
            found["subgroup"] = told(lambda: wrap(model, process_group=group))
    if torch.__version__ >= "2.7":
        found["fully_shard"] = told(lambda: shard(models(kind)[0]))
        if kind == "replicas":
            model, _ = models(kind)
            found["every process by itself"] = told(lambda: compare(model, wrap_fsdp(model), model))
    return found


def wrap_fsdp(model: Model) -> nn.Module:
    return shard(model, ignored_params=st.table_parameters(model))


@pytest.mark.parametrize("kind", KINDS)
def test_refused_by_name(two, kind):
    remedies = {
        "join": "equal_steps",
        # It looks at its parameters before torch's base class, which the package wraps, gets them.
        "zero": "optimizer of its own" if kind == "replicas" else "owned by 2 processes",
        "tables alone": "process_group=",
        "copy": "copy.deepcopy",
        "max_norm": "process_group=",
        "subgroup": "same process group",
        "fully_shard": "emb.weight",
        "every process by itself": "process_group=...",
    }
    for found in two(refused, kind):
        for what, message in found.items():
            assert message.startswith(("Invalid", "OptimizerError")), (what, message)
            assert remedies[what] in message, (what, message)
            assert what != "fully_shard" or "fully_shard" in message


def under_fsdp(kind: str) -> float:
    model, one = models(kind)
    far = compare(model, wrap_fsdp(model), one, clip=0.5)
    state = st.full_state_dict(model)
    if dist.get_rank() == 0:
        for name, weight in one.named_parameters():
            assert float((state[name] - weight.detach()).abs().max()) < 1e-12
    return far


@needs_ignored_params
@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_fully_shard(two, kind):
    assert max(two(under_fsdp, kind)) < 1e-12


def read_in_place(path: str) -> float:
    """Frozen rows of files, which every process opens, below parameters that are trained."""
    found = []
    for way in (DistributedDataParallel, wrap_fsdp):
        model, one = (
            Model(st.Embedding.from_pretrained(st.Table.open(path, "rows.{}", device="cpu"))) for _ in range(2)
        )
        found.append(compare(model, way(model), one))
    return max(found)


@needs_ignored_params
def test_tables_that_are_read_in_place(two, tmp_path):
    for number in range(2):
        rows = torch.randn(25, DIM, dtype=torch.float64)
        save_file({f"rows.{number}": rows}, tmp_path / f"{number}.safetensors")
    assert max(two(read_in_place, str(tmp_path))) < 1e-12
