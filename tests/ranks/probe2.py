from ranks.probe1 import *
import math
del ALL
for _k, _v in list(globals().items()):
    if callable(_v) and getattr(_v, "__module__", "") == "ranks.probe1" and _k not in ("emb","ids","allids","rows","R"): del globals()[_k]

def tries(fs):
    out = {}
    for n, f in fs.items():
        try: r = f(); out[n] = "fine" if r is None else r
        except Exception as x: out[n] = f"{type(x).__name__}: {x}"
    return "\n".join(f"{k}: {v}" for k, v in out.items())

def inits(kind):
    out = {}
    I = nn.init
    fs = {"uniform": I.uniform_, "normal": lambda w: I.normal_(w, 1., 2.), "constant": lambda w: I.constant_(w, .5), "ones": I.ones_, "zeros": I.zeros_,
      "xu": I.xavier_uniform_, "xn": I.xavier_normal_, "ku": I.kaiming_uniform_, "kn": I.kaiming_normal_, "kuo": lambda w: I.kaiming_uniform_(w, a=math.sqrt(5), mode="fan_out"), "kno": lambda w: I.kaiming_normal_(w, mode="fan_out"),
      "tn": lambda w: I.trunc_normal_(w, std=.02), "tn2": lambda w: I.trunc_normal_(w, 0, 1, -.5, .5), "orth": I.orthogonal_, "sparse": lambda w: I.sparse_(w, .5), "eye": I.eye_,
      "data_normal": lambda w: w.data.normal_(), "data_uniform": lambda w: w.data.uniform_(-1, 1), "data_xu": lambda w: I.xavier_uniform_(w.data), "data_ku": lambda w: I.kaiming_uniform_(w.data), "data_kn": lambda w: I.kaiming_normal_(w.data),
      "data_normal_init": lambda w: I.normal_(w.data, 0, .1), "data_tn": lambda w: I.trunc_normal_(w.data, 0, .1), "data_orth": lambda w: I.orthogonal_(w.data),
      "mul": lambda w: w.data.mul_(.9), "mult": lambda w: w.data.mul_(torch.tensor(.9, dtype=torch.float64)), "div": lambda w: w.data.div_(3), "data=": lambda w: setattr(w, "data", torch.arange(N*D, dtype=torch.float64).view(N, D)), "copy": lambda w: w.data.copy_(torch.arange(N*D, dtype=torch.float64).view(N, D)),
      "copy1": lambda w: w.data.copy_(torch.ones(1, dtype=torch.float64)), "fill": lambda w: w.data.fill_(2), "zero": lambda w: w.data.zero_(), "setitem": lambda w: w.data.__setitem__(3, 0.), "setrow": lambda w: w.data.__setitem__(torch.tensor([1,2]), torch.ones(2, D, dtype=torch.float64)), "rowfill": lambda w: w.data[0].fill_(0), "renorm": lambda w: w.data.renorm_(2, 0, 1.),
      "norm": lambda w: [float(w.norm())][1:], "sum": lambda w: [float(w.detach().sum())][1:], "clamp": lambda w: w.data.clamp_(-.1, .1), "add": lambda w: w.data.add_(1), "lerp": lambda w: w.data.lerp_(torch.zeros(N, D, dtype=torch.float64), .1), "mulnograd": lambda w: w.data.mul_(-1).add_(1), "exponential": lambda w: w.data.exponential_(), "cauchy": lambda w: w.data.cauchy_(), "bernoulli": lambda w: w.data.bernoulli_(.3), "log_normal": lambda w: w.data.log_normal_(), "random": lambda w: w.data.random_(0, 10), "pow": lambda w: w.data.pow_(2), "index_fill": lambda w: w.data.index_fill_(0, torch.tensor([1]), 0.), "normal_gen": lambda w: w.data.normal_(generator=torch.Generator().manual_seed(4)), "sub1": lambda w: w.data.sub_(1, alpha=3)}
    for n, f in fs.items():
        e, o = emb(kind), emb("torch")
        with torch.no_grad(): o.weight.copy_(rows(emb("one")).clone())
        torch.manual_seed(11); 
        with torch.no_grad(): f(o.weight)
        ro = torch.rand(1)
        torch.manual_seed(11); v = e._handle.table.version
        try:
            with torch.no_grad(): f(e.weight)
            r = torch.rand(1)
            same = torch.equal(rows(e), o.weight.detach())
            out[n] = ("same" if same else "DIFFERENT") + ("" if torch.equal(r, ro) else " GENERATOR DIFFERS")
        except Exception as x:
            out[n] = f"{type(x).__name__}: {str(x)[:150]}" + ("" if torch.equal(rows(e), rows(emb("one"))) else " WROTE")
        dist.barrier()
    return "\n".join(f"{k}: {v}" for k, v in out.items())

def grads(kind):
    def fresh():
        e = emb(kind); e(ids()).square().sum().backward(); return e
    def one():
        e = emb("torch"); 
        with torch.no_grad(): e.weight.copy_(rows(emb("one")))
        (e(allids()).square().sum()/dist.get_world_size()).backward(); return e
    fs = {"norm": lambda p: p.grad.norm(), "norm1": lambda p: p.grad.norm(1), "norminf": lambda p: p.grad.norm(math.inf), "data.norm": lambda p: p.grad.data.norm(2), "detach.norm": lambda p: p.grad.detach().norm(2), "norm0": lambda p: p.grad.norm(0), "normdim": lambda p: p.grad.norm(dim=1).sum(), "vector_norm": lambda p: torch.linalg.vector_norm(p.grad), "matrix_norm": lambda p: torch.linalg.matrix_norm(p.grad), "linalg.norm": lambda p: torch.linalg.norm(p.grad), "norm3": lambda p: p.grad.norm(3), "norm-inf": lambda p: p.grad.norm(-math.inf), "norm.5": lambda p: p.grad.norm(.5),
     "isfinite": lambda p: torch.isfinite(p.grad).all().double(), "isnan": lambda p: torch.isnan(p.grad).any().double(), "max": lambda p: p.grad.max(), "min": lambda p: p.grad.min(), "absmax": lambda p: p.grad.abs().max(), "amax": lambda p: p.grad.amax(), "sum": lambda p: p.grad.sum(), "mean": lambda p: p.grad.mean(), "std": lambda p: p.grad.std(), "sq": lambda p: (p.grad**2).sum(), "square": lambda p: p.grad.square().sum(), "abs": lambda p: p.grad.abs().sum(), "sumdim": lambda p: p.grad.sum(0).sum(), "nz": lambda p: p.grad.count_nonzero().double(), "item": lambda p: torch.tensor(p.grad[3, 0].item()), "row": lambda p: p.grad[3].sum(), "dot": lambda p: (p.grad*p.grad).sum(), "numel": lambda p: torch.tensor(p.grad.numel()), "clone": lambda p: p.grad.clone().norm(), "cpu": lambda p: p.grad.cpu().norm(), "float": lambda p: p.grad.float().norm(), "float_type": lambda p: p.grad.to(torch.float32).norm(dtype=torch.float64), "flatten": lambda p: p.grad.flatten().norm(), "view": lambda p: p.grad.view(-1).norm(), "cat": lambda p: torch.cat([p.grad.flatten(), torch.ones(1)]).norm(), "foreach": lambda p: torch.stack(torch._foreach_norm([p.grad], 2)).norm(), "tolist": lambda p: torch.tensor(p.grad.tolist()).sum(), "numpy": lambda p: torch.tensor(p.grad.numpy()).sum(), "eq": lambda p: (p.grad == 0).sum().double(), "allclose": lambda p: torch.tensor(float(torch.allclose(p.grad, p.grad))), "any": lambda p: p.grad.any().double(), "all": lambda p: p.grad.all().double(), "isinf": lambda p: p.grad.isinf().any().double(), "sum_dtype": lambda p: p.grad.sum(dtype=torch.float32), "histc": lambda p: p.grad.histc(4).sum(), "where": lambda p: torch.where(p.grad.isnan(), 0., p.grad).sum(), "nan_to_num": lambda p: p.grad.nan_to_num().sum(), "sign": lambda p: p.grad.sign().sum(), "t": lambda p: p.grad.t().norm(), "topk": lambda p: p.grad.flatten().topk(2).values.sum(), "getnorm": lambda p: torch.nn.utils.get_total_norm([p.grad]), "repr": lambda p: torch.tensor(float(len(repr(p.grad)) > 0)), "is_sparse": lambda p: torch.tensor(float(p.grad.is_sparse)), "numpy()": lambda p: torch.tensor(__import__("numpy").asarray(p.grad)).sum(), "prod": lambda p: p.grad.prod(), "aminmax": lambda p: p.grad.aminmax()[1], "bool": lambda p: torch.tensor(float(bool((p.grad != 0).any()))), "deepcopy": lambda p: copy.deepcopy(p.grad).norm(), "argmax": lambda p: p.grad.argmax().double(), "median": lambda p: p.grad.median(), "lt": lambda p: (p.grad < 1).all().double()}
    out = {}
    for n, f in fs.items():
        e, o = fresh(), one()
        w = float(f(o.weight))
        try: 
            r = float(f(e.weight)); out[n] = "same" if math.isclose(r, w, rel_tol=1e-6, abs_tol=1e-9) or (r != r and w != w) else f"DIFFERENT {r} {w}"
        except Exception as x: out[n] = f"{type(x).__name__}: {str(x)[:110]}"
        dist.barrier()
    return "\n".join(f"{k}: {v}" for k, v in out.items())

def grad_writes(kind):
    fs = {"clamp_": lambda p: p.grad.clamp_(-.5, .5), "clamp_data": lambda p: p.grad.data.clamp_(-.5, .5), "clamp_pos": lambda p: p.grad.clamp_(.1, .5), "clip_value": lambda p: nn.utils.clip_grad_value_([p], .5), "clip_value_nof": lambda p: nn.utils.clip_grad_value_([p], .5, foreach=False), "clip_norm": lambda p: nn.utils.clip_grad_norm_([p], .5), "clip1": lambda p: nn.utils.clip_grad_norm_([p], .5, 1), "clipinf": lambda p: nn.utils.clip_grad_norm_([p], .5, math.inf), "clip_nof": lambda p: nn.utils.clip_grad_norm_([p], .5, foreach=False), "clip_f": lambda p: nn.utils.clip_grad_norm_([p], .5, foreach=True), "stclip": lambda p: st.clip_grad_norm_([p], .5), "mul_": lambda p: p.grad.mul_(2), "div_": lambda p: p.grad.div_(2), "add_wd": lambda p: p.grad.add_(p.data, alpha=.1), "add_wd2": lambda p: p.grad.add_(p.detach(), alpha=.1), "grad=": lambda p: setattr(p, "grad", p.grad*2), "grad=clone": lambda p: setattr(p, "grad", p.grad.clone()), "data=": lambda p: setattr(p.grad, "data", p.grad.data*2), "nan_to_num_": lambda p: p.grad.nan_to_num_(), "zero_": lambda p: p.grad.zero_(), "row0": lambda p: p.grad[0].zero_(), "setrow": lambda p: p.grad.__setitem__(0, 0.), "setmask": lambda p: p.grad.__setitem__(p.grad.abs() > .5, 0.), "noise": lambda p: p.grad.add_(torch.randn_like(p.grad)), "noise2": lambda p: p.grad.add_(torch.zeros(N, D, dtype=torch.float64)), "masked": lambda p: p.grad.masked_fill_(p.grad.isnan(), 0.), "mask_mul": lambda p: p.grad.mul_(torch.ones(N, 1, dtype=torch.float64)), "col_mul": lambda p: p.grad.mul_(torch.arange(D, dtype=torch.float64)), "grad=dense": lambda p: setattr(p, "grad", torch.ones(N, D, dtype=torch.float64)), "grad=sparse": lambda p: setattr(p, "grad", torch.eye(N, D, dtype=torch.float64).to_sparse(1)), "copy_": lambda p: p.grad.copy_(torch.ones(N, D, dtype=torch.float64)), "sign_": lambda p: p.grad.sign_(), "agc": lambda p: p.grad.mul_(p.detach().norm(dim=1, keepdim=True)), "pdata": lambda p: p.data.add_(p.grad, alpha=-.1), "padd": lambda p: p.data.add_(p.grad.data, alpha=-.1), "swap": lambda p: p.grad.data.mul_(3), "foreach": lambda p: torch._foreach_mul_([p.grad], 2.), "foreach_div": lambda p: torch._foreach_div_([p.grad], torch.tensor(2.)), "foreach_add": lambda p: torch._foreach_add_([p.grad], [p.data], alpha=.1), "foreach_zero": lambda p: torch._foreach_zero_([p.grad]), "del": lambda p: setattr(p, "grad", None), "norm_scale": lambda p: p.grad.div_(p.grad.norm()), "centralize": lambda p: p.grad.add_(-p.grad.mean(0, keepdim=True)), "allreduce": lambda p: dist.all_reduce(p.grad), "data_set": lambda p: p.grad.data.copy_(p.grad*2), "fill": lambda p: p.grad.fill_(0.)}
    out = {}
    for n, f in fs.items():
        e, o = emb(kind), emb("torch")
        with torch.no_grad(): o.weight.copy_(rows(emb("one")))
        opt, oo = torch.optim.SGD(e.parameters(), lr=.1), torch.optim.SGD(o.parameters(), lr=.1)
        e(ids()).square().sum().backward(); (o(allids()).square().sum()/dist.get_world_size()).backward()
        if n == "allreduce": want = None
        else:
            torch.manual_seed(5); f(o.weight); 
        oo.step()
        try:
            torch.manual_seed(5); f(e.weight); opt.step()
            d = float((rows(e)-o.weight.detach()).abs().max()); out[n] = "same" if d < 1e-9 else f"DIFFERENT {d}"
        except Exception as x: out[n] = f"{type(x).__name__}: {str(x)[:130]}"
        dist.barrier()
    return "\n".join(f"{k}: {v}" for k, v in out.items())

def moves(kind):
    def t(f):
        e = emb(kind); f(e); e(ids()); l = e(ids()).float().sum(); l.backward(); torch.optim.SGD(e.parameters(), lr=.1).step(); return str(e.table.dtype), str(e.weight.dtype)
    m = tries({"float": lambda: t(lambda e: e.float()), "half": lambda: t(lambda e: e.half()), "bf16": lambda: t(lambda e: e.to(torch.bfloat16)), "double": lambda: t(lambda e: e.double()), "cpu": lambda: t(lambda e: e.cpu()), "meta": lambda: t(lambda e: e.to("meta")), "to_empty": lambda: t(lambda e: e.to_empty(device="cpu")), "share": lambda: t(lambda e: e.share_memory()), "eval": lambda: t(lambda e: e.eval()), "req": lambda: t(lambda e: e.requires_grad_(True))})
    return m

def states(kind):
    e = emb(kind); o = emb("torch")
    e.load_state_dict(o.state_dict()); a = torch.equal(rows(e), o.weight.detach())
    m = nn.Sequential(e, nn.Linear(D, 1)); f = st.full_state_dict(m)
    b = {k: tuple(v.shape) for k, v in f.items()}
    c = torch.equal(f["0.weight"], o.weight.detach()) if f else None
    def part(): e.load_state_dict({"weight": torch.zeros(N-1, D)})
    def assign(): e.load_state_dict(o.state_dict(), assign=True)
    def pre():
        o2 = emb("torch"); x = {"memory": "shared"} if kind == "shared" else {}
        q = st.Embedding.from_pretrained(o2.weight.detach(), process_group=dist.group.WORLD, **x); return torch.equal(rows(q), o2.weight.detach()), q.weight.requires_grad
    def rep():
        mm = nn.Sequential(nn.Embedding(N, D), nn.EmbeddingBag(N, D)); w = mm[0].weight.detach().clone(); x = {"memory": "shared"} if kind == "shared" else {}
        r = st.replace_embeddings(mm, process_group=dist.group.WORLD, **x); return type(mm[0]).__name__, torch.equal(rows(mm[0]), w), type(mm[0].table).__name__
    def tied():
        x = {"memory": "shared"} if kind == "shared" else {}
        a = emb(kind); b = emb(kind); b.weight = a.weight
        opt = torch.optim.SGD([*a.parameters(), *b.parameters()][:1], lr=.1)
        (a(ids())+b(ids(1))).sum().backward(); opt.step(); return torch.equal(rows(a), rows(b))
    def head():
        a = emb(kind); lin = nn.Linear(D, N, bias=False, dtype=torch.float64); lin.weight = a.weight; lin(a(ids())).sum().backward()
    def head2():
        a = emb(kind); (a(ids()) @ a.weight.t()).sum().backward()
    def multi():
        x = {"memory": "shared"} if kind == "shared" else {}
        mm = st.MultiEmbedding({"a": st.Feature(N, D), "b": st.Feature(N, D)}, process_group=dist.group.WORLD, **x); return repr(mm)[:100]
    def mixpg():
        return repr(emb(kind))[:200], str(e.table)[:200], repr(e.weight)[:80]
    def prefetch(): e.prefetch(ids())
    def sd(): m.state_dict()
    def resize(): e.weight.data = torch.zeros(N+1, D, dtype=torch.float64)
    def neww(): e.weight = nn.Parameter(torch.zeros(N, D, dtype=torch.float64))
    def func(): return torch.func.functional_call(e, {"weight": torch.zeros(N, D, dtype=torch.float64)}, ids()).sum().item()
    def vmap(): return torch.vmap(lambda w: e(ids()))(torch.zeros(2)).shape
    def numpy(): return e.weight.detach().numpy()
    def param(): torch.nn.utils.parametrizations.spectral_norm(e)
    def wn(): torch.nn.utils.parametrizations.weight_norm(e)
    def scatter():
        i = torch.arange(R(), N, dist.get_world_size()); v = i[:, None].expand(-1, D).double(); e.table.scatter(i, v); return torch.equal(rows(e), torch.arange(N)[:, None].expand(-1, D).double())
    def scatter_twice(): e.table.scatter(torch.tensor([1]), torch.zeros(1, D))
    def scatter_bad(): e.table.scatter(torch.tensor([1+R()]) if R() != 1 else torch.tensor([N]), torch.zeros(1, D))
    def gather_bad(): e.table.gather(torch.tensor([1]) if R() != 1 else torch.tensor([N]))
    def local(): return torch.equal(e.table.local.torch() if kind=="sharded" else e.table.local.torch()[e.table.local_ids()], rows(e)[e.table.local_ids()])
    def p2v(): return torch.nn.utils.parameters_to_vector(e.parameters())
    return f"{a} {b} {c}\n" + tries({k: v for k, v in locals().items() if callable(v) and k not in "eomabf"})

def compiled(kind):
    o = emb("one"); e = emb(kind); m = nn.Sequential(e, nn.Linear(D, 1, dtype=torch.float64)); c = torch.compile(m, backend="eager"); c2 = torch.compile(m, backend="aot_eager")
    mo = nn.Sequential(o, copy.deepcopy(m[1])); 
    opt = torch.optim.SGD([e.weight], lr=.1); oo = torch.optim.SGD([o.weight], lr=.1)
    import warnings; warnings.simplefilter("ignore")
    for s in range(4):
        (c if s < 2 else c2)(ids(s)).square().sum().backward(); opt.step(); opt.zero_grad()
        (mo(allids(s)).square().sum()/dist.get_world_size()).backward(); oo.step(); oo.zero_grad()
    return float((rows(e)-rows(o)).abs().max())
def empties(kind):
    out = []
    for n, opt_kind, sizes in [(1, torch.optim.AdamW, (2, 2)), (1, torch.optim.Adagrad, (0, 3)), (50, torch.optim.AdamW, (0, 0)), (50, torch.optim.SGD, (0, 4)), (2, torch.optim.AdamW, (1, 0))]:
        for idle in ("lazy", "exact"):
            x = {"memory": "shared"} if kind == "shared" else {}
            e = st.Embedding(n, D, dtype=torch.float64, idle=idle, process_group=dist.group.WORLD, **x); o = st.Embedding(n, D, dtype=torch.float64, idle=idle)
            with torch.no_grad(): o.weight.copy_(rows(e))
            opt, oo = opt_kind(e.parameters(), lr=.1), opt_kind(o.parameters(), lr=.1)
            for s in range(4):
                i = [torch.randint(0, n, (k,), generator=torch.Generator().manual_seed(s*9+r)) for r, k in enumerate(sizes)]
                opt.zero_grad(); oo.zero_grad()
                e(i[R()]).square().sum().backward(); n1 = torch.nn.utils.clip_grad_norm_(e.parameters(), .5); opt.step()
                (o(torch.cat(i)).square().sum()/2).backward(); n2 = torch.nn.utils.clip_grad_norm_(o.parameters(), .5); oo.step()
                out.append(abs(float(n1-n2)))
            out.append(float((rows(e)-rows(o)).abs().max()))
    return max(out)
ALL = [v for k, v in list(globals().items()) if callable(v) and getattr(v, "__module__", "") == __name__ and v.__code__.co_varnames[:1] == ("kind",) and k not in ("emb",)]
