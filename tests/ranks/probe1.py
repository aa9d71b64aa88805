from __future__ import annotations
import copy, pickle, io, threading, contextlib
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
import speedtransfer as st
from torch.nn.parallel import DistributedDataParallel as DDP
from ranks.training import rows_of

N, D = 50, 4
def R(): return dist.get_rank()
def emb(kind, n=N, **o):
    torch.manual_seed(3)
    if kind == "one": return st.Embedding(n, D, dtype=torch.float64, **o)
    if kind == "torch": return nn.Embedding(n, D, dtype=torch.float64)
    if kind == "shared": o["memory"] = "shared"
    return st.Embedding(n, D, dtype=torch.float64, process_group=dist.group.WORLD, **o)
def ids(step=0, rank=None):
    rank = R() if rank is None else rank
    g = torch.Generator().manual_seed(100*step+rank)
    return torch.randint(0, N, (6,), generator=g)
def allids(step=0): return torch.cat([ids(step, r) for r in range(dist.get_world_size())])
def rows(e):
    return e.table.gather(torch.arange(e.num_embeddings)).clone()

def autograd_grad(kind):
    e = emb(kind); 
    (g,) = torch.autograd.grad(e(ids()).square().sum(), e.weight)
    return float(g.sum()), type(g).__name__, tuple(g.shape)

def hook_once(kind):
    e = emb(kind); calls = []
    e.weight.register_hook(lambda g: calls.append(len(g.rows) if hasattr(g,'rows') else 'dense') or g.clamp(-0.01, 0.01))
    loss = e(ids()).sum() + e(ids(1)).sum()
    loss.backward()
    return calls, float(e.weight.grad.abs().sum()) if hasattr(e.weight.grad,'rows') else None

def hook_oracle(kind):
    e = emb("one"); calls=[]
    e.weight.register_hook(lambda g: calls.append(1) or g.clamp(-0.01,0.01))
    ((e(allids()).sum() + e(allids(1)).sum())/2).backward()
    return calls, float(e.weight.grad.abs().sum())

def post_hook_step(kind, lookups=1):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
    def h(p): opt.step(); opt.zero_grad()
    e.weight.register_post_accumulate_grad_hook(h)
    o = emb("one"); oopt = torch.optim.SGD([o.weight], lr=0.1)
    for s in range(3):
        sum(e(ids(s+10*l)).square().sum() for l in range(lookups)).backward()
        (sum(o(allids(s+10*l)).square().sum() for l in range(lookups))/dist.get_world_size()).backward(); oopt.step(); oopt.zero_grad()
    return float((rows(e)-rows(o)).abs().max())
def post_hook_step2(kind): return post_hook_step(kind, 2)

def grad_by_hand(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
    a = e.activate(ids())
    a.add_grad(torch.ones_like(a.rows))
    n = torch.nn.utils.clip_grad_norm_([e.weight], 1e9)
    opt.step()
    return float(n), float(rows(e).sum())

def assign_dense(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
    before = rows(e)
    e.weight.grad = torch.arange(N*D, dtype=torch.float64).view(N, D)
    opt.step()
    return float((rows(e) - (before - 0.1*torch.arange(N*D, dtype=torch.float64).view(N,D))).abs().max())

def assign_scaled(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
    before = rows(e)
    e(ids()).sum().backward()
    e.weight.grad = e.weight.grad * 2
    opt.step()
    return float((rows(e)-before).sum())

def skip_step(kind):
    e = emb(kind); opt = torch.optim.AdamW([e.weight], lr=0.1)
    for s in range(5):
        opt.zero_grad(); e(ids(s)).sum().backward()
        if not (s == 2 and R() == 1): opt.step()
    return "no error"
def skip_backward(kind):
    e = emb(kind); opt = torch.optim.AdamW([e.weight], lr=0.1)
    for s in range(5):
        opt.zero_grad(); l = e(ids(s)).sum()
        if not (s == 2 and R() == 1): l.backward()
        opt.step()
    return "no error"
def skip_lookup(kind):
    e = emb(kind); opt = torch.optim.AdamW([e.weight], lr=0.1)
    for s in range(5):
        if s == 2 and R() == 1: continue
        opt.zero_grad(); e(ids(s)).sum().backward(); opt.step()
    return "no error"
def skip_all_ddp(kind):
    m = nn.Sequential(emb(kind), nn.Linear(D, 1, dtype=torch.float64)); model = DDP(m)
    opt = torch.optim.AdamW(m.parameters(), lr=0.1)
    for s in range(5):
        opt.zero_grad(); l = model(ids(s)).sum()
        if s == 2 and R() == 1: continue
        l.backward(); opt.step()
    return "no error"
def skip_zero_grad(kind):
    e = emb(kind); opt = torch.optim.AdamW([e.weight], lr=0.1)
    for s in range(5):
        if not (s == 2 and R() == 1): opt.zero_grad()
        e(ids(s)).sum().backward(); opt.step()
    return "no error"
def lr_differs(kind):
    e = emb(kind); opt = torch.optim.AdamW([e.weight], lr=0.1)
    for s in range(5):
        if s == 2 and R() == 1: opt.param_groups[0]["lr"] = 0.2
        opt.zero_grad(); e(ids(s)).sum().backward(); opt.step()
    return "no error"
def lr_tensor_differs(kind):
    e = emb(kind); opt = torch.optim.AdamW([e.weight], lr=torch.tensor(0.1))
    for s in range(5):
        if s == 2 and R() == 1: opt.param_groups[0]["lr"].fill_(0.2)
        opt.zero_grad(); e(ids(s)).sum().backward(); opt.step()
    return "no error"
def optimizer_differs(kind):
    e = emb(kind); opt = (torch.optim.AdamW if R() else torch.optim.Adam)([e.weight], lr=0.1)
    for s in range(2):
        opt.zero_grad(); e(ids(s)).sum().backward(); opt.step()
    return "no error"
def requires_grad_differs(kind):
    e = emb(kind); opt = torch.optim.AdamW([e.weight], lr=0.1)
    for s in range(4):
        if s == 2 and R() == 1: e.weight.requires_grad_(False)
        opt.zero_grad(); l = e(ids(s)).sum()
        if l.requires_grad: l.backward()
        opt.step()
    return "no error"
def frozen_all(kind):
    e = emb(kind); lin = nn.Linear(D, 1, dtype=torch.float64); opt = torch.optim.SGD([e.weight,*lin.parameters()], lr=0.1)
    o = emb("one"); lin1 = copy.deepcopy(lin); oo = torch.optim.SGD([o.weight,*lin1.parameters()], lr=0.1)
    for s in range(6):
        f = s in (2, 3)
        e.weight.requires_grad_(not f); o.weight.requires_grad_(not f)
        opt.zero_grad(); lin(e(ids(s))).square().sum().backward()
        for p in lin.parameters(): dist.all_reduce(p.grad); p.grad /= dist.get_world_size()
        opt.step()
        oo.zero_grad(); (lin1(o(allids(s))).square().sum()/dist.get_world_size()).backward(); oo.step()
    return float((rows(e)-rows(o)).abs().max())
def bad_ids(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
    msgs = []
    for bad in (torch.tensor([N]), torch.tensor([-1]), torch.tensor([0.5])):
        try: e(bad if R() == 1 else ids()); msgs.append("fine")
        except Exception as x: msgs.append(f"{type(x).__name__}: {x}")
    e(ids()).sum().backward(); opt.step()
    return msgs
def bad_bag(kind):
    o = {"memory": "shared"} if kind == "shared" else {}
    e = st.EmbeddingBag(N, D, process_group=dist.group.WORLD, **o)
    msgs = []
    for i, (a, b) in enumerate([(torch.arange(6), torch.tensor([0, 9])), (torch.arange(6), torch.tensor([1, 2])), (torch.arange(6).view(2,3), torch.tensor([0])), (torch.arange(6), None), (torch.arange(6).view(1,2,3), None)]):
        try: e(a, b) if R() == 1 else e(torch.arange(6), torch.tensor([0, 3])); msgs.append("fine")
        except Exception as x: msgs.append(f"{type(x).__name__}: {x}")
    return msgs
def backward_raises_one(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): raise ValueError("boom")
    msgs = []
    for s in range(3):
        try:
            opt.zero_grad(); y = e(ids(s))
            if s == 1 and R() == 1: y = Boom.apply(y)
            y.sum().backward(); opt.step(); msgs.append("ok")
        except Exception as x: msgs.append(f"{type(x).__name__}: {x}")
    return msgs
def backward_raises_all(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): raise ValueError("boom")
    msgs = []
    o = emb("one"); oo = torch.optim.SGD([o.weight], lr=0.1)
    for s in range(3):
        try:
            opt.zero_grad(); y = e(ids(s)).square(); z = y.sum() 
            if s == 1: z = z + Boom.apply(e(ids(s+5))).sum()
            z.backward(); opt.step(); msgs.append("ok")
        except Exception as x: msgs.append(f"{type(x).__name__}: {x}")
        if s != 1: oo.zero_grad(); (o(allids(s)).square().sum()/dist.get_world_size()).backward(); oo.step()
    return msgs, float((rows(e)-rows(o)).abs().max())
def threads(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
    losses = [e(ids(s)).square().sum() for s in range(4)]
    ts = [threading.Thread(target=l.backward) for l in (losses if R() else losses[::-1])]
    [t.start() for t in ts]; [t.join() for t in ts]
    opt.step()
    o = emb("one"); oo = torch.optim.SGD([o.weight], lr=0.1)
    (sum(o(allids(s)).square().sum() for s in range(4))/dist.get_world_size()).backward(); oo.step()
    return float((rows(e)-rows(o)).abs().max())
def gan(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1); lin = nn.Linear(3, 1)
    y = e(ids()).square().sum()
    lin(torch.randn(2, 3)).sum().backward()
    if R() == 0: y.backward()
    else: (y*0).detach(); lin(torch.randn(2,3)).sum().backward()
    opt.step()
    o = emb("one"); oo = torch.optim.SGD([o.weight], lr=0.1)
    (o(ids(0, 0)).square().sum()/dist.get_world_size()).backward(); oo.step()
    return float((rows(e)-rows(o)).abs().max())
def retain(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
    y = e(ids()).square().sum(); y.backward(retain_graph=True); y.backward(); opt.step()
    o = emb("one"); oo = torch.optim.SGD([o.weight], lr=0.1)
    y = (o(allids()).square().sum()/dist.get_world_size()); y.backward(retain_graph=True); y.backward(); oo.step()
    return float((rows(e)-rows(o)).abs().max())
def retain_one(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1); w = torch.ones((), requires_grad=True, dtype=torch.float64)
    y = e(ids()).square().sum()*w if R() == 0 else w*1; y.backward(retain_graph=True); y.backward(); opt.step()
    o = emb("one"); oo = torch.optim.SGD([o.weight], lr=0.1)
    (2*o(ids(0,0)).square().sum()/dist.get_world_size()).backward(); oo.step()
    return float((rows(e)-rows(o)).abs().max())
def unused_lookups(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
    o = emb("one"); oo = torch.optim.SGD([o.weight], lr=0.1)
    for s in range(200): e(ids(s))
    x = e(ids()).square().sum()
    for s in range(30): e(ids(s))
    x.backward(); opt.step()
    (o(allids()).square().sum()/dist.get_world_size()).backward(); oo.step()
    return float((rows(e)-rows(o)).abs().max()), len(e._handle.reducer._lookups)
def too_old(kind):
    e = emb(kind)
    x = e(ids()).square().sum()
    for s in range(60): e(ids(s))
    x.backward()
def closure_sgd(kind):
    e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1, momentum=0.9)
    o = emb("one"); oo = torch.optim.SGD([o.weight], lr=0.1, momentum=0.9)
    W = dist.get_world_size()
    for s in range(3):
        def c(): opt.zero_grad(); l = e(ids(s)).square().sum(); l.backward(); return l
        def c1(): oo.zero_grad(); l = o(allids(s)).square().sum()/W; l.backward(); return l
        opt.step(c); oo.step(c1)
    return float((rows(e)-rows(o)).abs().max())
def lbfgs(kind):
    e = emb(kind); opt = torch.optim.LBFGS([e.weight], lr=0.1)
    def c(): opt.zero_grad(); l = e(ids(0)).square().sum(); l.backward(); return l
    opt.step(c)
    return "no error"
def checkpointing(kind):
    from torch.utils.checkpoint import checkpoint
    out = []
    for re in (True, False):
        e = emb(kind); opt = torch.optim.SGD([e.weight], lr=0.1)
        w = torch.ones(1, requires_grad=True, dtype=torch.float64)
        f = lambda i, w: e(i).square().sum() * w
        o = emb("one"); oo = torch.optim.SGD([o.weight], lr=0.1)
        for s in range(3):
            (checkpoint(f, ids(s), w, use_reentrant=re) + checkpoint(f, ids(s+9), w, use_reentrant=re)).sum().backward(); opt.step(); opt.zero_grad()
            ((o(allids(s)).square().sum()+o(allids(s+9)).square().sum())/dist.get_world_size()).backward(); oo.step(); oo.zero_grad()
        out.append(float((rows(e)-rows(o)).abs().max()))
    return out
def gc_differs(kind):
    import gc; gc.disable()
    class M(nn.Module):
        def __init__(s): super().__init__(); s.e = emb(kind); s.me = [s]
    for t in range(2):
        m = M(); opt = torch.optim.SGD(m.parameters(), lr=0.1)
        for s in range(2): m.e(ids(s)).sum().backward(); opt.step(); opt.zero_grad()
        m.e(ids())
        del m, opt
        if R() == 1: gc.collect()
    gc.enable()
    return "ok"
def deepcopies(kind):
    e = emb(kind); c = copy.deepcopy(e); opt = torch.optim.SGD(c.parameters(), lr=0.1)
    c(ids()).sum().backward(); opt.step()
    return float((rows(e)-rows(c)).abs().max())
def swa(kind):
    out = []
    for fn in (None, torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)):
        e = emb(kind); o = emb("one"); kw = {} if fn is None else {"multi_avg_fn": fn}
        a = torch.optim.swa_utils.AveragedModel(e, **kw); b = torch.optim.swa_utils.AveragedModel(o, **kw)
        opt = torch.optim.SGD(e.parameters(), lr=0.1); oo = torch.optim.SGD(o.parameters(), lr=0.1)
        for s in range(2):
            e(ids(s)).sum().backward(); opt.step(); opt.zero_grad(); 
            (o(allids(s)).sum()/dist.get_world_size()).backward(); oo.step(); oo.zero_grad()
            b.update_parameters(o)
            a.update_parameters(e)
        out.append(float((rows(a.module)-rows(b.module)).abs().max()))
    return out
def pickles(kind):
    e = emb(kind)
    out = []
    for f in (lambda: pickle.dumps(e), lambda: torch.save(e, io.BytesIO()), lambda: e.state_dict(), lambda: pickle.dumps(e.table)):
        try: f(); out.append("fine")
        except Exception as x: out.append(f"{type(x).__name__}: {x}")
    return out
def dead_before(kind): pass
ALL = [v for k, v in list(globals().items()) if callable(v) and getattr(v, "__module__", "") == __name__ and v.__code__.co_varnames[:1] == ("kind",) and k not in ("emb",)]
