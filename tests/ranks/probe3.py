from ranks.probe1 import *
import math, gc, os, warnings
del ALL
for _k, _v in list(globals().items()):
    if callable(_v) and getattr(_v, "__module__", "") == "ranks.probe1" and _k not in ("emb","ids","allids","rows","R"): del globals()[_k]
from ranks.probe2 import tries
def W(): return dist.get_world_size()
class M(nn.Module):
    def __init__(s, e): super().__init__(); s.e = e; s.l = nn.Linear(D, 1, dtype=torch.float64)
    def forward(s, i, use=True): return s.l(s.e(i) if use else torch.ones(1, D, dtype=torch.float64))
def pair(kind, **o):
    torch.manual_seed(1); e = emb("one" if kind == "replicas" else kind, **o); one = emb("one", **o)
    torch.manual_seed(2); m = M(e); torch.manual_seed(2); mo = M(one); 
    return m, mo
def run(m, model, mo, opt_kind=torch.optim.SGD, steps=3, use=None, **ddp):
    opt, oo = opt_kind(m.parameters(), lr=.1), opt_kind(mo.parameters(), lr=.1)
    for s in range(steps):
        opt.zero_grad(); oo.zero_grad()
        u = (lambda r: True) if use is None else (lambda r: use(s, r))
        model(ids(s), u(R())).square().sum().backward(); opt.step()
        (sum(mo(ids(s, r), u(r)).square().sum() for r in range(W()))/W()).backward(); oo.step()
    return float((rows(m.e)-rows(mo.e)).abs().max()), float((m.l.weight-mo.l.weight).detach().abs().max())
def quiet(): warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole")

def floats(kind):
    if kind == "replicas": return
    out = {}
    for n in ("float", "bfloat16", "half"):
        m, mo = pair(kind); getattr(m, n)(); getattr(mo, n)()
        opt, oo = torch.optim.SGD(m.e.parameters(), lr=.1), torch.optim.SGD(mo.e.parameters(), lr=.1)
        for s in range(2):
            opt.zero_grad(); oo.zero_grad(); m.e(ids(s)).square().sum().backward(); opt.step(); (mo.e(allids(s)).square().sum()/W()).backward(); oo.step()
        out[n] = float((rows(m.e)-rows(mo.e)).abs().max()), m.e.table.memory
    return out
def ddp_kinds(kind):
    quiet(); out = {}
    for n, k, use in [("plain", {}, None), ("find", {"find_unused_parameters": True}, None), ("find_unused_one", {"find_unused_parameters": True}, lambda s, r: r == 0 or s == 2), ("static", {"static_graph": True}, None), ("mesh", {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (W(),))}, None), ("init_sync", {"init_sync": False}, None), ("bucket", {"gradient_as_bucket_view": True}, None)]:
        m, mo = pair(kind)
        try: out[n] = run(m, DDP(m, **k), mo, use=use)
        except Exception as x: out[n] = f"{type(x).__name__}: {x}"[:300]
        dist.barrier()
    return out
def ddp_root(kind):
    quiet()
    m, mo = pair(kind)
    d = DDP(m.e) if kind == "replicas" else m.e
    try:
        d = DDP(m.e)
    except Exception as x: return f"{type(x).__name__}: {x}"
    opt, oo = torch.optim.SGD(m.e.parameters(), lr=.1), torch.optim.SGD(mo.e.parameters(), lr=.1)
    for s in range(3):
        opt.zero_grad(); oo.zero_grad(); d(ids(s)).square().sum().backward(); opt.step(); (mo.e(allids(s)).square().sum()/W()).backward(); oo.step()
    return float((rows(m.e)-rows(mo.e)).abs().max())
def ddp_frozen(kind):
    quiet(); m, mo = pair(kind); m.e.requires_grad_(False); mo.e.requires_grad_(False)
    return run(m, DDP(m), mo)
def ddp_user_ignore(kind):
    quiet(); m, mo = pair(kind); m._ddp_params_and_buffers_to_ignore = ["e.weight"]
    return run(m, DDP(m), mo)
def ddp_differs_at_start(kind):
    quiet(); m, mo = pair(kind)
    if kind == "replicas":
        with torch.no_grad(): m.e.weight.add_(R()) 
    return run(m, DDP(m), mo)
def ddp_two(kind):
    quiet(); m, mo = pair(kind); a, b = DDP(m), DDP(nn.Sequential(m.e, nn.Linear(D, 1, dtype=torch.float64)))
    return run(m, a, mo)
def ddp_join(kind):
    quiet(); m, mo = pair(kind); a = DDP(m)
    with a.join(): pass
def ddp_subgroup(kind):
    quiet(); m, mo = pair(kind); g = dist.new_group([0]); 
    if R() == 0: DDP(m, process_group=g)
def ddp_deepcopy(kind):
    quiet(); m, mo = pair(kind); a = DDP(m)
    def f():
        b = copy.deepcopy(a); return run(b.module, b, mo)
    def p():
        return len(pickle.dumps(a))
    return tries({"copy": f, "pickle": p})
def ddp_accumulate(kind):
    quiet(); m, mo = pair(kind); a = DDP(m); opt, oo = torch.optim.SGD(m.parameters(), lr=.1), torch.optim.SGD(mo.parameters(), lr=.1)
    for s in range(2):
        with a.no_sync(): a(ids(s)).square().sum().backward()
        a(ids(s+5)).square().sum().backward(); n = torch.nn.utils.clip_grad_norm_(m.parameters(), 1.); opt.step(); opt.zero_grad()
        ((mo(allids(s)).square().sum()+mo(allids(s+5)).square().sum())/W()).backward(); n2 = torch.nn.utils.clip_grad_norm_(mo.parameters(), 1.); oo.step(); oo.zero_grad()
    return float((rows(m.e)-rows(mo.e)).abs().max()), float(n-n2)
def ddp_module_called(kind):
    quiet(); m, mo = pair(kind); a = DDP(m); opt = torch.optim.SGD(m.e.parameters(), lr=.1); oo = torch.optim.SGD(mo.e.parameters(), lr=.1)
    for s in range(2):
        m(ids(s)).square().sum().backward(); opt.step(); opt.zero_grad(); (mo(allids(s)).square().sum()/W()).backward(); oo.step(); oo.zero_grad()
    return float((rows(m.e)-rows(mo.e)).abs().max())
def ddp_skips(kind):
    quiet(); m, mo = pair(kind); a = DDP(m); opt = torch.optim.AdamW(m.parameters(), lr=.1)
    for s in range(4):
        opt.zero_grad(); a(ids(s)).sum().backward()
        if not (s == 2 and R() == 1): opt.step()
    return "no error"
def ddp_lr(kind):
    quiet(); m, mo = pair(kind); a = DDP(m); opt = torch.optim.AdamW(m.parameters(), lr=.1)
    for s in range(4):
        if s == 2 and R(): opt.param_groups[0]["lr"] = .3
        opt.zero_grad(); a(ids(s)).sum().backward(); opt.step()
    return "no error"
def zero(kind):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    m, mo = pair(kind); ZeroRedundancyOptimizer(m.parameters(), torch.optim.SGD, lr=.1)
def hook_ddp(kind):
    quiet(); m, mo = pair(kind); a = DDP(m); c = []
    for x in (m, mo): x.e.weight.register_hook(lambda g: c.append(1) or g.clamp(-.01, .01))
    r = run(m, a, mo, steps=1); return r, len(c)
def gan_ddp(kind):
    quiet(); m, mo = pair(kind); a = DDP(m, find_unused_parameters=True); opt, oo = torch.optim.SGD(m.parameters(), lr=.1), torch.optim.SGD(mo.parameters(), lr=.1); lin = nn.Linear(2, 1)
    for s in range(3):
        y = a(ids(s), R() == 0).square().sum(); lin(torch.ones(2)).sum().backward(); y.backward(); opt.step(); opt.zero_grad()
        (sum(mo(ids(s, r), r == 0).square().sum() for r in range(W()))/W()).backward(); oo.step(); oo.zero_grad()
    return float((rows(m.e)-rows(mo.e)).abs().max())
def fsdp(kind):
    from torch.distributed.fsdp import fully_shard
    m, mo = pair(kind)
    mesh = dist.device_mesh.init_device_mesh("cpu", (W(),))
    def with_ignored():
        fully_shard(m, mesh=mesh, ignored_params=st.table_parameters(m))
        opt, oo = torch.optim.AdamW(m.parameters(), lr=.1), torch.optim.AdamW(mo.parameters(), lr=.1); ns = []
        for s in range(3):
            opt.zero_grad(); oo.zero_grad(); m(ids(s)).square().sum().backward(); n = st.clip_grad_norm_(m.parameters(), .5); opt.step()
            (mo(allids(s)).square().sum()/W()).backward(); n2 = torch.nn.utils.clip_grad_norm_(mo.parameters(), .5); oo.step(); ns.append(abs(float(n-n2)))
        return float((rows(m.e)-rows(mo.e)).abs().max()), float((m.l.weight.full_tensor()-mo.l.weight).detach().abs().max()), max(ns)
    def without():
        m2, _ = pair(kind); fully_shard(m2, mesh=mesh)
    def full(): return {k: tuple(v.shape) for k, v in st.full_state_dict(m).items()}
    return tries({"with": with_ignored, "without": without, "full": full})
def leaks(kind):
    if kind == "replicas": return
    def count(): return len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm")), sum(1 for l in open("/proc/self/maps") if "memfd" in l)
    e = emb(kind); e(ids()).sum().backward(); del e; gc.collect(); a = count()
    for i in range(40):
        e = emb(kind); o = torch.optim.Adam(e.parameters()); e(ids()).sum().backward(); o.step(); del e, o
    gc.collect(); from speedtransfer.optim import reducers
    reducers._alive()
    return a, count(), len(reducers.made)
def ema_default(kind):
    e = emb("one" if kind == "replicas" else kind); a = torch.optim.swa_utils.AveragedModel(e); a.update_parameters(e)
    return "fine"
def ghosts(kind):
    """clip with a plain gradient"""
    m, mo = pair(kind); return
ALL = [v for k, v in list(globals().items()) if callable(v) and getattr(v, "__module__", "") == __name__ and hasattr(v, "__code__") and v.__code__.co_varnames[:1] == ("kind",) and k not in ("emb","pair")]
