"""Optimizers as plans are given them."""

from __future__ import annotations

import pytest
import torch

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.planning.optimizer_name import optimizer_given


def made(given):
    trainer = optimizer_given(given)
    return trainer.name, trainer.make([torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize("given", ["SGD(momentum=0.5)", torch.optim.SGD, lambda params: torch.optim.SGD(params, 0.1)])
def test_every_way_makes_one(given):
    name, optimizer = made(given)
    assert type(optimizer) is torch.optim.SGD
    assert name in ("SGD(momentum=0.5)", "SGD", "<lambda>")


def test_sizes_of_rows_are_kept_from_plan_to_plan():
    # They are kept by what makes the optimizer.
    assert optimizer_given("SGD(momentum=0.5)") == optimizer_given("SGD(momentum=0.5)")
    assert optimizer_given("SGD(momentum=0.5)") != optimizer_given("SGD(momentum=0.6)")


def test_one_that_was_made_has_its_hyperparameters():
    first = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.5, betas=(0.1, 0.2), amsgrad=True)
    torch.optim.lr_scheduler.ExponentialLR(first, 0.5)  # which adds initial_lr to the group
    name, optimizer = made(first)
    group = optimizer.param_groups[0]
    assert name == "AdamW"
    assert (group["lr"], group["betas"], group["amsgrad"]) == (0.5, (0.1, 0.2), True)


@pytest.mark.parametrize("given", [None, "none", "None"])
def test_none_is_frozen(given):
    assert optimizer_given(given) == ("frozen", None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("AdmW", "optimizer is 'AdmW'; did you mean 'AdamW'"),
        (lambda params: None, "optimizer makes a NoneType but must make an optimizer"),
        (3, "optimizer is 3 (int) but must be an optimizer"),
    ],
)
def test_others_are_refused(given, words):
    with pytest.raises((InvalidValueError, InvalidTypeError)) as error:
        optimizer_given(given)
    assert words in str(error.value)
