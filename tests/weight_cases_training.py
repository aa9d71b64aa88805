"""What people do with the gradient of `emb.weight`, with the weight itself, and around a training loop: see weight_cases.py.

`loss()` is a loss of rows of `emb` and `items` and of `query`; `step()` zeroes gradients, goes back from it, and steps `opt`.
"""

from weight_cases import READ, WRITE, parse

# Between backward and step.
GRAD = parse(
    "grad",
    """
emb.weight.grad.shape, emb.weight.grad.dtype, emb.weight.grad.device, emb.weight.grad.numel(), len(emb.weight.grad)
emb.weight.grad[3], emb.weight.grad[ids], emb.weight.grad[index], emb.weight.grad[mask], emb.weight.grad[2:9, 1]
emb.weight.grad.clone(), emb.weight.grad.detach().cpu().numpy(), emb.weight.grad.tolist(), emb.weight.grad.data[3]
emb.weight.grad * 2, emb.weight.grad + emb.weight.detach(), emb.weight.grad.flatten(), emb.weight.grad.t() @ emb.weight.grad
emb.weight.grad.div(0.01, rounding_mode="floor"), emb.weight.grad.div_(torch.tensor(0.01), rounding_mode="trunc")
torch.cat([p.grad.flatten() for p in model.parameters()]), [p.grad.norm().item() for p in model.parameters()]
emb.weight.grad.is_sparse, emb.weight.grad.layout, emb.weight.grad.requires_grad, emb.weight.grad is None
emb.weight.grad is emb.weight.grad, [p.grad is None for p in model.parameters()]
nn.utils.clip_grad_norm_(model.parameters(), 0.1)
nn.utils.clip_grad_norm_(emb.parameters(), 0.05, norm_type=1), nn.utils.clip_grad_norm_(items.weight, 1.0, norm_type="inf")
nn.utils.clip_grad_value_(model.parameters(), 0.02)
emb.weight.grad *= 0.5
emb.weight.grad.mul_(mask[:, None])
emb.weight.grad.data.mul_(0.1)
emb.weight.grad.apply_(lambda value: value + 0.01)
emb.weight.grad.share_memory_().mul_(2)
torch.from_dlpack(emb.weight.grad)[3] = 0.5
np.from_dlpack(emb.weight.grad.detach()).sum()
emb.weight.grad.zero_()
emb.weight.grad.add_(full, alpha=0.01)
emb.weight.grad.copy_(full)
torch.clamp(emb.weight.grad, -0.02, 0.02, out=emb.weight.grad), torch.mul(emb.weight.grad, 0.5, out=emb.weight.grad)
torch.mul(emb.weight.grad, 2, out=torch.empty(40, 6)), torch.neg(full, out=emb.weight.grad)
emb.weight.grad = full.clone()
emb.weight.grad = torch.zeros_like(emb.weight)
emb.weight.grad = F.normalize(emb.weight.grad, dim=1)
emb.weight.grad.data = full.clone()
opt.zero_grad(), emb.weight.grad is None
model.zero_grad(), emb.weight.grad is None
emb.zero_grad(set_to_none=False), emb.weight.grad.abs().sum()

# Every gradient by torch._foreach
torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)

# Weights by their gradients by torch._foreach
with torch.no_grad():
    for weights in ([emb.weight], [emb.weight.data]):
        torch._foreach_add_(weights, [emb.weight.grad], alpha=-0.1)
        torch._foreach_addcmul_(weights, [emb.weight.grad], [emb.weight.grad], value=-0.1)
        torch._foreach_lerp_(weights, [emb.weight.grad], 0.25)
    torch._foreach_copy_([items.weight], [items.weight.grad])
""",
)

# The parameter itself: put in place, tied, shared, frozen, copied, saved.
SWAP = parse(
    "swap",
    """
# A new parameter, with the optimizer made before
# refused (copies): the old parameter has no rows of its own
emb.weight = nn.Parameter(full.clone())
step()
opt = make_opt(model.parameters())
emb.weight

# More rows by a new parameter
emb.weight = nn.Parameter(torch.cat([emb.weight.data, rows]))
emb.num_embeddings = len(emb.weight)
opt = make_opt(model.parameters())
emb(torch.tensor([40, 43])), emb.weight.shape

# lm_head.weight = emb.weight
lm_head = nn.Linear(6, 40, bias=False)
lm_head.weight = emb.weight
F.cross_entropy(lm_head(emb(ids[:, 0])), ids[:, 1]).backward()
opt.step()
lm_head.weight, lm_head(query)

# emb.weight = lm_head.weight
model.lm_head = nn.Linear(6, 40, bias=False)
emb.weight = model.lm_head.weight
opt = make_opt(model.parameters())
for _ in range(3):
    opt.zero_grad()
    F.cross_entropy(model.lm_head(emb(ids[:, 0])), ids[:, 1]).backward()
    opt.step()
emb.weight is model.lm_head.weight, emb.weight, len(list(model.parameters()))

# Frozen by detach_, and thawed
found = emb.weight.detach_() is emb.weight, emb.weight.requires_grad, emb(ids).requires_grad
emb.weight.mul_(0.5)
emb.weight.requires_grad_()
step()
found

# Penalty on a frozen table
emb.requires_grad_(False)
(emb.weight.pow(2).sum() + loss()).backward()
emb.weight.grad

# Add a parameter group
opt = make_opt([query, items.weight])
opt.add_param_group({"params": [emb.weight], "lr": 0.02})
step()

# A subclass with its own reset_parameters
class Scaled(Embedding):
    def reset_parameters(self):
        self.weight.data.normal_(0, 1.0 / self.embedding_dim)
        if self.padding_idx is not None:
            self.weight.data[self.padding_idx].fill_(0)
model.emb = emb = Scaled(40, 6, padding_idx=1)
opt = make_opt(model.parameters())
emb.weight

# The padding row of a whole-table use
model.emb = emb = Embedding(40, 6, padding_idx=3)
opt = make_opt(model.parameters())
(query @ emb.weight.T).sum().backward()
opt.step()
emb.weight[3]

# State of the optimizer
opt.state[emb.weight] if emb.weight in opt.state else None

# A parametrization
class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight
nn.utils.parametrize.register_parametrization(emb, "weight", Double())
opt = make_opt(model.parameters())
step()
nn.utils.parametrize.remove_parametrizations(emb, "weight")
opt = make_opt(model.parameters())
emb.weight

# The old spectral_norm
nn.utils.spectral_norm(emb)
opt = make_opt(model.parameters())
step()
emb.weight = emb.weight.detach()
others = [copy.deepcopy(emb), pickle.loads(pickle.dumps(emb))]
for other in others:
    own = torch.optim.SGD(other.parameters(), 0.1)
    other(ids).sum().backward()
    own.step()
emb.weight, [list(other.parameters()) for other in others], [other.eval()(ids) for other in others]

# Pruned
from torch.nn.utils import prune
prune.l1_unstructured(emb, "weight", 0.3)
opt = make_opt(model.parameters())
step()
prune.remove(emb, "weight")
opt = make_opt(model.parameters())
emb.weight

# Delete
weight = emb.weight
del emb.weight
hasattr(emb, "weight"), list(emb.parameters())
emb.weight = weight
emb.weight is weight

# The weight before goes on with its optimizer
# refused (copies): the rows are those of the weight in its place
opt.zero_grad()
emb(ids).sum().backward()
before = emb.weight
emb.weight = nn.Parameter(torch.ones(40, 6))
opt.step()
opt = make_opt(model.parameters())
before.detach()[ids], emb.weight

# The weight before keeps its gradient
# refused (copies): the rows are those of the weight in its place
before, own = emb.weight, torch.optim.SGD([emb.weight], lr=0.1)
opt.zero_grad()
emb(ids).sum().backward()
emb.weight = nn.Parameter(torch.ones(40, 6))
own.step()
opt = make_opt(model.parameters())
before.detach(), before.grad.to_dense(), emb.weight.grad is None

# A graph of the weight before sends its gradient there
# refused (copies): backward comes to rows
opt.zero_grad()
before, losses = emb.weight, (emb(ids).sum(), emb.weight.pow(2).sum())
emb.weight = nn.Parameter(torch.ones(40, 6))
for made in losses:
    made.backward()
opt = make_opt(model.parameters())
before.grad.to_dense(), emb.weight.grad is None
""",
)

# Loops: hooks, optimizers written by hand, averages, everything around a step.
TRAIN = parse(
    "train",
    """
# A step in the hook after the gradient is there
each = {p: make_opt([p]) for p in model.parameters()}
def step_now(p):
    each[p].step()
    each[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_now)
for _ in range(3):
    loss().backward()
opt = make_opt([nn.Parameter(torch.zeros(1))])

torch.autograd.grad(loss(), emb.weight)

torch.autograd.grad(loss(), [emb.weight, query]), emb.weight.grad

torch.autograd.grad(emb(ids).sum(), list(model.parameters()), allow_unused=True)

loss().backward(inputs=[emb.weight])
opt.step()
query.grad

loss().backward(inputs=[query])
emb.weight.grad

# EMA put in for evaluation, and the weights put back
shadow = {name: p.data.clone() * 0.5 for name, p in model.named_parameters()}
backup = {}
for name, p in model.named_parameters():
    backup[name] = p.data
    p.data = shadow[name]
evaluated = emb(ids)
for name, p in model.named_parameters():
    p.data = backup[name]
evaluated, emb(ids)

# Hooks see the gradient of all uses once: a clipped sum is no sum of clipped parts, and a step in a hook is one
seen, own = [], make_opt([emb.weight])
emb.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
def step_of_all(p):
    seen.append(p.grad.to_dense().clone())
    own.step()
emb.weight.register_post_accumulate_grad_hook(step_of_all)
for _ in range(3):
    model.zero_grad()
    (emb(ids).sum() * 0.3 + emb(index).sum() * 0.4 + emb.weight.pow(2).sum()).backward()
opt = make_opt([nn.Parameter(torch.zeros(1))])
seen, int(own.state[emb.weight]["step"])

# Hooks of the node of the parameter
seen, graph = [], torch.autograd.graph
graph.register_multi_grad_hook((emb.weight,), lambda grads: seen.append(grads[0].norm()))
node = graph.get_gradient_edge(emb.weight).node
node.register_prehook(lambda grads: seen.append(grads[0].norm()))
for use in (
    lambda: emb(ids).square().sum() + emb(index).sum(),
    lambda: emb(ids).sum() + emb.weight.cos().sum(),
    lambda: LinearHead.apply(emb(index), emb.weight).square().sum(),
):
    opt.zero_grad()
    use().backward()
    opt.step()
seen

torch.autograd.grad(loss() + emb.weight.cos().sum(), [torch.autograd.graph.get_gradient_edge(emb.weight)])[0]

# A hook and autograd.grad
emb.weight.register_hook(lambda grad: grad * 3)
torch.autograd.grad(emb(ids).sum() + emb(index).pow(2).sum(), emb.weight)[0]

# A row of a gradient of zeros, set
opt.zero_grad()
(loss() + emb.weight.square().sum()).backward()
opt.zero_grad(set_to_none=False)
emb.weight.grad[30] = 0.5
loss().backward()
found = emb.weight.grad.clone()
array = emb.weight.grad.numpy()
opt.zero_grad(set_to_none=False)
array[31] = 0.5
loss().backward()
found, emb.weight.grad.clone()

# Aliases of the gradient go on showing it
seen = []
for alias in (torch.Tensor.detach, lambda grad: grad.data, lambda grad: grad.view_as(grad)):
    emb.zero_grad()
    emb(ids).square().sum().backward()
    other = alias(emb.weight.grad)
    emb(index).square().sum().backward()
    seen += [other.clone(), other.mul_(2).clone(), emb.weight.grad.clone()]
    other[35] = 3
    emb.weight.grad.sub_(0.5)
    for clear in (lambda: emb.zero_grad(set_to_none=False), emb.zero_grad):
        clear()
        emb(index).square().sum().backward()
        seen += [other.clone(), emb.weight.grad.clone()]
seen

# A write by NumPy to a row of the batch, by an array from before backward and by a new one
for is_kept in (True, False):
    opt.zero_grad()
    before = emb.weight.detach()[7]
    emb(ids).pow(2).sum().backward()
    (before if is_kept else emb.weight.detach()[7]).numpy()[:] = 1.0
    opt.step()

# Saved tensors that hooks keep serve more than one backward
bag = EmbeddingBag(40, 6)
with torch.autograd.graph.save_on_cpu():
    out = emb(ids).square().sum() + bag(ids).square().sum()
out.backward(retain_graph=True)
out.backward()
emb.weight.grad, bag.weight.grad.to_dense()

# Zeros for one without a gradient
try:
    torch.autograd.grad(emb(ids).sum(), [emb.weight], materialize_grads=True, allow_unused=False)
except ValueError as error:
    said = str(error)
said, [each.detach() for each in torch.autograd.grad(emb(ids).sum(), [emb.weight, items.weight], materialize_grads=True)]

# A lookup under autocast
with torch.autocast("cpu", dtype=torch.bfloat16):
    out = emb(ids)
out.dtype, out

# A gradient in columns is made to lie like the weight: fused kernels read rows one after the other
for fused in (False, True):
    own = torch.optim.AdamW(emb.parameters(), lr=0.05, fused=fused)
    own.zero_grad()
    torch.einsum("qd,nd->qn", query, emb.weight).square().sum().backward()
    assert emb.weight.grad.is_contiguous()
    own.step()
opt = make_opt(model.parameters())

# What a lookup gave outlives the step
out = emb(ids)
kept = out.detach().clone()
(out.sum() + loss()).backward()
opt.step()
torch.equal(out, kept)

# Lookups in vmap and grad of torch.func
torch.func.vmap(lambda row: emb(row).square().sum())(ids).sum().backward()
torch.func.grad(lambda x: (emb(ids) * x).sum())(torch.ones(6)).sum().backward()
opt.step()
ones = torch.ones(2, 6)
torch.func.grad(lambda x: (emb.weight.detach()[ids] * x).sum() + model.state_dict()["emb.weight"].sum())(ones[0])
torch.func.grad(torch.no_grad()(lambda x: (emb(ids) * x).sum()))(ones[0])
emb.requires_grad_(False)
torch.vmap(torch.func.grad(lambda x: (emb(ids) * x).sum()))(ones), torch.func.jacrev(lambda x: (emb(ids) * x).sum(0))(ones[0])

# Many gradients at once
torch.autograd.grad(emb(index), emb.weight, torch.rand(5, 4, 6), is_grads_batched=True)[0]

# A subclass with a parameter and a buffer
class WithBias(Embedding):
    def __init__(self, *shape):
        super().__init__(*shape)
        self.bias = nn.Parameter(torch.zeros(self.embedding_dim))
        self.register_buffer("count", torch.zeros(()))
    def forward(self, ids):
        return super().forward(ids) + self.bias
model.emb = emb = WithBias(40, 6)
opt = make_opt(model.parameters())
step()
emb.count += 3
other = WithBias(40, 6)
other.load_state_dict(emb.state_dict())
other.bias, other.count, other(ids), copy.deepcopy(emb)(ids), list(other.state_dict())

# Hooks of state dicts
calls = []
emb.register_state_dict_post_hook(lambda module, state, prefix, meta: calls.append("saved"))
emb.register_load_state_dict_pre_hook(lambda module, state, *rest: calls.append("loading"))
emb.load_state_dict(emb.state_dict())
calls

# A hook that renames keys
def rename(module, state, prefix, *rest):
    state[prefix + "weight"] = state.pop(prefix + "vectors")
emb.register_load_state_dict_pre_hook(rename)
emb.load_state_dict({"vectors": full})
emb.weight

# Keys that are missing, unexpected, or of another shape
state = dict(model.state_dict()) | {"emb.more": full, "emb.deeper.more": full, "items.weight": full[:, :2]}
del state["emb.weight"]
try:
    model.load_state_dict(state)
except RuntimeError as error:
    said = str(error)
del state["items.weight"]
said, str(model.load_state_dict(state, strict=False)), emb.weight

# Values of another dtype are converted
emb.load_state_dict({"weight": full.half()})
items.load_state_dict({"weight": full[:30].double()})
emb.weight

# With sparse=True gradients read as sparse
sparse = Embedding(40, 6, sparse=True)
sparse.weight.data.copy_(full)
sparse(ids).square().sum().backward()
grad = sparse.weight.grad
one = grad.coalesce()
seen = [grad.is_sparse, grad.layout, grad.shape, grad.sparse_dim(), grad.dense_dim(), one.is_coalesced(), one._nnz()]
seen += [one.indices(), one._indices(), one.values(), one._values(), grad.to_dense(), grad.clone(), grad.detach(), grad * 0.5]
seen += [-grad, torch.sparse.sum(grad), torch.sparse.sum(grad, dim=0), full + grad.to_dense(), copy.deepcopy(grad)]
(by_weight,) = torch.autograd.grad(sparse(ids).sum() + sparse(index).square().sum(), sparse.weight)
hook = sparse.weight.register_hook(lambda grad: seen.append(grad.is_sparse))
sparse(index).sum().backward()
hook.remove()
[*seen, by_weight]

# With sparse=True, set later, a gradient of the whole table is dense
sparse, found = Embedding(40, 6), []
sparse.sparse = True
for use in (lambda: sparse(ids).sum(), lambda: sparse.weight.pow(2).sum() * 0, lambda: sparse(index).sum()):
    use().backward()
    found += [sparse.weight.grad.is_sparse, sparse.weight.grad.to_dense().clone()]
sparse.zero_grad()
sparse(index).sum().backward()
[*found, sparse.weight.grad.is_sparse]

# Sparse gradients that are assigned, and written to
sparse = Embedding(40, 6, sparse=True)
sparse.weight.data.copy_(full)
own = torch.optim.SparseAdam(sparse.parameters(), lr=0.1)
for change in (lambda grad: grad * 2, lambda grad: (grad._values().mul_(0.25), grad)[1]):
    sparse.zero_grad()
    sparse(ids).square().sum().backward()
    sparse.weight.grad = change(sparse.weight.grad.coalesce())
    own.step()
sparse.weight.detach()
""",
)

CASES = [*READ, *WRITE, *GRAD, *SWAP, *TRAIN]
