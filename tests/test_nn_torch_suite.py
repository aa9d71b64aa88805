"""PyTorch's own cases for nn.Embedding and nn.EmbeddingBag, as shipped in its wheel, with our classes in their place."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_oracle import assert_alike
from torch import nn

import speedtransfer

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
OURS = {nn.Embedding: speedtransfer.Embedding, nn.EmbeddingBag: speedtransfer.EmbeddingBag}
OPERATORS = ("nn.functional.embedding", "nn.functional.embedding_bag")


# Imports of more than a second, which those processes of the tests need not that run none of these.
@functools.cache
def databases() -> tuple[list[Any], list[Any]]:
    """Return the modules and the operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch's test modules import is not our business
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    modules, operators = (
        [info for info in module_db if info.module_cls in OURS],
        [i for i in op_db if i.name in OPERATORS],
    )
    # A torch that renames its databases must not make this file pass for want of cases.
    assert [info.module_cls for info in modules] == [nn.Embedding]
    assert {info.name for info in operators} == set(OPERATORS)
    return modules, operators


def twin(theirs: nn.Module) -> nn.Module:
    """Return one of our modules with the arguments and weights of `theirs`."""
    holder = nn.ModuleDict({"it": copy.deepcopy(theirs)})
    speedtransfer.replace_embeddings(holder, min_rows=0, strict=True)
    return holder["it"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_module_inputs(dtype: torch.dtype, training: bool) -> None:
    info = databases()[0][0]
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    assert samples
    for sample in samples:
        arguments = sample.constructor_input
        torch.manual_seed(0)
        theirs = info.module_cls(*arguments.args, **arguments.kwargs, dtype=dtype).train(training)
        torch.manual_seed(0)
        ours = OURS[info.module_cls](*arguments.args, **arguments.kwargs, dtype=dtype).train(training)
        assert_alike(ours, theirs, *sample.forward_input.args, **sample.forward_input.kwargs)


def test_module_error_inputs() -> None:
    """The same input is refused; the exceptions are the standard ones of Python, not always the RuntimeError of torch."""
    from torch.testing._internal.common_modules import ModuleErrorEnum

    info = databases()[0][0]
    if info.module_error_inputs_func is None:
        pytest.skip("this torch has none")
    samples = info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=False
    )
    assert samples
    for sample in samples:
        arguments = sample.module_error_input.constructor_input
        call: Callable[[], Any] = lambda a=arguments: speedtransfer.Embedding(*a.args, **a.kwargs)  # noqa: E731
        if sample.error_on != ModuleErrorEnum.CONSTRUCTION_ERROR:
            module, forward = call(), sample.module_error_input.forward_input
            call = lambda m=module, f=forward: m(*f.args, **f.kwargs)  # noqa: E731
        with pytest.raises((sample.error_type, TypeError, ValueError)):
            call()


def _modules_of(info: Any, sample: Any) -> tuple[nn.Module, nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Turn a call of the functional form into our module and theirs, with the arguments of forward."""
    kwargs = dict(sample.kwargs)
    weight, (ids, *rest) = sample.input, sample.args  # the databases put what is differentiated first
    forward = {key: kwargs.pop(key) for key in ("offsets", "per_sample_weights") if key in kwargs}
    library = nn.Embedding if info.name == "nn.functional.embedding" else nn.EmbeddingBag
    theirs = library.from_pretrained(weight.detach().clone(), freeze=False, **kwargs)
    return twin(theirs), theirs, (ids, *rest), forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_samples(name: str, dtype: torch.dtype) -> None:
    for info in (info for info in databases()[1] if info.name == name):
        samples = list(info.sample_inputs("cpu", dtype, requires_grad=True))
        assert samples
        for sample in samples:
            ours, theirs, args, kwargs = _modules_of(info, sample)
            assert_alike(ours, theirs, *args, **kwargs)
