import sys, importlib, textwrap, time
from ranks.run import Pool
def main():
    mod = importlib.import_module("ranks." + sys.argv[1]); names = sys.argv[3:]
    pool = Pool(); two = pool.of(2)
    for f in mod.ALL:
        if names and f.__name__ not in names: continue
        for kind in sys.argv[2].split(","):
            t = time.time()
            try: out = two.fails(f, kind, timeout=5, limit=20)
            except BaseException as x: out = [x]
            outs = [f"{type(o).__name__}: {o}" if isinstance(o, BaseException) else (o if isinstance(o, str) else repr(o)) for o in out]
            if len(set(outs)) == 1: outs = outs[:1]
            print(f"== {f.__name__} [{kind}] {time.time()-t:.1f}s")
            for o in outs: print(textwrap.indent(o[-9000:], "     "))
            sys.stdout.flush()
    pool.close()
if __name__ == "__main__": main()
