"""Train with Ray Train on data of Ray Data: a worker or a host that dies is replaced, and training goes on.

python ray_train.py /shared/run --workers 2
"""

import argparse
from pathlib import Path

import numpy as np
import ray
import ray.data
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn

import speedtransfer as st

ROWS, DIM, EXAMPLES = 100_000, 16, 2560


def examples(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Make examples of their numbers; yours are read from files: `ray.data.read_parquet`."""
    ids = batch["id"][:, None] * [31, 37, 41, 43] % 1000 * 97
    return {"ids": ids, "targets": (ids % 5).sum(1, keepdims=True).astype(np.float32) - 8}


def train(config: dict) -> None:
    """Train from the last checkpoint in the folder, if there is one, as each of the workers."""
    context, device = ray.train.get_context(), ray.train.torch.get_device()
    torch.manual_seed(0)
    emb = st.Embedding(ROWS, DIM, process_group="world", device=device)  # Ray has joined the workers
    model = nn.Sequential(emb, nn.Flatten(), nn.Linear(4 * DIM, 1))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain = getattr(model, "module", model)  # prepare_model wraps it where there are several workers

    folder, epoch = Path(config["folder"]), 0
    if (folder / "manifest.json").exists():
        epoch = st.load_checkpoint(folder, plain, optimizer)["epoch"]
    if context.get_world_rank() == 0:
        print(f"{context.get_world_size()} workers, from epoch {epoch}", flush=True)
    data = ray.train.get_dataset_shard("train")
    while epoch < config["epochs"]:
        batches = data.iter_torch_batches(batch_size=config["batch"] // context.get_world_size())
        batches = st.prefetch(st.equal_steps(batches), lambda batch: {emb: batch["ids"]})
        for batch in batches:
            loss = nn.functional.mse_loss(model(batch["ids"]), batch["targets"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch += 1
        st.save_checkpoint(folder, plain, optimizer, extra={"epoch": epoch})
        mean = loss.detach() / context.get_world_size()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
        ray.train.report({"epoch": epoch, "loss": mean.item()})
        if context.get_world_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.6f}", flush=True)


def main() -> None:
    """Start the workers and wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of the checkpoint: on a file system that all hosts see")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256, help="examples of all workers together")
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU")
    args = parser.parse_args()

    folder = args.folder.absolute()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": str(folder / "checkpoint"), "epochs": args.epochs, "batch": args.batch},
        datasets={"train": ray.data.range(EXAMPLES).map_batches(examples)},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
