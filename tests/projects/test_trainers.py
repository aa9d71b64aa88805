"""Accelerate and transformers' Trainer, as their own tutorials use them."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from projects.data import sequences
from projects.pairs import DENSE, WAYS, Outcome, assert_same, classes, compare, hand_over, in_both_ways
from projects.two_towers import ahead, loader, make, scores

pytestmark = pytest.mark.slow


# --- Accelerate -----------------------------------------------------------------------------------------------------


def accelerated(way, clip, accumulate, reads_ahead):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradientAccumulationPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    # Else Accelerate steps when the loader that it has prepared comes to its end, which reading ahead reaches early.
    plugin = GradientAccumulationPlugin(num_steps=accumulate, sync_with_dataloader=not reads_ahead)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = make(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    source = loader(num_workers=2 if reads_ahead else 0)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, source, schedule)
    batches = ahead(accelerator.unwrap_model(model), way, batches) if reads_ahead else batches
    losses = []
    torch.manual_seed(1)
    for _ in range(3):
        for users, items, rating in batches:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(users, items), rating)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    model = accelerator.unwrap_model(model)
    return Outcome({"losses": losses}, {"scores": scores(model)}, model)


@in_both_ways
@pytest.mark.parametrize(("clip", "accumulate", "reads_ahead"), [(False, 1, False), (True, 3, False), (True, 3, True)])
def test_accelerate(clip, accumulate, reads_ahead, way, double):
    pytest.importorskip("accelerate", reason="Accelerate is not installed: make projects")
    compare(accelerated, way, double, clip, accumulate, reads_ahead)


# --- transformers' Trainer --------------------------------------------------------------------------------------------


def trained_by_trainer(way, folder, resume, **options):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    ids = torch.tensor(sequences(12)[0])
    data = [{"input_ids": row, "labels": row} for row in ids]
    config = GPT2Config(vocab_size=97, n_positions=24, n_embd=16, n_layer=1, n_head=2)
    arguments = {"output_dir": f"{folder}/{way}", "num_train_epochs": 3, "per_device_train_batch_size": 16, "seed": 3}
    arguments |= {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "epoch", "eval_strategy": "epoch"}
    arguments |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, **options}

    def new():
        torch.manual_seed(0)
        with classes(way, "transformers"):
            model = hand_over(GPT2LMHeadModel(config), way)
        settings = TrainingArguments(**arguments)
        return Trainer(model=model, args=settings, train_dataset=data, eval_dataset=data[:20])

    trainer = new()
    trainer.train()
    if resume:
        from transformers.trainer_utils import get_last_checkpoint

        whole = trainer
        found = Path(arguments["output_dir"]).glob("checkpoint-*")
        folders = sorted((int(path.name.split("-")[1]), path) for path in found)
        assert get_last_checkpoint(arguments["output_dir"])
        trainer = new()
        trainer.train(resume_from_checkpoint=str(folders[0][1]))
        for ours, before in zip(trainer.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), before.detach(), rtol=0, atol=1e-5)
    log = trainer.state.log_history
    printed = {key: [entry[key] for entry in log if key in entry] for key in ("loss", "eval_loss", "grad_norm")}
    return Outcome(printed, {"logits": trainer.predict(data[:8]).predictions}, trainer.model)


ACCUMULATED = {
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
}
ADAFACTOR = {"gradient_checkpointing": True, "optim": "adafactor"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("resume", "options"),
    [(False, {}), (True, {}), (False, ACCUMULATED), (False, ADAFACTOR), (False, {"bf16": True})],
    ids=["defaults", "resumed", "accumulated", "adafactor", "bf16"],
)
def test_trainer(resume, options, way, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: make projects")
    pytest.importorskip("accelerate", reason="Accelerate is not installed: make projects")
    if options.get("optim") == "adafactor":  # not row by row: refused by name, nothing else
        with pytest.raises(RuntimeError, match="Adafactor"):
            trained_by_trainer(way, str(tmp_path), resume, **options)
        return
    ours, dense = (trained_by_trainer(which, str(tmp_path), resume, **options) for which in (way, DENSE))
    assert_same(ours, dense, 2e-3 if "bf16" in options else None)
