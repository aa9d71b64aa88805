"""Accelerate, as its own tutorials use it."""

import pytest
import torch
import torch.nn.functional as F

from projects.pairs import Outcome, compare, in_both_ways
from projects.two_towers import ahead, loader, make, scores

pytestmark = pytest.mark.slow


def accelerated(way: str, clip: bool, accumulate: int, reads_ahead: bool) -> Outcome:
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
    found = []
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
                found.append(loss.item())
    model = accelerator.unwrap_model(model)
    return Outcome({"losses": found}, {"scores": scores(model)}, model)


@in_both_ways
@pytest.mark.parametrize(("clip", "accumulate", "reads_ahead"), [(False, 1, False), (True, 3, False), (True, 3, True)])
def test_accelerate(clip, accumulate, reads_ahead, way, double):
    pytest.importorskip("accelerate", reason="Accelerate is not installed: make projects")
    compare(accelerated, way, double, clip, accumulate, reads_ahead)
