"""Models with tables under DistributedDataParallel and fully_shard: the numbers of one process, or refused by name."""

from __future__ import annotations

import copy
import warnings
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
        self.emb, self.outer = emb, nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, batch: torch.Tensor, uses_rows: bool = True) -> torch.Tensor:
        rows = self.emb(batch)
        return self.outer(rows if uses_rows else torch.ones(1, DIM, dtype=torch.float64))


def models(kind: str, **options: Any) -> tuple[Model, Model]:
    made = []
    for each in ("one" if kind == "replicas" else kind, "one"):
        emb = table(each, **options)
        torch.manual_seed(2)
        made.append(Model(emb))
    return made[0], made[1]


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
        return DistributedDataParallel(model, **options)


def compare(model: Model, wrapped: nn.Module, one: Model, uses=lambda step, rank: True, steps: int = 3) -> float:
    opt, one_opt = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, one))
    ranks = dist.get_world_size()
    for step in range(steps):
        opt.zero_grad()
        one_opt.zero_grad()
        wrapped(ids(step), uses(step, dist.get_rank())).square().sum().backward()
        parts = [one(ids(step, rank), uses(step, rank)).square().sum() for rank in range(ranks)]
        (sum(parts) / ranks).backward()
        opt.step()
        one_opt.step()
    dense = max(
        float((a - b).detach().abs().max()) for a, b in zip(*(m.outer.parameters() for m in (model, one)), strict=True)
    )
    return max(distance(model.emb, one.emb), dense)


def compiled(kind: str) -> dict[str, float]:
    found = {}
    # Of torch, for what comes from one graph into the next.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    for name, around in (("inside", False), ("around", True)):
        model, one = models(kind)
        wrapped = wrap(model if around else torch.compile(model, backend="aot_eager"))
        found[name] = compare(model, torch.compile(wrapped, backend="aot_eager") if around else wrapped, one)

    model, one = models(kind)
    wrapped, opt = wrap(torch.compile(model, backend="aot_eager")), torch.optim.SGD(model.parameters(), lr=0.1)
    one_opt, ranks = torch.optim.SGD(one.parameters(), lr=0.1), dist.get_world_size()
    for step in range(3):
        for each in (opt, one_opt):
            each.zero_grad()
        with wrapped.no_sync():
            wrapped(ids(step)).square().sum().backward()
        wrapped(ids(step + 1)).square().sum().backward()
        parts = [one(ids(at, rank)).square().sum() for at in (step, step + 1) for rank in range(ranks)]
        (sum(parts) / ranks).backward()
        for each in (opt, one_opt):
            each.step()
    found["no_sync"] = distance(model.emb, one.emb)
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_models(two, kind):
    for found in two(compiled, kind, limit=180, timeout=60):
        assert {name: value for name, value in found.items() if not value < 1e-12} == {}


def ways(kind: str) -> dict[str, float]:
    found = {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "mesh": {"device_mesh": mesh},
        "no init_sync": {"init_sync": False},
        "bucket view": {"gradient_as_bucket_view": True},
    }
    if torch.__version__ < "2.7":
        del options["no init_sync"]
    for name, each in options.items():
        model, one = models(kind)
        found[name] = compare(model, wrap(model, **each), one)

    model, one = models(kind)
    wrapped = wrap(model, find_unused_parameters=True)
    # Rows that one rank looks up and does not use.
    found["unused by one"] = compare(model, wrapped, one, lambda step, rank: rank == 0 or step == 1)

    model, one = models(kind)
    model._ddp_params_and_buffers_to_ignore = ["emb.weight"]
    found["ignored by the user"] = compare(model, wrap(model), one)

    model, one = models(kind)
    for each in (model, one):
        each.emb.requires_grad_(False)
    found["frozen"] = compare(model, wrap(model), one)

    model, one = models(kind)
    wrapped = wrap(model)
    wrap(nn.Sequential(model.emb, nn.Linear(DIM, 1)))
    found["in two models"] = compare(model, wrapped, one)

    model, one = models(kind)
    found["nested"] = compare(model, wrap_inner(model), one)

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

    model, one = models(kind)
    for each in (model, one):
        each.emb.weight.register_hook(lambda grad: grad.clamp(-0.2, 0.2))
    found["hook"] = compare(model, wrap(model), one)
    return found


def wrap_inner(model: nn.Module) -> nn.Module:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *args: Any) -> Any:
            return self.inner(*args)

    return wrap(Outer())


@pytest.mark.parametrize("kind", KINDS)
def test_distributed_data_parallel(two, kind):
    for found in two(ways, kind):
        assert all(error < 1e-12 for error in found.values()), found


def with_groups_of_some(kind: str) -> float:
    """As one process has more groups than the other: those of pipelines, or of the processes of a host."""
    dist.new_group([0])
    model, one = models(kind)
    return compare(model, wrap(model), one)


@pytest.mark.parametrize("kind", KINDS)
def test_processes_with_different_numbers_of_groups(two, kind):
    assert max(two(with_groups_of_some, kind)) < 1e-12


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
    return found


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
    }
    for found in two(refused, kind):
        for what, message in found.items():
            assert message.startswith(("InvalidValueError", "OptimizerError")), (what, message)
            assert remedies[what] in message, (what, message)


def under_fsdp(kind: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, one = models(kind)
    fully_shard(model, mesh=mesh, ignored_params=st.table_parameters(model))
    opt, one_opt = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, one))
    norms = []
    for step in range(3):
        for each in (opt, one_opt):
            each.zero_grad()
        model(ids(step)).square().sum().backward()
        norm = st.clip_grad_norm_(model.parameters(), 0.5)
        try:
            opt.step()
        except st.errors.OptimizerError as error:
            return {"refused": str(error)}
        ranks = dist.get_world_size()
        (sum(one(ids(step, rank)).square().sum() for rank in range(ranks)) / ranks).backward()
        norms.append(abs(float(norm - nn.utils.clip_grad_norm_(one.parameters(), 0.5))))
        one_opt.step()
    dense = float((model.outer.weight.full_tensor() - one.outer.weight).detach().abs().max())
    state = st.full_state_dict(model)
    if dist.get_rank() == 0:
        assert float((state["emb.weight"] - one.emb.weight.detach()).abs().max()) < 1e-12
        assert float((state["outer.weight"] - one.outer.weight.detach()).abs().max()) < 1e-12
    return {"error": max(distance(model.emb, one.emb), dense, *norms)}


def without_leaving_out(kind: str) -> str:
    from torch.distributed.fsdp import fully_shard

    model, _ = models(kind)
    return told(lambda: fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))))


@needs_ignored_params
@pytest.mark.parametrize("kind", KINDS)
def test_fully_shard(two, kind):
    for found in two(under_fsdp, kind):
        if kind == "replicas":
            assert "process_group=..." in found["refused"]
        else:
            assert found["error"] < 1e-12
    for message in two(without_leaving_out, kind):
        assert message.startswith("Invalid")
        assert "fully_shard" in message
        assert "emb.weight" in message


def read_in_place(path: str) -> dict[str, float]:
    """Frozen rows of files, which every process opens, below parameters that are trained."""
    found = {}
    for kind in ("DistributedDataParallel", "fully_shard"):
        made = []
        for _ in range(2):
            emb = st.Embedding.from_pretrained(st.Table.open(path, "rows.{}", device="cpu"))
            torch.manual_seed(2)
            made.append(Model(emb))
        model, one = made
        if kind == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            wrapped: nn.Module = fully_shard(model, mesh=mesh, ignored_params=st.table_parameters(model))
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                wrapped = DistributedDataParallel(model)
        opt, one_opt = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, one))
        for step in range(3):
            opt.zero_grad()
            one_opt.zero_grad()
            wrapped(ids(step)).square().sum().backward()
            ranks = dist.get_world_size()
            (sum(one(ids(step, rank)).square().sum() for rank in range(ranks)) / ranks).backward()
            opt.step()
            one_opt.step()
        weight = model.outer.weight
        whole = weight.full_tensor() if kind == "fully_shard" else weight
        found[kind] = float((whole - one.outer.weight).detach().abs().max())
    return found


@needs_ignored_params
def test_tables_that_are_read_in_place(two, tmp_path):
    for number in range(2):
        rows = torch.randn(25, DIM, dtype=torch.float64)
        save_file({f"rows.{number}": rows}, tmp_path / f"{number}.safetensors")
    for found in two(read_in_place, str(tmp_path)):
        assert all(error < 1e-12 for error in found.values()), found
