"""Peak host memory of a trained table, measured: every row and its AdamW state is touched, in a process of its own.

``python bench/memory.py [ROWS] [DIM]`` prints a line of JSON. The base is what the same process held before the table, after
one step of a small one (libraries, thread pools, compiled optimizers).
"""

from __future__ import annotations

import json
import resource
import sys

import torch

import speedtransfer as st

LOOKUPS = 98_304


def peak_bytes() -> int:
    """Return the most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def train_all_rows(rows: int, dim: int) -> st.Table:
    """Step AdamW over every row once, in batches of consecutive ids."""
    emb = st.Embedding(rows, dim, memory="pageable")
    opt = torch.optim.AdamW(emb.parameters(), fused=True)
    for start in range(0, rows, LOOKUPS):
        ids = torch.arange(start, min(start + LOOKUPS, rows))
        emb(ids).sum().backward()
        opt.step()
        opt.zero_grad()
    return emb.table


def main() -> None:
    """Measure and print."""
    rows, dim = (int(a) for a in [*sys.argv[1:], *["10000000", "128"][len(sys.argv) - 1 :]])
    train_all_rows(100, dim)
    base = peak_bytes()
    table = train_all_rows(rows, dim)
    peak = peak_bytes() - base
    print(
        json.dumps(
            {
                "rows": rows,
                "dim": dim,
                "planes": table.planes,
                "planes_bytes": table.nbytes,
                "peak_bytes": peak,
                "beyond_planes": round(peak / table.nbytes - 1, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
