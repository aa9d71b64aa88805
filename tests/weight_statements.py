"""The vocabulary of random programs (weight_programs.py): statements with `{k}` in place of a number."""

from __future__ import annotations


def _statements(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.strip().split("\n\n"))


# The loop of training, drawn more often than the others.
TRAINING = _statements(
    """
opt.zero_grad(); backward(loss({k}))

backward(loss({k}))

opt.step()

opt.step()

opt.zero_grad(); backward(loss({k})); opt.step()

opt.zero_grad()
"""
)

VOCABULARY = _statements(
    """
opt.zero_grad(set_to_none=False)

emb.zero_grad()

emb.weight.grad = None

emb(ids({k})).detach()

with torch.no_grad(): out = emb(ids({k}))

out = emb(ids({k})); out *= 0.5; backward(out.pow(2).sum())

backward(emb.weight.pow(2).sum() * 0.01)

backward(loss({k}) + emb.weight.norm() * 0.1)

backward((emb.weight @ lin.weight.T).tanh().sum())

backward(F.embedding(ids({k}), emb.weight).pow(2).sum())

backward(emb.weight[ids({k})].pow(2).sum()); emb.weight[{k}]

backward(torch.cat([emb.weight, other.weight]).pow(2).mean())

backward(loss({k}) + other(ids({k} + 1)).pow(3).sum())

kept['graph'] = loss({k})

backward(kept.pop('graph', None))

kept['leaf'] = emb.weight * 2

backward(kept.pop('leaf', torch.zeros(2)).pow(2).sum())

kept['retain'] = loss({k}); kept['retain'].backward(retain_graph=True)

backward(kept.pop('retain', None))

nn.utils.clip_grad_norm_(model.parameters(), 0.05)

nn.utils.clip_grad_value_(model.parameters(), 0.01)

[p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None]

emb.weight.grad.add_(0.1) if emb.weight.grad is not None else 0

emb.weight.grad = torch.full_like(emb.weight, 0.25)

emb.weight.grad = emb.weight.grad.clone() if emb.weight.grad is not None else None

kept['grad'] = emb.weight.grad

emb.weight.grad = kept.get('grad')

kept['grad'] is None or kept['grad'].norm()

emb.weight.grad[{k}] = 0.5

kept['buffer'] = torch.zeros_like(emb.weight); emb.weight.grad = kept['buffer']

opt.add_param_group(dict(params=[torch.nn.Parameter(torch.ones(2))]))

opt.state_dict(); opt.state[emb.weight]['exp_avg'].zero_()

opt.param_groups[0]['lr'] = 0.0

opt.param_groups[0].update(betas=(0.5, 0.9))

torch.utils.swap_tensors(lin.weight, nn.Parameter(torch.ones_like(lin.weight)))

with torch.no_grad(): emb.weight.copy_(other.weight)

with torch.no_grad(): emb.weight.lerp_(other.weight, 0.5)

with torch.no_grad(): other.weight[ids({k})] = emb.weight[ids({k})]

other.load_state_dict(emb.state_dict())

backward(emb(ids({k})).sum() + emb.weight.sum() * 0 + (emb.weight * other.weight).sum())

backward(F.normalize(emb.weight, dim=1)[ids({k})].sum())

with torch.no_grad(): emb.weight[ids({k})] += emb.weight[ids({k})].mean()

loss({k}).backward(create_graph=True)
emb.weight.grad = emb.weight.grad.detach()
[p.grad.detach_() for p in lin.parameters()]

x = emb(ids({k})); x.register_hook(lambda g: g * 3); backward(x.sum())

x = emb(ids({k})); x.retain_grad(); backward(x.pow(2).sum()); x.grad.sum()

x = emb(ids({k})); y = x.detach().requires_grad_(); backward(y.pow(3).sum()); x.backward(y.grad)

backward((emb(ids({k})) * emb(ids({k} + 1)) * emb.weight[{k}]).sum())

with torch.no_grad(): kept['leafless'] = emb.weight

kept['frozen'] = emb(ids({k})).sum()
emb.weight.requires_grad_(False)
backward(kept.pop('frozen'))
emb.weight.requires_grad_(True)

kept['saved'] = emb.weight.pow(2).sum(); opt.step(); worked = attempt_backward(kept.pop('saved'))

kept['saved'] = emb(ids({k})).pow(2).sum(); emb.weight.data.mul_(0.5); backward(kept.pop('saved'))

torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

kept['grad'] = emb.weight.grad
emb.weight.grad = None
backward(loss({k}))
emb.weight.grad.add_(kept['grad']) if kept['grad'] is not None else 0

kept['buffer'].zero_()

kept['buffer'].mul_(0.5)

kept['buffer'][{k}] = 0.1

kept['buffer'].sum()

kept['grad_data'] = emb.weight.grad.detach()

kept['grad_data'].mul_(0.5)

kept['grads'] = [p.grad for p in model.parameters()]

[g.mul_(2) for g in kept['grads']]

for p, g in zip(model.parameters(), kept['grads']): p.grad = g

emb.weight.grad is kept['grads'][0], emb.weight.grad is kept['buffer']

for p, g in zip(model.parameters(), [p.grad.clone() for p in model.parameters()]): p.grad = g

emb.weight.grad.data.mul_(2)

with torch.no_grad(): emb.weight[{k}] = 0.5

with torch.no_grad(): emb.weight[ids({k})] = 0.25

with torch.no_grad(): emb.weight.mul_(0.9)

with torch.no_grad(): emb.weight.add_(emb.weight.grad, alpha=-0.1)

emb.weight.data.mul_(0.9)

emb.weight.data[{k}] = 0

emb.weight.data = emb.weight.data * 1.5

emb.weight.data = full({k})

emb.weight.data.copy_(full({k}))

kept['data'] = emb.weight.data

emb.weight.sum(); kept['data'].add_(0.1)

emb.weight.sum(); kept['data'][{k}] = -1

emb.weight.sum(); kept['data'].clone()

kept['row'] = emb.weight.data[{k}]

emb.weight.sum(); kept['row'].mul_(2)

kept['view'] = emb.weight.detach().view(-1)

emb.weight.sum(); kept['view'][{k}] = 3

kept['numpy'] = emb.weight.detach().numpy()

emb.weight.sum(); kept['numpy'].sum()

emb.weight.sum(); kept['numpy'][{k}] += 0.5

nn.init.constant_(emb.weight, 0.1)

torch.manual_seed({k}); nn.init.normal_(emb.weight)

torch.manual_seed({k}); emb.reset_parameters()

emb.weight.requires_grad_(False)

emb.weight.requires_grad_(True)

emb.requires_grad_({k} % 2 == 0)

model.load_state_dict(copy.deepcopy(kept['model'])) if 'model' in kept else None

kept['model'] = copy.deepcopy(model.state_dict())

kept['model_live'] = model.state_dict()

emb.weight.sum(); kept['model_live']['emb.weight'].sum()

emb.weight.sum(); model.load_state_dict(kept['model_live'])

assert not hooks and other.weight is not emb.weight
kept.clear()
model.load_state_dict({{'emb.weight': full({k})}}, strict=False, assign=True)
opt = make_opt(model.parameters())
opt.zero_grad()

kept['opt'] = copy.deepcopy(opt.state_dict())

opt.load_state_dict(copy.deepcopy(kept['opt'])) if 'opt' in kept else None

kept['opt_live'] = opt.state_dict()

opt.load_state_dict(kept['opt_live'])

opt = make_opt(model.parameters())

opt = make_opt([dict(params=[emb.weight], lr=0.01), dict(params=[other.weight, *lin.parameters()])])

opt.param_groups[0]['lr'] *= 0.5

decay(0.05)

opt.state.clear()

opt.state[emb.weight].clear()

opt.state_dict(); opt.state.pop(emb.weight, None)

opt.state_dict(); [v.mul_(0.5) for v in opt.state.get(emb.weight, dict()).values() if torch.is_tensor(v) and v.dim()]

opt.state_dict(); [v.sum() for v in opt.state.get(emb.weight, dict()).values() if torch.is_tensor(v)]

copied = copy.deepcopy(model); copied.emb.weight.sum(), copied.emb.weight.grad

model, opt = copy.deepcopy((model, opt)); emb, other, lin = model.emb, model.other, model.lin

model = pickle.loads(pickle.dumps(model))
emb, other, lin = model.emb, model.other, model.lin
opt = make_opt(model.parameters())

model, opt = pickle.loads(pickle.dumps((model, opt))); emb, other, lin = model.emb, model.other, model.lin

through(model.state_dict())['emb.weight'].sum()

through(emb.weight), through(list(model.parameters()))[0].sum()

emb.weight = nn.Parameter(full({k})); opt = make_opt(model.parameters())

emb.weight = nn.Parameter(emb.weight.detach().clone()); opt = make_opt(model.parameters())

kept['old'] = emb.weight

emb.weight = kept.get('old', emb.weight); opt = make_opt(model.parameters())

kept['old'].sum(), kept['old'].grad

opt.step(lambda: closure({k}))

opt.step(closure=lambda: closure({k}))

failing('before'); attempt(opt.step)

failing('in'); attempt(opt.step)

failing('in'); attempt(opt.step); opt.zero_grad()

failing('after'); attempt(opt.step)

opt.register_step_pre_hook(lambda o, a, k: seen.append(emb.weight.sum().item()))

opt.register_step_post_hook(lambda o, a, k: seen.append(emb.weight.sum().item()))

opt.register_step_post_hook(lambda o, a, k: emb.weight.data.clamp_(-0.5, 0.5))

opt.register_step_pre_hook(lambda o, a, k: (nn.utils.clip_grad_norm_(model.parameters(), 0.3), None)[1])

hooks.append(emb.weight.register_hook(lambda g: g * 2))

hooks.append(emb.weight.register_hook(lambda g: None))

hooks.append(emb.weight.register_hook(lambda g: seen.append(g.norm().item())))

hooks.append(emb.weight.register_hook(lambda g: g + 0.01))

hooks.append(emb.weight.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad.norm().item(), p.sum().item()))))

hooks.append(emb.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1]))

[h.remove() for h in hooks]; hooks.clear()

torch.autograd.grad(loss({k}), [emb.weight])

torch.autograd.grad(loss({k}) + emb.weight.sum(), emb.weight)

emb.weight.grad = torch.autograd.grad(loss({k}), emb.weight)[0]

loss({k}).backward(inputs=[emb.weight])

loss({k}).backward(inputs=[lin.weight])

penalty = torch.autograd.grad(loss({k}), lin.weight, create_graph=True)[0].pow(2).sum(); backward(penalty)

(g,) = torch.autograd.grad(loss({k}), [emb.weight], create_graph=True); backward(g.pow(2).sum())

(g,) = torch.autograd.grad(emb.weight.pow(3).sum(), [emb.weight], create_graph=True); backward(g.pow(2).sum())

torch.utils.checkpoint.checkpoint(lambda: loss({k}), use_reentrant=False).backward()

one = torch.ones(1, requires_grad=True)
torch.utils.checkpoint.checkpoint(lambda x: x.sum() + loss({k}), one, use_reentrant=True).backward()

with torch.inference_mode(): kept['inf'] = emb(ids({k})); emb.weight.sum()

with torch.inference_mode(): emb.weight.mul_(0.5)

with torch.inference_mode(): kept['inf_sum'] = emb.weight.detach().sum().item()

with torch.autocast('cpu', dtype=torch.bfloat16): loss({k}).item()

scaler.scale(loss({k})).backward(); scaler.unscale_(opt); scaler.step(opt); scaler.update()

scaler.scale(loss({k})).backward(); scaler.step(opt); scaler.update()

opt.zero_grad()
scaler.scale(loss({k}) * (float('inf') if {k} % 2 else 1)).backward()
scaler.step(opt)
scaler.update()
opt.zero_grad()

model.apply(init)

scheduler.step()

in_thread(lambda: emb(ids({k})).detach()), in_thread(lambda: emb.weight.sum().item())

torch.nn.utils.parameters_to_vector(model.parameters()).sum()

vector = torch.nn.utils.parameters_to_vector(model.parameters())
torch.nn.utils.vector_to_parameters(vector.detach() * 0.9, model.parameters())

torch.func.functional_call(model, {{'emb.weight': emb.weight * 2}}, (ids({k}),)).sum().backward()

torch.func.functional_call(model, {{n: p * 0.5 for n, p in model.named_parameters()}}, (ids({k}),)).sum().backward()

ema.update_parameters(model); ema(ids({k}))

swap(copy.deepcopy(ema.module.state_dict()))

lin2 = nn.Linear(DIM, ROWS, bias=False); lin2.weight = emb.weight; backward(lin2(emb(ids({k}))).logsumexp(-1).sum())

other.weight = emb.weight; opt = make_opt(model.parameters())

bag = F.embedding_bag(ids({k}).view(1, -1), emb.weight, mode='sum'); backward(bag.pow(2).sum())

for p in model.parameters(): p.grad = torch.zeros_like(p) if p.grad is None else p.grad

with torch.no_grad(): [p.sub_(0.1 * p.grad) for p in model.parameters() if p.grad is not None]

with torch.no_grad(): [p.data.add_(p.grad, alpha=-0.1) for p in model.parameters() if p.grad is not None]

emb.weight.grad is None, emb.weight.requires_grad, emb.weight.is_leaf, emb.weight.grad_fn

emb.weight.grad is not None and emb.weight.grad.abs().max()

torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)

torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])

model.to(torch.float64); model.double(); model.cpu()

emb.weight.mean(), emb.weight.norm(dim=1), emb.weight.tolist()[{k}]

emb.weight.grad = None; emb.weight.requires_grad_(True); backward(loss({k})); opt.step()
"""
)
