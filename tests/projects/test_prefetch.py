"""`speedtransfer.prefetch` within the loops of others: the same numbers as without, in Lightning and Accelerate."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import speedtransfer as st
from projects.two_towers import columns, loader, make, scores

pytestmark = pytest.mark.slow


def ids_of(net, batch):
    users, items, _ = batch
    return [(net.user, users), (net.item, items)]


def ahead(net, batches, depth=2):
    return st.prefetch(batches, functools.partial(ids_of, net), depth)


def with_workers():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(*columns()),
        batch_size=64,
        shuffle=True,
        generator=generator,
        num_workers=2,
        persistent_workers=True,
    )


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)


# --- Lightning --------------------------------------------------------------------------------------------------------


def fitted(prefetching, tmp_path, batches, **options):
    """Fit twice: from the start, and on from the checkpoint of the first."""
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed: make projects")
    from projects.test_lightning import Module

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    folder, found = tmp_path / str(prefetching), {}
    last = None
    for epochs in (1, 3):
        lightning.seed_everything(7, verbose=False)
        module = Module("swap")
        source, checked = batches(), loader(seed=1)
        if prefetching:
            source, checked = ahead(module.net, source), ahead(module.net, checked)
        runner = lightning.Trainer(max_epochs=epochs, default_root_dir=folder, **quiet, **options)
        runner.fit(module, source, checked, ckpt_path=last)
        last = folder / f"{epochs}.ckpt"
        runner.save_checkpoint(last)
        found |= {f"losses {epochs}": torch.tensor(module.losses), f"scores {epochs}": scores(module)}
        found |= {f"{name} {epochs}": float(value) for name, value in runner.callback_metrics.items()}
        found |= {f"{name} {epochs}": value for name, value in module.state_dict().items()}
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3}, {"limit_train_batches": 5, "num_sanity_val_steps": 1}],
    ids=["plain", "accumulate", "limited"],
)
@pytest.mark.parametrize("batches", [loader, with_workers], ids=["here", "workers"])
def test_lightning(tmp_path, batches, options):
    pytest.importorskip("lightning", reason="Lightning is not installed: make projects")
    same(*(fitted(prefetching, tmp_path, batches, **options) for prefetching in (False, True)))


# --- Accelerate -------------------------------------------------------------------------------------------------------


def accelerated(prefetching, batches, clip, accumulate):
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed: make projects")
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradientAccumulationPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    # Else Accelerate steps when the loader that it has prepared comes to its end, which reading ahead reaches early.
    plugin = GradientAccumulationPlugin(num_steps=accumulate, sync_with_dataloader=False)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = make("swap")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, source = accelerator.prepare(model, optimizer, batches())
    net = accelerator.unwrap_model(model)
    source = ahead(net, source) if prefetching else source
    losses = []
    torch.manual_seed(1)
    for _ in range(2):
        for users, items, rating in source:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(users, items), rating)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return {"losses": torch.tensor(losses), "scores": scores(net), **net.state_dict()}


@pytest.mark.parametrize(("clip", "accumulate"), [(False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("batches", [loader, with_workers], ids=["here", "workers"])
def test_accelerate(batches, clip, accumulate):
    pytest.importorskip("accelerate", reason="Accelerate is not installed: make projects")
    same(*(accelerated(prefetching, batches, clip, accumulate) for prefetching in (False, True)))
