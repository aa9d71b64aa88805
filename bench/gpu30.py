"""Experiments of the first half hour on a GPU that bench/ has not: python3 gpu30.py profile|step|fbgemm|duplex|few|w2v [--rows N].

Run from the root of the repository. Prints lines as it goes and appends them to $OUT/gpu30.jsonl. Nothing here has run on a GPU.
"""
import argparse, itertools, json, os, statistics, sys, tempfile, time
from pathlib import Path

sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "bench")]
import torch
import speedtransfer as st
from speedtransfer.cuda import pinned_empty
from speedtransfer.engines import MappedEngine

CUDA = torch.cuda.is_available()
DEV, MEM, SWITCH, DIM = ("cuda", "pinned", "SPEEDTRANSFER_FUSED_STEP", 128) if CUDA else ("cpu", "pageable", "X", 128)


def say(**facts):
    print("  ".join(f"{k} {round(v, 4) if isinstance(v, float) else v}" for k, v in facts.items()), flush=True)
    with open(Path(os.environ.get("OUT", "."), "gpu30.jsonl"), "a") as file:
        file.write(json.dumps(facts) + "\n")


def sync():
    if CUDA:
        torch.cuda.synchronize()


def ms(step, repeats=30, warm=5):
    """Milliseconds of a step: wall clock over many, so that host and device overlap as in training; and of the host alone."""
    for _ in range(warm):
        step()
    sync()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    queued = time.perf_counter()
    sync()
    return 1e3 * (time.perf_counter() - start) / repeats, 1e3 * (queued - start) / repeats


class Zero(st.Embedding):
    def reset_parameters(self):
        """Rows stay zero: filling gigabytes takes longer than measuring."""


def ids_of(rows, lookups, distinct, seed):
    draw = torch.Generator().manual_seed(seed)
    some = torch.randint(rows, (distinct,), generator=draw)
    return torch.cat([some, some[torch.randint(distinct, (lookups - distinct,), generator=draw)]])[
        torch.randperm(lookups, generator=draw)
    ].to(DEV)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def stepper(tables, batches, make):
    opt = make([p for t in tables for p in t.parameters()])
    grad, turn = torch.ones(len(batches[0][0]), DIM, device=DEV) / 8, itertools.cycle(batches)

    def step():
        outs = [table(ids) for table, ids in zip(tables, next(turn))]
        torch.autograd.backward(outs, [grad] * len(outs))
        opt.step()
        opt.zero_grad()

    return step


def tables_of(count, rows, engine="mapped", idle="lazy"):
    made = [Zero(rows, DIM, memory=MEM, device=DEV, idle=idle) for _ in range(count)]
    for one in made:
        if CUDA:
            one.table.engine = MappedEngine("cuda", **json.loads(os.environ["MAPPED"])) if "MAPPED" in os.environ else engine
    return made


def step(args):
    """The kernel that steps in place, on and off, for small and large tables: experiment 3."""
    for rows in (args.rows // 16, args.rows):
        batches = [[ids_of(rows, 131_072, 120_000, seed)] for seed in range(4)]
        for name, make in OPTIMIZERS.items():
            for idle in ("lazy", "exact")[: 1 + (name == "AdamW")]:
                start = time.perf_counter()
                tables = tables_of(1, rows, idle=idle)
                say(what="make", rows=rows, seconds=time.perf_counter() - start)
                for fused in ("0", "1")[: 1 + (idle == "lazy")]:
                    os.environ[SWITCH] = fused
                    total, host = ms(stepper(tables, batches, make))
                    say(what="step", rows=rows, optimizer=name, idle=idle, fused_step=fused, ms=total, host_ms=host)
                del tables
        del batches
    dense = torch.nn.Embedding(1_250_000, DIM, device=DEV)
    total, host = ms(stepper([dense], [[ids_of(1_250_000, 131_072, 120_000, seed)] for seed in range(4)], OPTIMIZERS["AdamW"]))
    say(what="step", rows=1_250_000, optimizer="AdamW", dense=True, ms=total, host_ms=host)


def fbgemm(args):
    """FBGEMM's: 1,048,570 lookups, 433,720 distinct, in 10 tables: 13.6 ms SGD, 24.1 ms Adam on an H100. Experiment 4."""
    lookups, distinct = 104_857, 43_372
    for name, make in OPTIMIZERS.items():
        batches = [[ids_of(args.rows, lookups, distinct, 10 * s + t) for t in range(10)] for s in range(4)]
        for idle in ("lazy", "exact")[: 1 + (name == "AdamW")]:
            tables = tables_of(10, args.rows, idle=idle)
            for fused in ("0", "1")[: 1 + (idle == "lazy")]:
                os.environ[SWITCH] = fused
                total, host = ms(stepper(tables, batches, make), 10, 3)
                say(what="fbgemm", tables=10, rows=args.rows, optimizer=name, idle=idle, fused_step=fused, ms=total, host_ms=host)
            del tables


def profile(args):
    """Device time by kernel of one lazy step: which are not the bus. Experiment 2."""
    from torch.profiler import ProfilerActivity as Activity, profile as record

    batches = [[ids_of(args.rows, 131_072, 120_000, seed)] for seed in range(4)]
    for fused in ("0", "1"):
        os.environ[SWITCH] = fused
        one = stepper(tables_of(1, args.rows), batches, OPTIMIZERS["AdamW"])
        ms(one, 5)
        with record(activities=[Activity.CUDA if CUDA else Activity.CPU]) as found:
            for _ in range(5):
                one()
            sync()
        for item in found.key_averages():
            taken = getattr(item, "self_device_time_total", 0) or item.self_cpu_time_total
            if taken >= 25:  # 5 us a step
                say(what="profile", fused_step=fused, kernel=item.key[:60], calls=item.count / 5, us_a_step=taken / 5)


def timed(*queues, repeats=8):
    """GB/s of each (stream, bytes, call) while all run at once, by events."""
    found = [[] for _ in queues]
    for number in range(repeats + 2):
        torch.cuda.synchronize()
        marks = []
        for stream, _, call in queues:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(4):
                    call()
                stop.record()
                marks.append((start, stop))
        torch.cuda.synchronize()
        for rates, (start, stop), (_, num_bytes, _) in zip(found, marks, queues):
            rates.append(4 * num_bytes / start.elapsed_time(stop) / 1e6)
    return [round(statistics.median(rates[2:]), 1) for rates in found]


def planes(args, count=2):
    made = [pinned_empty(args.rows * 4 * DIM, "cuda").view(torch.float32).view(-1, DIM).zero_() for _ in range(count)]
    index = [torch.randint(args.rows, (131_072,), device="cuda").unique() for _ in range(count)]
    return made, index, [torch.zeros(len(ids), DIM, device="cuda") for ids in index]


def duplex(args):
    """Gather, scatter and the copy engine alone and together: what the bus gives both ways, and both engines one way. 5."""
    (a, b), (i, j), (x, y) = planes(args)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    read, write = MappedEngine("cuda"), MappedEngine("cuda")  # two, so that neither waits for the other
    gather = one, x.nbytes, lambda: read.gather([a], i, [x])
    scatter = two, y.nbytes, lambda: write.scatter([b], j, [y])
    size = 64 << 20
    there = torch.empty(size // 4, device="cuda")
    copy = two, size, lambda: there.copy_(b.view(-1)[: size // 4], non_blocking=True)
    back = one, size, lambda: a.view(-1)[: size // 4].copy_(there, non_blocking=True)
    for name, queues in {
        "gather": [gather], "scatter": [scatter], "gather + scatter": [gather, scatter], "copy H2D": [copy],
        "copy H2D + D2H": [copy, back], "gather + copy H2D": [gather, copy],
    }.items():  # fmt: skip
        say(what="duplex", together=name, gb_per_s=timed(*queues))


def few(args):
    """What launches of few blocks reach, and what they cost a matrix product beside them. Experiment 6."""
    (a, _), (i, _), (x, _) = planes(args)
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out, main, side = torch.empty_like(left), torch.cuda.Stream(), torch.cuda.Stream()
    product = main, 2 * 8192**3 / 1e3, lambda: torch.mm(left, left, out=out)  # "GB/s" are TFLOP/s
    say(what="few", product_alone_tflops=timed(product)[0])
    for kernel, blocks in [("lanes", n) for n in (4, 8, 16, 32, 66, 132, 264)] + [("bulk", n) for n in (4, 8, 16, 33, 66)]:
        try:
            engine = MappedEngine("cuda", max_blocks=blocks, kernel=kernel)
            move = side, x.nbytes, lambda engine=engine: engine.gather([a], i, [x])
            alone, (rate, speed) = timed(move)[0], timed(move, product)
            say(what="few", kernel=kernel, blocks=blocks, alone=alone, beside=rate, product_tflops=speed)
        except Exception as error:
            say(what="few", kernel=kernel, blocks=blocks, error=str(error)[:200])


def pages(args):
    """Rates by allocator, size and launch: rows sorted."""
    import first_look

    engines = {f"{k} {b}": MappedEngine("cuda", max_blocks=b, kernel=k) for k, b in
               [("lanes", 16), ("lanes", 32), ("lanes", 66), ("lanes", 264), ("bulk", 33), ("bulk", 132)]}
    x = torch.zeros(131_072, DIM, device="cuda")
    for name, make in first_look.ALLOCATORS.items():
        start = time.perf_counter()
        try:
            flat, free = make(int(max(args.gb) * 2**9) << 21)
        except Exception as error:
            say(what="pages", allocator=name, error=str(error)[:200])
            continue
        say(what="pages", allocator=name, gb=max(args.gb), seconds=time.perf_counter() - start, pages=first_look.pages(flat.data_ptr()))
        flat.zero_()
        for gb in args.gb:
            table = flat[: int(gb * 2**9) << 21].view(torch.float32).view(-1, DIM)
            sets = itertools.cycle([torch.randint(len(table), (131_072,), device="cuda").unique() for _ in range(6)])
            for label, engine in engines.items():
                rates = []
                for way in ("gather", "scatter"):
                    def call():
                        ids = next(sets)
                        getattr(engine, way)([table], ids, [x[: len(ids)]])
                    rates += timed((torch.cuda.current_stream(), x.nbytes, call), repeats=5)
                say(what="pages", allocator=name, gb=gb, engine=label, gather=rates[0], scatter=rates[1])
        torch.cuda.synchronize()
        del table
        free()
        del flat


def together(args):
    """A gather of one plane beside a scatter of another, by launch: do both ways add up?"""
    (a, b), (i, j), (x, y) = planes(args)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    for (rk, rb), (wk, wb) in itertools.product([("lanes", 16), ("lanes", 264), ("bulk", 33)], repeat=2):
        read, write = MappedEngine("cuda", rb, kernel=rk), MappedEngine("cuda", wb, kernel=wk)
        gather = one, x.nbytes, lambda: read.gather([a], i, [x])
        scatter = two, y.nbytes, lambda: write.scatter([b], j, [y])
        alone = timed(gather, repeats=4) + timed(scatter, repeats=4)
        say(what="together", rows=args.rows, read=f"{rk} {rb}", write=f"{wk} {wb}", alone=alone, both=timed(gather, scatter, repeats=5))


def host(args):
    """Where the host's time of ten small tables goes."""
    import cProfile, pstats

    for name in OPTIMIZERS:
        batches = [[ids_of(100_000, 2_000, 1_000, 10 * s + t) for t in range(10)] for s in range(4)]
        one = stepper(tables_of(10, 100_000), batches, OPTIMIZERS[name])
        total, queued = ms(one, 50)
        say(what="host", optimizer=name, tables=10, lookups=2_000, ms=total, host_ms=queued)
        profiler = cProfile.Profile()
        profiler.enable()
        ms(one, 50, 0)
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def w2v(args):
    """Words a second of a block step of word2vec, on the device and on the host. Experiment 9."""
    import dataclasses

    from warm_steps import Sizes, Words

    class Flat(Words):
        def _block(self, sizes, generator):
            made = super()._block(sizes, generator)
            return dataclasses.replace(made, negatives=made.negatives.flatten())

    for device in dict.fromkeys((DEV, "cpu")):
        for model in ("skipgram", "cbow"):
            form, words = Flat(memory="device" if device == "cuda" else "pageable", model=model), 4096
            with tempfile.TemporaryDirectory() as folder:
                one = form.build(Sizes(rows=140_000, lookups=16 * words, dim=100), torch.device(device), Path(folder))
                total, host = ms(one, 10, 3)
                kernels = {} if device == "cpu" else kernels_of(one)
            rate = round(words / total * 1e3)
            say(what="w2v", device=device, model=model, ms_a_block=total, host_ms=host, words_per_s=rate, **kernels)


def kernels_of(one, repeats=10):
    """Milliseconds of the kernels of word2vec alone within a step."""
    from speedtransfer.word2vec import spans

    right, marks = spans.train_by_kernel, []

    def timed_kernel(*given):
        marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        marks[-1][0].record()
        result = right(*given)
        marks[-1][1].record()
        return result

    spans.train_by_kernel = timed_kernel
    for _ in range(repeats):
        one()
        sync()
    spans.train_by_kernel = right
    return {"kernels_ms": statistics.median(start.elapsed_time(stop) for start, stop in marks)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=["profile", "step", "fbgemm", "duplex", "few", "w2v", "pages", "together", "host"])
    parser.add_argument("--gb", type=float, nargs="+", default=[2.0, 4.0, 8.0, 16.0, 32.0])
    parser.add_argument("--rows", type=int, default=8_000_000)
    args = parser.parse_args()
    os.environ.setdefault("SPEEDTRANSFER_CALIBRATE", "0")
    globals()[args.name](args)
