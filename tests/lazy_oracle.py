"""What training lazily means, told by torch alone: dense embeddings whose idle rows are put back after every step.

A dense optimizer changes rows that no batch touched (momentum, weight decay). The oracle runs it on the full
``nn.Embedding`` and then restores those rows and their state. What all rows share (`step`, `mu_product`, ...) stays.
"""

import torch
from torch import Tensor, nn

import speedtransfer
from speedtransfer.optim.plane_view import PlaneView


def tensors_in(container, prefix=""):
    """Return the tensors of a state by name, those in lists and dicts too: ``"buffers.0"``."""
    found = {}
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if isinstance(value, dict | list | tuple):
            found.update(tensors_in(value, f"{prefix}{key}."))
        elif isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value
    return found


def start_value(key, group, weight):
    """Return what the state `key` of a row is before anything has touched that row."""
    if key == "step_size":  # Rprop
        smallest, largest = group["step_sizes"]
        # Rprop lifts a step size below its smallest to it: zero does as well, and is what the probe then prefers.
        return min(float(group["lr"]), largest) if float(group["lr"]) > smallest else 0.0
    if key == "sum":  # Adagrad
        return float(group["initial_accumulator_value"])
    if key in ("ax", "slow"):  # an average of the weights, of one so far
        return weight
    return 0.0


class LazyOracle:
    """An optimizer that trains dense embeddings lazily: the idle rows of `modules` stay put."""

    def __init__(self, optimizer, *modules):
        self.optimizer, self.modules = optimizer, modules
        self._touched = {module: set() for module in modules}
        for module in modules:
            module.register_forward_hook(self._watch)

    def _watch(self, module, args, output):
        if output.requires_grad:  # a batch touches its rows when backward comes by
            ids = args[0].flatten().tolist()
            output.register_hook(lambda grad: self._touched[module].update(ids))

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for touched in self._touched.values():
            touched.clear()

    @torch.no_grad()
    def step(self, step=None):
        """Run `step` (default: the optimizer's own) and put idle rows back."""
        before = {}
        for module in self.modules:
            before[module] = module.weight.clone(), {key: value.clone() for key, value in self._rows(module).items()}
        with torch.enable_grad():  # a closure runs backward
            result = (step or self.optimizer.step)()
        for module, (weight, state) in before.items():
            self._put_back(module, weight, state)
        return result

    def _rows(self, module):
        state = tensors_in(self.optimizer.state.get(module.weight, {}))
        return {k: v for k, v in state.items() if v.dim() > 0 and v.shape[0] == module.weight.shape[0]}

    def _put_back(self, module, weight, state):
        idle = torch.ones(weight.shape[0], dtype=torch.bool)
        idle[list(self._touched[module])] = False
        module.weight[idle] = weight[idle]
        for key, value in self._rows(module).items():
            value[idle] = state.get(key, self._start(module, key, value, weight))[idle].to(value.dtype)

    def _start(self, module, key, value, weight):
        """Return what the state `key` of untouched rows is, ``(num_rows, *tail)``."""
        group = next(g for g in self.optimizer.param_groups if any(p is module.weight for p in g["params"]))
        start = start_value(key, group, weight)
        return start if isinstance(start, Tensor) else torch.full_like(value, start)


# --- batches ------------------------------------------------------------------------------------------------------------


def skewed_batches(num_rows, dim, steps, seed=0, size=24, dtype=torch.float32):
    """Return (ids, target): a few rows in every batch and many times, most seldom, some late, the last one never."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(steps):
        reach = num_rows - 1 if step >= steps // 3 else num_rows // 2  # rows that nothing touches at first
        ids = (torch.rand(size, generator=generator) ** 3 * reach).long().clamp_(max=reach - 1)
        target = torch.randn(size, dim, generator=generator).to(dtype)
        batches.append((ids.view(4, -1), target.view(4, -1, dim)))
    return batches


def both(num_rows=12, dim=5, kind="Embedding", **options):
    """Return one of our modules and the same one of torch."""
    torch.manual_seed(2)
    ours = getattr(speedtransfer, kind)(num_rows, dim, idle="lazy", **options)
    torch.manual_seed(2)
    return ours, getattr(nn, kind)(num_rows, dim, **options)


# --- an embedding of ours and that of torch -----------------------------------------------------------------------------

# How far apart they may be: exact ones, of what training has changed, as rows take the steps that they missed at once.
EXACT = {torch.float32: 2e-5, torch.float64: 1e-12}
SPARSE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 5e-2}


class Twins:
    """An embedding of ours and that of torch, trained by the same kind of optimizer and fed the same batches.

    With lazy idle rows the oracle makes torch's steps, and both have the same bits; with exact ones torch steps itself.
    `make` makes the optimizer of a list of parameters; a batch has `size` ids; `options` that torch has not are for ours.
    """

    def __init__(self, make, num_rows=41, dim=16, size=24, **options):
        self.make, self.num_rows, self.dim, self.size = make, num_rows, dim, size
        common = {name: options[name] for name in ("dtype", "sparse", "padding_idx") if name in options}
        options = {"idle": "lazy", **options}
        self.sparse, self.lazy = options.get("sparse", False), options["idle"] == "lazy"
        torch.manual_seed(3)
        ours = speedtransfer.Embedding(num_rows, dim, **options)
        torch.manual_seed(3)
        self.use(ours, nn.Embedding(num_rows, dim, **common))
        self.start = self.dense.weight.detach().clone()

    def use(self, ours, dense):
        """Go on with these modules, and with new optimizers."""
        self.ours, self.dense = ours, dense
        self.opt, self.dense_opt = (self.make(list(module.parameters())) for module in (ours, dense))
        self.oracle = LazyOracle(self.dense_opt, dense) if self.lazy and not self.sparse else None

    @property
    def modules(self):
        return self.ours, self.dense

    @property
    def optimizers(self):
        return self.opt, self.dense_opt

    def schedulers(self, make):
        return [make(optimizer) for optimizer in self.optimizers]

    def batches(self, steps=30, seed=0):
        return skewed_batches(self.num_rows, self.dim, steps, seed, self.size, self.dense.weight.dtype)

    def zero_grad(self, set_to_none=True):
        for optimizer in (self.opt, self.oracle or self.dense_opt):
            optimizer.zero_grad(set_to_none=set_to_none)

    def backward(self, ids, target):
        for module in self.modules:
            squared_loss(module(ids), target).backward()

    def step(self):
        self.opt.step()
        (self.oracle or self.dense_opt).step()

    def train(self, batches, *schedulers):
        for ids, target in batches:
            self.zero_grad()
            self.backward(ids, target)
            self.step()
            for scheduler in schedulers:
                scheduler.step()

    def assert_same(self, tolerance=None):
        """Compare weights and state over the whole table."""
        expected, scaled = self.dense.weight.detach(), not self.lazy and not self.sparse
        if tolerance is None:
            tolerance = (SPARSE if self.sparse else EXACT)[expected.dtype] if self.sparse or scaled else 0.0
        moved = float((expected - self.start).abs().max()) if scaled else 1.0
        assert moved > 0.01
        rtol = 0 if scaled else tolerance
        torch.testing.assert_close(self.ours.table.torch(), expected, rtol=rtol, atol=tolerance * moved)
        # Full planes, shared scalars and the names of both; with exact rows the tolerance is a share of the largest value.
        state, wanted = dict(self.opt.state.get(self.ours.weight, {})), self.dense_opt.state.get(self.dense.weight, {})
        # Of a table with a cache.
        state |= {key: value.decode() for key, value in state.items() if isinstance(value, PlaneView)}
        ours, theirs = tensors_in(state), tensors_in(wanted)
        assert (set(state), set(ours)) == (set(wanted), set(theirs))
        for key, value in theirs.items():
            if self.sparse:
                # torch loads what it saved as int32 into the dtype of the weights
                value = value.to_dense().to(ours[key].dtype)
            atol = tolerance * float(value.abs().max()) if scaled and value.numel() else tolerance
            torch.testing.assert_close(ours[key], value, rtol=rtol, atol=atol, msg=lambda text, k=key: f"{k}: {text}")
        for key, value in wanted.items():
            assert type(state[key]) is type(value)
            assert isinstance(value, Tensor | list | tuple | dict) or state[key] == value, key


def exact(case, dtype=torch.float32, **options):
    """Return twins with exact idle rows, most of which no batch names."""
    return Twins(case.make, **{"num_rows": 60, "dim": 8, "size": 8, "idle": "exact", "dtype": dtype, **options})


def sparse(make, dtype=torch.float32, **options):
    """Return twins with sparse gradients."""
    return Twins(make, dim=6, size=12, sparse=True, **{"idle": "auto", "dtype": dtype, **options})


def squared_loss(output, target):
    return (output - target.view_as(output)).square().sum() / 4


def dense_grad(module):
    """Return the gradient deposited on one of our modules as the dense one, ``(num_rows, dim)``."""
    grad = module.weight.grad
    return torch.zeros_like(module.weight) if grad is None else grad.to_dense()


def assert_alike(ours, dense, *arguments, **named):
    """Look up and go back on both: the same output, gradient and table, bit for bit."""
    out, expected = ours(*arguments, **named), dense(*arguments, **named)
    assert (out.shape, out.dtype, out.requires_grad) == (expected.shape, expected.dtype, expected.requires_grad)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    if expected.requires_grad:
        torch.manual_seed(9)
        weight = torch.randn(out.shape).to(out.dtype)
        out.backward(weight)
        expected.backward(weight)
        torch.testing.assert_close(dense_grad(ours), dense.weight.grad.to_dense(), rtol=0, atol=0)
    torch.testing.assert_close(ours.table.torch(), dense.weight.detach(), rtol=0, atol=0, equal_nan=True)
