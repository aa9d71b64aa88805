"""Moving averages of a model: ema_pytorch, torch_ema and timm's file, as their examples use them."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from projects.pairs import Outcome, compare, in_both_ways, stepped
from projects.two_towers import loader, make, scores

pytestmark = pytest.mark.slow

EPOCHS = 3


def train(way: str, start, after_step):
    """Train; `start(model)` makes the average and `after_step(average, model)` feeds it. Return the model, it, the losses."""
    model = make(way)
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    average = start(model)

    def losses():
        for epoch in range(EPOCHS):
            for users, items, rating in loader(seed=epoch):
                yield F.mse_loss(model(users, items), rating)
                after_step(average, model)

    torch.manual_seed(1)
    return model, average, stepped(opt, losses())


def outcome(model, losses, averaged, **values) -> Outcome:
    """Compare the trained model, and what the average answers, which is not what the model does."""
    answers = scores(averaged)
    assert not torch.allclose(answers, scores(model), atol=1e-3)
    return Outcome({"losses": losses}, {"average": answers, "weights": dict(averaged.state_dict()), **values}, model)


def ema_pytorch(way: str) -> Outcome:
    from ema_pytorch import EMA

    def start(model):
        return EMA(model, beta=0.9, update_after_step=2, update_every=2)

    model, ema, losses = train(way, start, lambda ema, model: ema.update())
    loaded = EMA(make(way), beta=0.9)
    loaded.load_state_dict(ema.state_dict())
    assert torch.equal(scores(loaded.ema_model), scores(ema.ema_model))
    return outcome(model, losses, ema.ema_model)


def torch_ema(way: str) -> Outcome:
    from torch_ema import ExponentialMovingAverage

    model, ema, losses = train(
        way, lambda model: ExponentialMovingAverage(model.parameters(), decay=0.9), lambda ema, model: ema.update()
    )
    trained = scores(model)
    averaged = make(way, seed=8)
    with ema.average_parameters():
        averaged.load_state_dict(model.state_dict())
        inside = scores(model)
    assert torch.equal(scores(model), trained)
    return outcome(model, losses, averaged, inside=inside)


def timm(name: str):
    """timm needs torchvision, which has no build for every torch; its file of averages needs torch alone."""
    found = importlib.util.find_spec("timm")
    if found is None:
        pytest.skip("timm is not installed: make projects")
    path = Path(found.origin).parent / "utils" / "model_ema.py"
    spec = importlib.util.spec_from_file_location("timm_model_ema", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def timm_v3(way: str) -> Outcome:
    make_ema = functools.partial(timm("ModelEmaV3"), decay=0.9, use_warmup=True)
    model, ema, losses = train(way, make_ema, lambda ema, model: ema.update(model))
    return outcome(model, losses, ema.module)


@in_both_ways
@pytest.mark.parametrize("run", [ema_pytorch, torch_ema, timm_v3], ids=lambda run: run.__name__)
def test_averages(run, way, double):
    if run is not timm_v3:
        pytest.importorskip(run.__name__, reason=f"{run.__name__} is not installed: make projects")
    compare(run, way, double)
