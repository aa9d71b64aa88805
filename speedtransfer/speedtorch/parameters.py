"""Where a variable is: in its model by name, and in an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from speedtransfer.errors import InvalidValueError, suggest


def find_parameter(model: nn.Module, variable_name: str) -> nn.Parameter:
    """Return the parameter of that name, or of the module of that name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in (variable_name, f"{variable_name}.weight"):
        if name in named:
            return named[name]
    names = [name.removesuffix(".weight") for name in named]
    raise InvalidValueError(
        f"variable_name is {variable_name!r} but the model has no such parameter{suggest(variable_name, names or ['none'])}"
    )


def place_in(optimizer: Optimizer, param: nn.Parameter, name: str) -> tuple[int, dict[str, Any]]:
    """Return the number of `param` in the optimizer's state dict, and its group."""
    number = 0
    for group in optimizer.param_groups:
        for other in group["params"]:
            if other is param:
                return number, group
            number += 1
    raise InvalidValueError(
        f"variable_name is {name!r}, whose parameter given_optimizer does not train; make the optimizer with it"
    )
