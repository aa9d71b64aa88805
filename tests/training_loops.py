"""The ways that a training loop may go between two steps, as programs; test_training_loops.py runs them.

A paragraph is a program, and the comment on top its title. A line ``# rounding: NUMBER`` says that sums are made in another
order; ``# dense`` marks what torch cannot do with sparse gradients. Names: `module` and its optimizer `opt`; `zero_grad` and
`step`, which takes what makes the step if that is not `opt.step`; `loss` of ids and target, `batches` of these, by threes in
`threes`; `device` has the tensors; `train` makes ordinary steps, `fail` one that fails; `put` writes rows; what goes into
`seen` is compared, too.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Program:
    """A loop of training."""

    title: str
    code: str
    rounding: float
    dense: bool

    def __str__(self) -> str:
        return self.title


def parse(text: str) -> list[Program]:
    """Return the programs of a text."""
    programs = []
    for paragraph in text.strip().split("\n\n"):
        lines, rounding, dense = paragraph.splitlines(), 0.0, False
        title = lines.pop(0).removeprefix("# ")
        while lines[0].startswith("# "):
            mark, _, number = lines.pop(0)[2:].partition(": ")
            rounding, dense = (float(number), dense) if mark == "rounding" else (rounding, mark == "dense" or dense)
        programs.append(Program(title, "\n".join(lines), rounding, dense))
    return programs


PROGRAMS = parse(
    """
# several forwards before one backward
# rounding: 1e-6
for first, second, third in threes:
    zero_grad()
    (loss(*first) + loss(*second) + loss(*third)).backward()
    step()

# several backwards before one step
# rounding: 1e-6
for first, second, third in threes:
    zero_grad()
    (loss(*first) + loss(*second)).backward()
    loss(*third).backward()
    step()

# the same rows in two backwards
# rounding: 1e-6
for ids, target in batches:
    zero_grad()
    loss(ids, target).backward()
    loss(ids.flip(0), target).backward()
    step()

# gradients set to zero
for batch in batches:
    zero_grad(set_to_none=False)
    loss(*batch).backward()
    step()

# a gradient discarded before the step
for discarded, kept, _ in threes:
    zero_grad()
    loss(*discarded).backward()
    zero_grad()
    loss(*kept).backward()
    step()

# a gradient set to zero before the step
for discarded, kept, _ in threes:
    zero_grad()
    loss(*discarded).backward()
    zero_grad(set_to_none=False)
    loss(*kept).backward()
    step()

# a gradient discarded and then a step
train(batches[:4])
zero_grad()
loss(*batches[4]).backward()
zero_grad()
step()

# steps without a backward
step()
train(batches[:3])
zero_grad()
step()
train(batches[3:6])

# the gradient stays until somebody clears it
for batch in batches[:2]:
    zero_grad()
    loss(*batch).backward()
    step()
    seen.append(module.weight.grad.to_dense().clone())
    step()
loss(*batches[0]).backward()
seen.append(module.weight.grad.to_dense().clone())
zero_grad()
seen.append(module.weight.grad is None)

# a closure
for batch in batches[:8]:
    def closure(batch=batch):
        zero_grad()
        value = loss(*batch)
        value.backward()
        return value
    seen.append(step(lambda: opt.step(closure)).detach())

# a closure by name
for batch in batches[:4]:
    def closure(batch=batch):
        zero_grad()
        value = loss(*batch)
        value.backward()
        return value
    seen.append(step(lambda: opt.step(closure=closure)).detach())

# a hand on the gradient
for number, batch in enumerate(batches[:9]):
    zero_grad()
    loss(*batch).backward()
    if number % 3 == 0:
        module.weight.grad.mul_(0.5)
    elif number % 3 == 1:
        module.weight.grad = module.weight.grad * 2
    else:
        module.weight.grad.mul_(0)
    step()

# batches of no ids, first and later
train([empty])
train(batches[:3])
train([empty] * 2)
train(batches[3:6])

# rows written before backward
for ids, target in batches[:6]:
    zero_grad()
    value = loss(ids, target)
    put([int(ids[0, 0]), 40])
    value.backward()
    step()

# rows written before the step
for ids, target in batches[:6]:
    zero_grad()
    loss(ids, target).backward()
    put([int(ids[0, 0]), 40])
    step()

# all rows loaded before the step
train(batches[:3])
zero_grad()
loss(*batches[3]).backward()
module.load_state_dict({"weight": torch.ones_like(module.weight).cumsum(0)})
step()

# weights and then state loaded again
train(batches[:4])
saved = copy.deepcopy((module.state_dict(), opt.state_dict()))
train(batches[4:8])
module.load_state_dict(saved[0])
train(batches[8:12])
opt.load_state_dict(saved[1])
train(batches[12:16])

# state emptied
fresh, adagrad = copy.deepcopy(opt.state_dict()), isinstance(opt, torch.optim.Adagrad)  # which makes none in a step
for empty in (opt.state.clear, lambda: setattr(opt, "state", collections.defaultdict(dict))):
    train(batches[:4])
    opt.load_state_dict(copy.deepcopy(fresh)) if adagrad else empty()
    train(batches[4:8])
opt.load_state_dict(copy.deepcopy(fresh))
train(batches[8:12])

# steps that fail, the first one too
for number, batch in enumerate(batches[:12]):
    zero_grad()
    loss(*batch).backward()
    if number in (0, 4, 8):
        fail()
    if number != 8:
        step()
fail()

# hyperparameters edited
# dense
for number, batch in enumerate(batches):
    train([batch])
    edits = {"lr": 0.02, "weight_decay": 0.1} if number == 4 else {"momentum": 0.8, "eps": 1e-3}
    opt.param_groups[0].update({name: edits[name] for name in edits if number in (4, 9) and name in opt.param_groups[0]})

# the norm of gradients clipped
# rounding: 1e-5
# dense
for number, batch in enumerate(batches[:12]):
    zero_grad()
    loss(*batch).backward()
    seen.append(nn.utils.clip_grad_norm_(module.parameters(), 2.0, norm_type=(2.0, 1.0, math.inf)[number % 3]))
    step()

# values of gradients clipped between two backwards
# rounding: 1e-6
# dense
for first, second, _ in threes:
    zero_grad()
    loss(*first).backward()
    nn.utils.clip_grad_value_(module.parameters(), 0.3)
    loss(*second).backward()
    step()

# a scaler that skips steps, the first one too
scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=5)
for number, batch in enumerate(batches[:16]):
    zero_grad()
    scaler.scale(loss(*batch) * (math.inf if number in (0, 4, 9, 10) else 1.0)).backward()
    step(lambda: scaler.step(opt))
    scaler.update()
seen.append(scaler.get_scale())
seen.append([float(state["step"]) for state in opt.state.values() if "step" in state])

# a scaler, and gradients clipped
# dense
scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=5)
for number, batch in enumerate(batches[:16]):
    zero_grad()
    scaler.scale(loss(*batch) * (math.nan if number in (4, 9, 10) else 1.0)).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_value_(module.parameters(), 0.5)
    step(lambda: scaler.step(opt))
    scaler.update()
seen.append(scaler.get_scale())
"""
)
