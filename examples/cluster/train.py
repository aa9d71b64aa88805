"""Train with rows shared out over all processes, whoever has started them: torchrun, srun, a PyTorchJob.

torchrun --nproc-per-node 2 train.py run
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st

ROWS, DIM, BATCH = 100_000, 16, 256


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and targets of all processes: the same at any number of them."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(ROWS, (BATCH, 4), generator=draw) % 1000 * 97
    return ids, (ids % 5).sum(1, keepdim=True) - 8.0


def main() -> None:
    """Train from the last checkpoint in the folder, if there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of the checkpoint: on a file system that all hosts see")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    dist.init_process_group()  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # the same first values everywhere
    emb = st.Embedding(ROWS, DIM, process_group="world", device=device)
    model = nn.Sequential(emb, nn.Flatten(), nn.Linear(4 * DIM, 1, device=device))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    step = 0
    if (args.folder / "manifest.json").exists():
        step = st.load_checkpoint(args.folder, model, optimizer)["step"]
    if rank == 0:
        print(f"{world} processes, from step {step}", flush=True)
    while step < args.steps:
        ids, targets = (part[rank::world].to(device) for part in batch(step))
        loss = nn.functional.mse_loss(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 20 == 0 or step == args.steps:
            st.save_checkpoint(args.folder, model, optimizer, extra={"step": step})
            mean = loss.detach() / world  # parts are of equal size
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
