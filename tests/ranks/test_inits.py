"""Values that all rows of a sharded or shared table are set to: the numbers of torch.nn with the same seed, or refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import init

from ranks.small import DIM, ROWS, all_ids, ids, plain, rows_of, table

WHOLE = torch.arange(ROWS * DIM, dtype=torch.float64).view(ROWS, DIM)
SAME = {
    "uniform_": init.uniform_,
    "normal_": lambda w: init.normal_(w, 1.0, 2.0),
    "constant_": lambda w: init.constant_(w, 0.5),
    "ones_": init.ones_,
    "zeros_": init.zeros_,
    "xavier_uniform_": init.xavier_uniform_,
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": init.kaiming_uniform_,
    "kaiming_uniform_ of a Linear": lambda w: init.kaiming_uniform_(w, a=math.sqrt(5), mode="fan_out"),
    "kaiming_normal_": init.kaiming_normal_,
    "kaiming_normal_ fan_out": lambda w: init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"),
    "data normal_": lambda w: w.data.normal_(mean=0.0, std=0.02),
    "data uniform_": lambda w: w.data.uniform_(-1, 1),
    "data init": lambda w: init.kaiming_uniform_(w.data),
    "data normal_ of a generator": lambda w: w.data.normal_(generator=torch.Generator().manual_seed(4)),
    "random_": lambda w: w.data.random_(0, 10),
    "mul_": lambda w: w.data.mul_(0.9),
    "div_": lambda w: w.data.div_(3),
    "add_": lambda w: w.data.add_(1),
    "sub_": lambda w: w.data.sub_(1, alpha=3),
    "clamp_": lambda w: w.data.clamp_(-0.1, 0.1),
    "fill_": lambda w: w.data.fill_(2),
    "zero_": lambda w: w.data.zero_(),
    "data =": lambda w: setattr(w, "data", WHOLE),
    "copy_": lambda w: w.data.copy_(WHOLE),
    "copy_ of a row": lambda w: w.data.copy_(WHOLE[1]),
}
REFUSED = {
    "trunc_normal_": lambda w: init.trunc_normal_(w, std=0.02),
    "trunc_normal_, narrow": lambda w: init.trunc_normal_(w, 0, 1, 0.1, 0.2),
    "data trunc_normal_": lambda w: init.trunc_normal_(w.data, std=0.02),
    "orthogonal_": init.orthogonal_,
    "sparse_": lambda w: init.sparse_(w, 0.5),
    "eye_": init.eye_,
    "a row": lambda w: w.data.__setitem__(3, 0.0),
    "rows": lambda w: w.data.__setitem__(torch.tensor([1, 2]), 0.0),
    "a view": lambda w: w.data[0].fill_(0),
    "renorm_": lambda w: w.data.renorm_(2, 0, 1.0),
    "lerp_": lambda w: w.data.lerp_(WHOLE, 0.1),
    "pow_": lambda w: w.data.pow_(2),
    "norm": lambda w: w.norm(),
    "sum": lambda w: w.sum(),
}


def set_rows(kind: str) -> dict[str, str]:
    found = {}
    for name, function in {**SAME, **REFUSED}.items():
        emb = table(kind)
        other, before = plain(emb), rows_of(emb)
        after = []
        for weight in (other.weight, emb.weight):
            torch.manual_seed(11)
            try:
                with torch.no_grad():
                    function(weight)
            except Exception as error:
                if weight is other.weight:
                    raise
                found[name] = f"{type(error).__name__}: {error}"
                assert torch.equal(rows_of(emb), before), f"{name} wrote, then raised"
            after.append(torch.rand(1))
        if name in SAME and name not in found:
            assert torch.equal(rows_of(emb), other.weight), name
            assert torch.equal(*after), f"{name} draws other numbers afterwards"
        dist.barrier()
    return found


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_all_rows_are_set_as_by_torch_or_not_at_all(three, kind):
    version_draws_anew = "erfinv_" not in init.trunc_normal_.__globals__["_no_grad_trunc_normal_"].__code__.co_names
    for found in three(set_rows, kind):
        wanted = {name for name in REFUSED if version_draws_anew or "trunc" not in name}
        assert set(found) == wanted
        for name, message in found.items():
            assert message.startswith("InvalidValueError"), (name, message)
            assert "processes" in message
            assert ";" in message


def gradient_functions(kind: str) -> None:
    emb = table(kind)
    other = plain(emb)
    emb(ids()).square().sum().backward()
    (other(all_ids()).square().sum() / dist.get_world_size()).backward()
    same = {
        "norm": lambda g: g.norm(),
        "norm 1": lambda g: g.norm(1),
        "norm inf": lambda g: g.norm(math.inf),
        "norm 3": lambda g: torch.linalg.vector_norm(g, 3),
        "linalg.norm": torch.linalg.norm,
        "data.norm": lambda g: g.data.norm(2),
        "foreach": lambda g: torch._foreach_norm([g], 2)[0],
        "get_total_norm": lambda g: nn.utils.get_total_norm([g]),
        "sum": lambda g: g.sum(),
        "abs sum": lambda g: g.abs().sum(),
        "count_nonzero": lambda g: g.count_nonzero(),
        "isnan": lambda g: g.isnan().any(),
        "isinf": lambda g: torch.isinf(g).any(),
        "any": lambda g: g.any(),
        "numel": lambda g: torch.tensor(g.numel()),
        "clone": lambda g: g.clone().norm(),
        "float": lambda g: g.float().norm(),
    }
    for name, function in same.items():
        assert float(function(emb.weight.grad)) == pytest.approx(float(function(other.weight.grad)), rel=1e-6), name
    refused = ["max", "min", "mean", "std", "prod", "median", "argmax", "flatten", "tolist", "numpy", "amax", "all"]
    for name in refused:
        with pytest.raises(ValueError, match="processes"):
            getattr(emb.weight.grad, name)()
        with pytest.raises(ValueError, match="processes"):
            torch.isfinite(emb.weight.grad)


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_functions_of_gradients_are_over_all_or_refused(three, kind):
    three(gradient_functions, kind)
