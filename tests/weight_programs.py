"""Random programs over an embedding, its weight, its gradient and optimizers, run on ``torch.nn`` and on ours.

A program is a list of statements: steps of training, a few that stand side by side in `STATEMENTS`, with numbers in place of
``{k}``, and a few pieces of weight_cases.py. What is seen after every statement must be equal.
"""

import contextlib
import copy
import random
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from cases import elsewhere, saved
from torch import Tensor
from weight_cases_training import CASES
from weight_world import ADAMW, DIM, ROWS, Setting, World, assert_equal, defaults, run_code, tensors

from speedtransfer.errors import SpeedtransferError

TRAINING = """
opt.zero_grad(); backward(loss({k}))
backward(loss({k}))
opt.step()
opt.step()
step({k})
opt.zero_grad()
""".strip().splitlines()

# What leaves something for a later statement, in a variable, a gradient or an optimizer: those of a topic one after the other.
STATEMENTS = """
kept['graph'] = loss({k})
backward(kept.pop('graph', None))
kept['retain'] = loss({k}); kept['retain'].backward(retain_graph=True)
backward(kept.pop('retain', None))
kept['leaf'] = emb.weight * 2
backward(kept.pop('leaf', query * 1).pow(2).sum())
kept['saved'] = emb.weight.pow(2).sum(); opt.step(); attempt_backward(kept.pop('saved'))
kept['saved'] = emb(draw({k})).pow(2).sum(); emb.weight.data.mul_(0.5); backward(kept.pop('saved'))
kept['grad'] = emb.weight.grad
emb.weight.grad = kept.get('grad')
emb.weight.grad = None; backward(loss({k})); emb.weight.grad.add_(kept['grad']) if kept['grad'] is not None else 0
kept['grads'] = [p.grad for p in model.parameters()]
[g.mul_(2) for g in kept['grads']]
[setattr(p, 'grad', g) for p, g in zip(model.parameters(), kept['grads'])]; None
emb.weight.grad is kept['grads'][0], emb.weight.grad is kept.get('buffer')
kept['buffer'] = torch.zeros_like(emb.weight); emb.weight.grad = kept['buffer']
kept['buffer'].zero_()
kept['buffer'][{k}] = 0.1
opt.zero_grad(set_to_none=False)
emb.weight.grad[{k}] = 0.5
emb.weight.grad is None, emb.weight.requires_grad, emb.weight.is_leaf, emb.weight.grad_fn
kept['data'] = emb.weight.data
emb.weight.sum(); kept['data'].add_(0.1)
emb.weight.sum(); kept['data'][{k}] = -1
emb.weight.sum(); kept['data'].clone()
kept['row'] = emb.weight.data[{k}]
emb.weight.sum(); kept['row'].mul_(2)
kept['view'] = emb.weight.detach().view(-1)
emb.weight.sum(); kept['view'][{k}] = 3
emb.weight.data.copy_(values({k}))
kept['numpy'] = emb.weight.detach().numpy()
emb.weight.sum(); kept['numpy'].sum()
emb.weight.sum(); kept['numpy'][{k}] += 0.5
emb.weight.data = values({k})
kept['old'] = emb.weight
emb.weight = nn.Parameter(values({k})); opt = make_opt(model.parameters())
emb.weight = kept.get('old', emb.weight); opt = make_opt(model.parameters())
kept['old'].sum(), kept['old'].grad
kept['model'] = copy.deepcopy(model.state_dict())
model.load_state_dict(copy.deepcopy(kept['model']))
kept['model_live'] = model.state_dict()
emb.weight.sum(); kept['model_live']['emb.weight'].sum()
emb.weight.sum(); model.load_state_dict(kept['model_live'])
assign(values({k}))
kept['opt'] = copy.deepcopy(opt.state_dict())
opt.load_state_dict(copy.deepcopy(kept['opt']))
take_over(model)
opt = make_opt([dict(params=[emb.weight], lr=0.01), dict(params=[items.weight, query])])
opt.param_groups[0]['lr'] = 0.0
opt.param_groups[0].update(betas=(0.5, 0.9))
decay(0.05)
opt.add_param_group(dict(params=[nn.Parameter(torch.ones(2))]))
opt.state.clear()
opt.state.get(emb.weight, {}).clear()
opt.state_dict(); opt.state.pop(emb.weight, None)
opt.state_dict(); [v.mul_(0.5) for v in opt.state.get(emb.weight, {}).values() if torch.is_tensor(v) and v.dim()]
copied = copy.deepcopy(model); copied.emb.weight.sum(), copied.emb.weight.grad
model, opt = copy.deepcopy((model, opt)); use(model)
model = pickle.loads(pickle.dumps(model)); take_over(model)
model, opt = pickle.loads(pickle.dumps((model, opt))); use(model)
through(model.state_dict())['emb.weight'].sum(), through(emb.weight), through(list(model.parameters()))[0].sum()
opt.step(lambda: closure({k})).item()
attempt('before')
attempt('in')
attempt('in'); opt.zero_grad()
attempt('after')
opt.register_step_pre_hook(lambda o, a, k: seen.append(emb.weight.sum().item())); None
opt.register_step_post_hook(lambda o, a, k: seen.append(emb.weight.sum().item())); None
opt.register_step_post_hook(lambda o, a, k: emb.weight.data.clamp_(-0.5, 0.5)); None
opt.register_step_pre_hook(lambda o, a, k: (nn.utils.clip_grad_norm_(model.parameters(), 0.3), None)[1]); None
hooks.append(emb.weight.register_hook(lambda g: g * 2))
hooks.append(emb.weight.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad.norm().item(), p.sum().item()))))
hooks.append(emb.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1]))
[h.remove() for h in hooks]; hooks.clear()
emb.weight.grad = torch.autograd.grad(loss({k}), emb.weight)[0]
backward(torch.autograd.grad(loss({k}), query, create_graph=True)[0].pow(2).sum())
(g,) = torch.autograd.grad(loss({k}), [emb.weight], create_graph=True); backward(g.pow(2).sum())
loss({k}).backward(create_graph=True); emb.weight.grad = emb.weight.grad.detach(); query.grad.detach_(); detach(items)
torch.utils.checkpoint.checkpoint(lambda: loss({k}), use_reentrant=False).backward()
torch.utils.checkpoint.checkpoint(lambda x: x.sum() + loss({k}), query, use_reentrant=True).backward()
x = emb(draw({k})); x.retain_grad(); backward(x.pow(2).sum()); x.grad.sum()
x = emb(draw({k})); y = x.detach().requires_grad_(); backward(y.pow(3).sum()); x.backward(y.grad)
out = emb(draw({k})); out *= 0.5; backward(out.pow(2).sum())
emb.weight.requires_grad_(False)
emb.weight.requires_grad_(True)
kept['frozen'] = emb(draw({k})).sum(); emb.requires_grad_(False); backward(kept.pop('frozen')); emb.requires_grad_(True); None
with torch.inference_mode(): kept['inf'] = emb(draw({k})); emb.weight.mul_(0.5)
scaler.scale(loss({k})).backward(); scaler.unscale_(opt); update(scaler)
opt.zero_grad(); scaler.scale(loss({k}) * (1 if {k} % 2 else torch.inf)).backward(); update(scaler)
in_thread(lambda: emb(draw({k})).detach()), in_thread(lambda: emb.weight.sum().item())
torch.func.functional_call(emb, {'weight': emb.weight * 2}, (draw({k}),)).sum().backward()
ema.update_parameters(model); ema.module.emb(draw({k}))
with torch.no_grad(): emb.weight.add_(emb.weight.grad, alpha=-0.1)
torch.utils.swap_tensors(query, nn.Parameter(torch.ones_like(query)))
model.to(torch.float64); model.double(); model.cpu(); None
""".strip().splitlines()

# Not those of hooks, which `hooks` does not list; of gradients that torch keeps though rows or dtypes are others; and of state
# that is read without asking for all of it first.
_OTHERS = ("hook", "More rows", "half and back", "State of the optimizer")
CHOSEN = [case for case in CASES if not (case.refused or any(words in case.title for words in _OTHERS))]
PARTS = [part for case in CHOSEN for part in case.parts if "hook" not in part]
LENGTH, NEAR, ANY = 16, 3, 2


class PlannedError(Exception):
    """Raised in a step on purpose."""


class ProgramWorld(World):
    """The names that programs use beside those of cases."""

    def __init__(self, setting, ours):
        super().__init__(setting, ours, torch.float64, "fresh")
        self.lazy = setting.table.get("idle") == "lazy"
        self.names |= {
            "kept": {}, "hooks": [], "seen": [], "draw": self.draw, "values": self.values, "backward": self.backward,
            "closure": self.closure, "attempt": self.attempt, "attempt_backward": self.attempt_backward,
            "decay": self.decay, "assign": self.assign, "update": self.update, "use": self.take,
            "take_over": self.take_over, "detach": self.detach,
            "through": saved, "in_thread": elsewhere,
            "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2),
            "ema": torch.optim.swa_utils.AveragedModel(self.names["model"]),
        }  # fmt: skip

    @staticmethod
    def draw(k):
        return torch.randint(0, ROWS, (4,), generator=torch.Generator().manual_seed(k))

    @staticmethod
    def values(k):
        return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(k))

    @staticmethod
    def backward(loss):
        if loss is not None and loss.requires_grad:
            loss.backward()

    @staticmethod
    def detach(module):
        module.weight.grad = module.weight.grad.detach()

    def attempt_backward(self, loss):
        """Go back through a graph that a step may have made useless."""
        if self.names["opt"].param_groups[0].get("fused"):  # torch does not tell autograd of it, and we do
            return None
        try:
            loss.backward()
        except RuntimeError as error:
            return "modified by an inplace operation" * ("inplace" in str(error))
        return "works"

    def closure(self, k):
        with torch.enable_grad():
            self.names["opt"].zero_grad()
            loss = self.loss(k)
            loss.backward()
            # A look at the weight within a step.
            self.names["seen"].append(self.names["emb"].weight.norm().item())
        return loss

    def take(self, model):
        self.names |= {"emb": model.emb, "items": model.items, "query": model.query}

    def take_over(self, model):
        self.take(model)
        self.names["opt"] = self.names["make_opt"](model.parameters())

    def assign(self, rows):
        """Load with ``assign=True``, where torch makes a new parameter, which has no hooks, and no other module has it."""
        model = self.names["model"]
        owners = [each for each in model.modules() if getattr(each, "weight", None) is model.emb.weight]
        if not self.names["hooks"] and len(owners) == 1:
            self.names["kept"].clear()
            model.load_state_dict({"emb.weight": rows}, strict=False, assign=True)
            self.take_over(model)

    def update(self, scaler):
        """Step, or skip the step, and clear what may be infinite."""
        scaler.step(self.names["opt"])
        scaler.update()
        self.names["opt"].zero_grad()

    def decay(self, factor):
        if not self.lazy:
            self.names["opt"].param_groups[0]["weight_decay"] = factor

    def attempt(self, where):
        """Take a step that fails before, in, or after the work of the optimizer."""
        opt = self.names["opt"]

        def fail(*_):
            raise PlannedError

        if where != "in":
            hook = (opt.register_step_pre_hook if where == "before" else opt.register_step_post_hook)(fail)
            with contextlib.suppress(PlannedError):
                opt.step()
            hook.remove()
            return
        opt.step()  # the first state: what torch leaves of one made by a step that failed is not compared
        kind, original = type(opt), type(opt)._init_group

        def raising(self, *args, **kwargs):
            found = original(self, *args, **kwargs)
            return fail() if self is opt else found  # and not the trial of an optimizer like it

        kind._init_group = raising
        try:
            with contextlib.suppress(PlannedError):
                opt.step()
        finally:
            kind._init_group = original

    def run_statement(self, statement, number):
        """Run a statement and go back from what it gives, where that has a gradient."""
        with defaults(self.dtype):
            torch.manual_seed(number)
            result = run_code(statement, statement, self.names)
            for it in tensors(result):
                if it.requires_grad and it.grad_fn is not None and it.is_floating_point():
                    self.backward(it.sum())
        return plain(result)

    def state(self):
        """Return all that can be seen of the model and the optimizer; to look brings idle rows up to date."""
        found = {}
        for name, param in self.names["model"].named_parameters():
            found[name] = [plain(param), plain(param.grad), param.requires_grad]
        state = dict(sorted(copy.deepcopy(self.names["opt"].state_dict()["state"]).items()))
        return {**found, "opt": plain(state), "seen": plain(self.names["seen"])}


def plain(value):
    """Return `value` with tensors that are dense, ordinary and apart from their sources; None for what is not compared."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value.to_dense().clone() if value.layout != torch.strided else value.clone()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if isinstance(key, str | int)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | np.ndarray) else None


@dataclass
class Outcome:
    """What came of a program: `kind` is "equal", "refused" or "differs"."""

    kind: str
    at: int = 0
    text: str = ""


def run(program, setting, watch):
    """Run a program on both; `watch` looks at everything after every statement, else only at the end."""
    with warnings.catch_warnings(), setting.hidden():
        warnings.simplefilter("ignore")
        worlds = ProgramWorld(setting, False), ProgramWorld(setting, True)
        for number, statement in enumerate(program):
            if setting.copies and "kept['numpy'].sum()" in statement:
                continue  # the array is over a copy, which steps do not change (docs/limits.md)
            results = []
            for world in worlds:
                try:
                    results.append(world.run_statement(statement, number))
                except Exception as error:
                    results.append(error)
            theirs, ours = results
            if isinstance(ours, Exception) or isinstance(theirs, Exception):
                if isinstance(ours, Exception) and isinstance(theirs, Exception):
                    if "backward through the graph a second time" in str(theirs):
                        # What came of the gradients before, ours may leave out (docs/limits.md).
                        return Outcome("refused", number, str(theirs))
                    continue
                # With max_norm a lookup writes to the weight, which a graph of torch may need as it was; ours has it.
                written = "modified by an inplace operation" in str(theirs) and "max_norm" in setting.module
                refused = isinstance(ours, SpeedtransferError) or "read-only" in str(ours) or written
                return Outcome("refused" if refused else "differs", number, f"ours: {ours!r}; torch: {theirs!r}")
            try:
                assert_equal(ours, theirs, 1e-9, "result")
                if watch or number == len(program) - 1:
                    assert_equal(worlds[1].state(), worlds[0].state(), 1e-9, "state")
            except AssertionError as error:
                # A gradient of zeros times NaN is NaN in all rows of torch's, in ours in the active ones (docs/limits.md).
                params = list(worlds[0].names["model"].parameters())
                lost = any(one is not None and plain(one).isnan().any() for p in params for one in (p, p.grad))
                return Outcome("refused" if lost else "differs", number, str(error))
    return Outcome("equal")


def draw(seed):
    """Return a random program; those of all seeds have every statement."""
    chance = random.Random(seed)
    few = [STATEMENTS[(NEAR * seed + shift) % len(STATEMENTS)] for shift in range(NEAR)] + chance.sample(PARTS, ANY)
    chosen = [chance.choice(TRAINING if chance.random() < 0.5 else few) for _ in range(LENGTH)]
    return [statement.replace("{k}", str(chance.randrange(10))) for statement in chosen]


def shrink(program, setting, watch, kind):
    shorter = True
    while shorter:
        shorter = False
        for i in range(len(program)):
            less = program[:i] + program[i + 1 :]
            if less and run(less, setting, watch).kind == kind:
                program, shorter = less, True
                break
    return program


SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True})
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.1})
LAZY = {"idle": "lazy"}
SETTINGS = (
    Setting("exact-adamw", *ADAMW),
    Setting("exact-adam-coupled", torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    Setting("exact-adamw-fused", torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1, "fused": True}),
    Setting("exact-adamw-foreach", torch.optim.AdamW, {"lr": 0.05, "amsgrad": True, "foreach": True}),
    Setting("exact-sgd", torch.optim.SGD, {"lr": 0.1}),
    Setting("exact-sgd-momentum", *SGD),
    Setting("exact-adagrad", torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    Setting("exact-rmsprop", torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    Setting("exact-rprop", torch.optim.Rprop, {"lr": 0.01}),
    Setting("exact-nadam", torch.optim.NAdam, {"lr": 0.05, "weight_decay": 0.1}),
    Setting("exact-asgd", torch.optim.ASGD, {"lr": 0.05}),
    Setting("lazy-adagrad", *ADAGRAD, {}, LAZY),
    Setting("lazy-sgd", torch.optim.SGD, {"lr": 0.1}, {}, LAZY),
    Setting("padded-adamw", *ADAMW, {"padding_idx": 2}),
    Setting("normed-adamw", *ADAMW, {"max_norm": 0.8}),
    Setting("normed-sgd", *SGD, {"max_norm": 0.8}),
    Setting("freq-adamw", *ADAMW, {"scale_grad_by_freq": True}),
    Setting("copies-adamw", *ADAMW, copies=True),
    Setting("copies-lazy-adagrad", *ADAGRAD, {}, LAZY, copies=True),
    Setting("replaced-adamw", *ADAMW),
    Setting("tensor-adamw", torch.optim.AdamW, {"lr": torch.tensor(0.05, dtype=torch.float64)}),
    Setting("device-adamw", *ADAMW, {}, {"memory": "device"}),
    Setting("adamw-single", torch.optim.AdamW, {"lr": 0.05, "foreach": False}),
)
