"""What people do with `emb.weight`: short pieces of code, each run on ``torch.nn.Embedding`` and on ours (test_weight.py).

A paragraph is a case. A comment on top is its title; without one each statement is run by itself, from the same values. Where
the last line is an expression, its value is compared too. A line ``# refused: REASON`` marks what is documented to raise here;
``# refused (copies): REASON`` what raises where the whole table is a copy of the rows: in CUDA's memory of rows on the host,
or in float32 of rows stored in fewer bits.

`weight_world.World` says which names there are: `emb` (40 x 6) and `items` (30 x 6) are embeddings in `model`, `query` a
parameter (3, 6), `opt` the optimizer over all of them.
"""

import ast
import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Case:
    """One piece of code: where it belongs, what to call it, and why ours refuses it, if it does: always, or of copies."""

    group: str
    title: str
    code: str
    refused: str = ""
    refused_of_copies: str = ""

    @property
    def id(self):
        """A name for the test, of the title or the first line of code."""
        text = re.sub(r"[^\w.\[\]=+*@-]+", "_", self.title or self.code.splitlines()[0])
        return f"{self.group}-{text.strip('_')[:60]}"

    @property
    def parts(self):
        """The code that is run at once: all of it, or each statement."""
        if self.title:
            return [self.code]
        return [ast.unparse(statement) for statement in ast.parse(self.code).body]


def parse(group, text):
    cases = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.splitlines()
        title = refused = of_copies = ""
        while lines[0].startswith("# "):
            comment = lines.pop(0)[2:]
            if comment.startswith("refused: "):
                refused = comment.partition(": ")[2]
            elif comment.startswith("refused (copies): "):
                of_copies = comment.partition(": ")[2]
            else:
                title = comment
        cases.append(Case(group, title, "\n".join(lines), refused, of_copies))
    return cases


# Expressions: with and without gradients, before training, after it, and between backward and step. Where a result wants
# gradients it becomes part of the loss of the next step.
READ = parse(
    "read",
    """
emb.weight.shape, emb.weight.size(), emb.weight.size(0), emb.weight.size(-1), emb.weight.numel(), len(emb.weight)
emb.weight.dtype, emb.weight.device, emb.weight.dim(), emb.weight.ndim, emb.weight.is_leaf, emb.weight.requires_grad
isinstance(emb.weight, nn.Parameter), isinstance(emb.weight, torch.Tensor), torch.is_tensor(emb.weight)
sum(p.numel() for p in model.parameters()), [p.shape for p in model.parameters()]
sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
emb.weight[mask], emb.weight[emb.weight[:, 0] > 0]
[float(row.sum()) for row in emb.weight], sum(row[0] for row in emb.weight)
emb.weight.detach().cpu().numpy()
np.asarray(emb.weight.detach()), np.array(emb.weight.data), np.linalg.norm(emb.weight.detach().numpy(), axis=1)
emb.weight.data, emb.weight.data.clone(), emb.weight.detach().clone(), emb.weight.data[2].sum()
torch.zeros_like(emb.weight), torch.empty_like(emb.weight).shape, emb.weight.new_zeros(3), emb.weight.new_ones(2, 2)

query @ emb.weight.t(), torch.matmul(query, emb.weight.transpose(0, 1)), torch.mm(query, emb.weight.T)
F.embedding(ids, emb.weight), F.embedding(ids, emb.weight, padding_idx=3)
F.embedding(ids, emb.weight, max_norm=None, scale_grad_by_freq=True)
F.embedding_bag(ids, emb.weight), F.embedding_bag(ids, emb.weight, mode="sum")
F.embedding_bag(ids.flatten(), emb.weight, offsets, mode="max")
LinearHead.apply(query, emb.weight), LinearHead.apply(emb(index), emb.weight).sin() + emb.weight.cos().sum() + emb(ids).sum()
torch.tensor(emb.weight.data), torch.zeros(40, 6).set_(emb.weight.data).clone(), emb.weight.data.as_subclass(torch.Tensor)
torch.vmap(lambda row: row * 2)(emb.weight.data), torch.jit.script(nn.ReLU())(emb.weight.data)
torch.nested.nested_tensor([emb.weight.data, rows]).to_padded_tensor(0)

# A reentrant checkpoint of the weight
# refused (copies): it takes the weight apart from its graph, which reads rows where they are stored
LinearHead.apply(emb(index), emb.weight).sum() + checkpoint(lambda w: w.square().sum(), emb.weight, use_reentrant=True)

torch.cat([emb.weight, items.weight], dim=0), torch.vstack([emb.weight, emb.weight]), torch.hstack([emb.weight, bias[:, None]])

# Full softmax of looked-up rows
F.cross_entropy(emb(ids).mean(1) @ emb.weight.T, index[:2]), -F.log_softmax(emb(ids) @ emb.weight.T, -1)[0, 0, 5]

emb.weight.as_strided((3,), (6,)), nn.Parameter(emb.weight.data.clone())
str(tuple(emb.weight.shape)), f"{emb.weight.detach().sum():.3f}", "nan" in repr(emb.weight)
list(dict(model.named_parameters())), [name for name, _ in emb.named_parameters()], list(emb.state_dict())
emb.state_dict()["weight"], model.state_dict()["emb.weight"].sum(), nn.utils.parameters_to_vector(emb.parameters())
emb.weight is emb.weight, emb.weight is next(emb.parameters()), emb._parameters["weight"] is emb.weight
id(emb.weight) in {id(p) for g in opt.param_groups for p in g["params"]}, hash(emb.weight) == hash(emb.weight)
emb(torch.arange(40)), emb(torch.arange(40)).shape == emb.weight.shape
model.get_parameter("emb.weight"), getattr(model.emb, "weight"), operator.attrgetter("emb.weight")(model)
torch.func.functional_call(emb, dict(emb.named_parameters()), (ids,))
torch.func.grad(lambda it, ids: torch.func.functional_call(emb, it, (ids,)).sin().sum())(dict(emb.named_parameters()), ids)
torch.func.vmap(lambda row: row.sum())(emb.weight), torch.func.vjp(lambda w: w * w, emb.weight)[1](full)
torch.func.jacrev(lambda w: (w * w).sum(0))(emb.weight), torch.func.jacrev(lambda w: (w * w).sum(0))(emb.weight.detach())
torch.func.grad_and_value(lambda w: w.square().sum())(emb.weight)

# A tensor of one's own, changed by the weight
with torch.no_grad():
    own = full.clone().mul_(0.9).add_(emb.weight, alpha=0.1)
    own.sub_(emb.weight.detach()).mul_(emb.weight.data).clamp_(max=emb.weight)
own

# The data, not trained
frozen = emb.weight.detach().requires_grad_(False)
emb.weight.data.requires_grad = False
frozen.requires_grad, emb.weight.requires_grad

# A gradient of the data
# refused (copies): it reads rows where they are stored; a copy can have a gradient
given = emb.weight.detach().requires_grad_()
with torch.enable_grad():
    (given.sin() * full).sum().backward()
given.grad

torch.utils.dlpack.from_dlpack(emb.weight.detach()), memoryview(emb.weight.detach().numpy()).shape
""",
)

# Statements that change the rows: before training, after it, and between backward and step. Training goes on afterwards.
WRITE = parse(
    "write",
    """
nn.init.uniform_(emb.weight, -0.1, 0.1)
nn.init.normal_(emb.weight, std=0.02)
nn.init.normal_(emb.weight.data, mean=0.5, std=0.02)
nn.init.kaiming_uniform_(emb.weight, a=5**0.5)
nn.init.eye_(emb.weight)
nn.init.uniform_(emb.weight.data[3:9], 1, 2)
emb.weight.data[7] = rows[0]
emb.weight.data[2:5, 1] += 1
emb.weight.data.copy_(full)
emb.weight.data -= emb.weight.data.mean(0)
emb.weight.data = full.clone()
emb.weight.data.index_add_(0, index, rows)
emb.weight.data.view(-1)[:5] = 0
emb.weight.detach().copy_(full)
nn.init.zeros_(emb.weight[3])
nn.init.constant_(emb.weight[2:9], 0.5)
done = nn.init.ones_(emb.weight[2:39])
done = nn.init.ones_(emb.weight.t()[1])
emb.weight[3].data.fill_(1), emb.weight[2:4].detach().mul_(2), emb.weight.view(-1).data[5:90].fill_(1)

# refused: the array is over a copy and cannot be written
emb.weight[3].detach().numpy()[:] = 0.5

# Rows that were taken with gradients, and are written to without
row, some = emb.weight[3], emb.weight[2:5]
with torch.no_grad():
    row[1] = 2.0
    some[:, 0] = 1.0
    some.mul_(2)
row, some, row.requires_grad, row.is_leaf

# refused (copies): the array is over a copy and cannot be written
emb.weight.detach().numpy()[:] = full.numpy()

# refused (copies): the array is over a copy and cannot be written
emb.weight.data.numpy()[3] = 0.5

torch.bernoulli(full.sigmoid(), out=emb.weight.data)
with torch.no_grad():
    emb.weight.add_(full, alpha=0.1)
with torch.no_grad():
    emb.weight.div_(emb.weight.norm(dim=1, keepdim=True).clamp(min=1e-12))
with torch.no_grad():
    torch.mul(emb.weight, 0.5, out=emb.weight)
F.embedding(index, emb.weight, max_norm=0.5), F.embedding_bag(ids, emb.weight, max_norm=0.25)
with torch.no_grad():
    F.embedding(index, emb.weight[1:35], max_norm=0.5), F.embedding_bag(ids % 9, emb.weight[1:35], max_norm=0.25)
with torch.no_grad():
    emb.weight.set_(full.clone())

# Row by row
with torch.no_grad():
    for i, row in enumerate(emb.weight):
        row.mul_(i / 40)

emb.load_state_dict({"weight": full})

# Soft target update
target = copy.deepcopy(emb)
target.weight.data.fill_(1.0)
for p, q in zip(emb.parameters(), target.parameters()):
    p.data.copy_(0.9 * p.data + 0.1 * q.data)
""",
)
