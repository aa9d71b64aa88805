"""Train in two processes that share a device, over gloo, and compare with one process; started by test_ranks.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import speedtransfer as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu import emulated

ROWS, DIM, STEPS = 200, 8, 6


def train(group, ranks, options):
    device = torch.device("cuda", 0)
    torch.manual_seed(3)
    options = {**options, "process_group": group}
    if group is None:
        options = {name: value for name, value in options.items() if value != "shared"}
    emb = st.Embedding(ROWS, DIM, device=device, **options)
    out = nn.Linear(DIM, 1, device=device)
    params = [*emb.parameters(), *out.parameters()]
    opt = torch.optim.AdamW(params, lr=0.05)
    world = 1 if group is None else len(dist.get_process_group_ranks(group))
    for step in range(STEPS):
        opt.zero_grad()
        ids = [torch.randint(0, ROWS, (12,), generator=torch.Generator().manual_seed(10 * step + r)) for r in ranks]
        out(emb(torch.cat(ids).to(device))).square().sum().mul(world).backward()
        if group is not None:
            for param in out.parameters():
                grad = param.grad.cpu()
                dist.all_reduce(grad)
                param.grad = (grad / world).to(device)
        norm = torch.zeros(())
        # An emulator of a device does not know subclasses of tensors.
        if "FAKE_KERNELS" not in os.environ:
            norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
    emb.table.local.wait() if group is not None else emb.table.wait()
    return emb.table.gather(torch.arange(ROWS, device=device)).cpu(), float(norm)


def main(folder: str) -> None:
    emulated.install()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, options in json.loads(Path(folder, "options.json").read_text()).items():
        if "storage_dtype" in options:
            options["storage_dtype"] = torch.int8
        rows, norm = train(dist.group.WORLD, [rank], options)
        wanted, wanted_norm = train(None, list(range(world)), options)
        found[name] = [float((rows - wanted).abs().max()), float(wanted.abs().max()), norm, wanted_norm]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
