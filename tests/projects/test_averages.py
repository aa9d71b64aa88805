"""Moving averages of a model: ema_pytorch, torch_ema, timm's file, torch's own, as their examples use them."""

import copy
import functools
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from projects.pairs import WAYS, Outcome, compare
from projects.two_towers import loader, make, scores

EPOCHS = 3


def train(way: str, start, after_step, optimizer: str = "AdamW"):
    """Train; `start(model)` makes the average and `after_step(average, model)` feeds it. Return the model, it, the losses."""
    model = make(way)
    opt = getattr(torch.optim, optimizer)(model.parameters(), lr=0.02)
    average = start(model)
    losses = []
    torch.manual_seed(1)
    for epoch in range(EPOCHS):
        for users, items, rating in loader(seed=epoch):
            opt.zero_grad()
            loss = F.mse_loss(model(users, items), rating)
            loss.backward()
            opt.step()
            after_step(average, model)
            losses.append(loss.item())
    return model, average, losses


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


def torch_average(way: str, optimizer: str = "AdamW", **options) -> Outcome:
    start = functools.partial(AveragedModel, **options)
    model, average, losses = train(way, start, lambda average, model: average.update_parameters(model), optimizer)
    if not options:
        update_bn(loader(), average)
    return outcome(model, losses, average.module, count=average.n_averaged, state=dict(average.state_dict()))


def torch_swa(way: str) -> Outcome:
    """The recipe of torch's documentation: average from the second epoch on, at a rate of its own."""
    model = make(way)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average, schedule = AveragedModel(model), SWALR(opt, swa_lr=0.05, anneal_epochs=1)
    losses = []
    torch.manual_seed(1)
    for epoch in range(EPOCHS):
        for users, items, rating in loader(seed=epoch):
            opt.zero_grad()
            loss = F.mse_loss(model(users, items), rating)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        if epoch > 0:
            average.update_parameters(model)
            schedule.step()
    return outcome(model, losses, average.module)


def by_hand(way: str) -> Outcome:
    """A shadow of `named_parameters()`, copied into the model and out again, as blog posts have it."""

    def start(model):
        return {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}

    def after(shadow, model):
        for name, p in model.named_parameters():
            shadow[name] = (0.1 * p.data + 0.9 * shadow[name]).clone()

    model, shadow, losses = train(way, start, after)
    backup = {name: p.data for name, p in model.named_parameters()}
    trained = scores(model)
    for name, p in model.named_parameters():
        p.data = shadow[name]
    averaged = copy.deepcopy(model)
    for name, p in model.named_parameters():
        p.data = backup[name]
    assert torch.equal(scores(model), trained)
    return outcome(model, losses, averaged)


def target_network(way: str) -> Outcome:
    """A target that follows the model by soft updates, as in reinforcement learning."""

    def start(model):
        target = copy.deepcopy(model)
        for p in target.parameters():
            p.requires_grad = False
        return target

    @torch.no_grad()
    def after(target, model):
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.copy_(0.1 * fast.data + 0.9 * slow.data)

    model, target, losses = train(way, start, after)
    return outcome(model, losses, target)


OF_TORCH = (torch_average, torch_swa, by_hand, target_network)
OF_PACKAGES = (ema_pytorch, torch_ema, timm_v3)


@pytest.mark.sweep
@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", OF_TORCH, ids=lambda run: run.__name__)
def test_averages(run, way, double):
    compare(run, way, double)


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", OF_PACKAGES, ids=lambda run: run.__name__)
def test_averages_of_packages(run, way, double):
    package = run.__name__
    if not package.startswith("timm"):
        pytest.importorskip(package, reason=f"{package} is not installed: make projects")
    compare(run, way, double)
