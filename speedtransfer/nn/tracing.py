"""Keep table modules out of tracing: torch.compile runs them eagerly, other tools raise an error that names the remedy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn

from speedtransfer.eager import tracing_mode, unseen
from speedtransfer.errors import InvalidTypeError, InvalidValueError

P = ParamSpec("P")
T = TypeVar("T")

# How many transforms of torch.func are running, whose tensors have no memory to read ids from.
in_transform: Callable[[], int] = torch._C._functorch.get_dynamic_layer_stack_depth
# The compilers of older ones cannot trace what decides how a lookup is recorded.
ONE_GRAPH = torch.__version__ >= "2.13"


def _is_exporting() -> bool:
    # Not torch's function of this name, which torch 2.6 does not have and torch 2.12 makes true of all that it compiles.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def unrecorded(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Run a method of a table module eagerly inside a compiled model: ids are known only when it runs.

    Tools that trace a model would record the rows of one batch: under them the method raises.
    """
    return recorded_as(None)(method)


def recorded_as(
    instead: Callable[..., Any] | None,
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Decorate a method as `unrecorded` does; a compiled model records ``instead(self, ...)``, where that is not None."""

    def decorated(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @functools.wraps(method)
        def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
            if torch.compiler.is_compiling():
                if _is_exporting():
                    if not self._has_rows():
                        # Torch has put others in their place, which it records.
                        return method(self, *args, **kwargs)
                    refuse_to_record(self, "torch.export")
                if ONE_GRAPH and instead is not None:
                    found = instead(self, *args, **kwargs)
                    if found is not None:
                        return found
                return torch.compiler.disable(method)(self, *args, **kwargs)
            if torch._C._get_tracing_state() is not None:
                refuse_to_record(self, "torch.jit")
            if torch._C._len_torch_dispatch_stack():
                tool = tracing_mode()
                if tool is not None and self._has_rows():
                    refuse_to_record(self, tool)
                with unseen():
                    return method(self, *args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            except (InvalidTypeError, InvalidValueError):
                if any(isinstance(argument, torch.fx.Proxy) for argument in (*args, *kwargs.values())):
                    refuse_to_record(self, "torch.fx")
                raise

        return call

    return decorated


def refuse_to_export(module: nn.Module) -> None:
    """Raise under ``torch.export``, for a lookup that an exported program cannot do with the weight alone."""
    if _is_exporting():
        refuse_to_record(module, "torch.export")


def refuse_to_quantize(module: nn.Module, qconfig: Any) -> None:
    """Raise where ``torch.ao.quantization`` would leave a table out without a word: it looks modules up by their class."""
    frame = inspect.currentframe()
    while qconfig is None and frame is not None:
        # quantize_dynamic sets None on modules of other classes than it was given: that of torch.nn may be among those.
        if frame.f_code.co_name == "_propagate_qconfig_helper":
            asked = frame.f_locals["qconfig_dict"]
            qconfig = next((asked[base] for base in type(module).__bases__ if base in asked), None)
        frame = frame.f_back
    if qconfig is not None:
        raise InvalidTypeError(
            f"torch.ao.quantization cannot replace {_called(module)}, whose rows are in a table; quantize a copy with modules "
            "of torch.nn (speedtransfer.to_dense(model)), or make the table with storage_dtype=torch.int8"
        )


def refuse_to_record(module: nn.Module, tool: str) -> NoReturn:
    """Raise the error that names `to_dense`, whose copy `tool` can record."""
    raise InvalidTypeError(
        f"{tool} cannot record how {_called(module)} looks rows up in its table; export a copy with modules of torch.nn: "
        "speedtransfer.to_dense(model)"
    )


def _called(module: nn.Module) -> str:
    """Return the name of a table module in its model, where that is known."""
    handle = vars(module).get("_handle")
    return type(module).__name__ if handle is None or not handle.name else repr(handle.name)
