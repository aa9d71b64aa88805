"""Train with Accelerate on several hosts: all is prepared but the optimizer's state, which its table keeps where it is.

torchrun --nnodes 2 --nproc-per-node 1 ... accelerate_train.py run
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import speedtransfer as st

ROWS, DIM, BATCH = 100_000, 16, 256


def data() -> TensorDataset:
    """Return ids and their targets."""
    ids = torch.randint(ROWS, (10 * BATCH, 4), generator=torch.Generator().manual_seed(0)) % 1000 * 97
    return TensorDataset(ids, (ids % 5).sum(1, keepdim=True) - 8.0)


def main() -> None:
    """Train from the last checkpoint in the folder, if there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of the checkpoint: on a file system that all hosts see")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    # Joins the processes: make the table after it. Without cpu=True it does not wrap the model on hosts without a GPU.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    emb = st.Embedding(ROWS, DIM, process_group="world", device=accelerator.device)
    model = nn.Sequential(emb, nn.Flatten(), nn.Linear(4 * DIM, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data(), BATCH // accelerator.num_processes)
    model, loader = accelerator.prepare(model, loader)
    # Placing it would ask for its state_dict(), which has not all rows.
    optimizer = accelerator.prepare_optimizer(optimizer, device_placement=False)

    epoch, plain = 0, accelerator.unwrap_model(model)
    if (args.folder / "manifest.json").exists():
        epoch = st.load_checkpoint(args.folder, plain, optimizer.optimizer)["epoch"]
    accelerator.print(f"{accelerator.num_processes} processes, from epoch {epoch}", flush=True)
    while epoch < args.epochs:
        losses = []
        for ids, targets in loader:
            loss = nn.functional.mse_loss(model(ids), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        epoch += 1
        # In place of accelerator.save_state: every process writes its rows.
        st.save_checkpoint(args.folder, plain, optimizer.optimizer, extra={"epoch": epoch})
        mean = accelerator.reduce(torch.stack(losses), "mean").mean().item()
        accelerator.print(f"epoch {epoch}: loss {mean:.6f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
