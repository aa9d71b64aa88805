"""Train with Lightning on several hosts: the table is made in `configure_model`, a callback saves and loads.

torchrun --nnodes 2 --nproc-per-node 1 ... lightning_train.py run --nodes 2
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import speedtransfer as st

ROWS, DIM, BATCH = 100_000, 16, 256


class Model(L.LightningModule):
    """A table whose rows are shared out, and a layer."""

    def configure_model(self):
        """Make the layers: here, unlike in `__init__`, Lightning has joined the processes."""
        if hasattr(self, "layers"):
            return
        torch.manual_seed(0)
        emb = st.Embedding(ROWS, DIM, process_group="world", device=self.device)
        self.layers = nn.Sequential(emb, nn.Flatten(), nn.Linear(4 * DIM, 1))

    def training_step(self, batch, index):
        """Return the loss of the part of a batch that this process has."""
        ids, targets = batch
        loss = nn.functional.mse_loss(self.layers(ids), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        """Make the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Checkpoints(L.Callback):
    """Save after every epoch, all processes together, and begin with what was saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer, module):
        """Load model, optimizer and how far training has come."""
        if (self.folder / "manifest.json").exists():
            loops = st.load_checkpoint(self.folder, module, trainer.optimizers[0])
            trainer.fit_loop.load_state_dict(loops)
        if trainer.is_global_zero:
            print(f"{trainer.world_size} processes, from step {trainer.global_step}", flush=True)

    def on_train_epoch_end(self, trainer, module):
        """Save them."""
        st.save_checkpoint(self.folder, module, trainer.optimizers[0], extra=trainer.fit_loop.state_dict())


def data() -> TensorDataset:
    """Return ids and their targets."""
    ids = torch.randint(ROWS, (10 * BATCH, 4), generator=torch.Generator().manual_seed(0)) % 1000 * 97
    return TensorDataset(ids, (ids % 5).sum(1, keepdim=True) - 8.0)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of the checkpoint: on a file system that all hosts see")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    trainer = L.Trainer(
        num_nodes=args.nodes,
        devices=1,
        accelerator="auto",
        strategy="ddp",
        max_epochs=args.epochs,
        enable_checkpointing=False,  # Lightning's would ask for state_dict(), which has not all rows
        callbacks=[Checkpoints(args.folder)],
        logger=False,
        enable_progress_bar=False,
    )
    # Lightning gives each process every `nodes`-th example.
    trainer.fit(Model(), DataLoader(data(), BATCH // args.nodes))
    if trainer.is_global_zero:
        print(f"epoch {trainer.current_epoch}: loss {trainer.callback_metrics['loss'].item():.6f}")


if __name__ == "__main__":
    main()
