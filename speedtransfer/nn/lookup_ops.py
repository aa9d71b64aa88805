"""Lookups as operators of torch, which `torch.compile` takes into its graphs without looking inside.

``speedtransfer::lookup`` calls the forward of a module as it is outside of a graph. It returns what that returns, and a number
by which its backward, ``speedtransfer::deposit``, finds the graph of autograd that the forward has made, from the results to
the rows of the table. Their gradient goes to the optimizer by `optim.anchor`. A compiler sees functions of tensors.

Some lookups do more than read: `max_norm` writes rows, a vocabulary admits ids, processes send messages. These are
``speedtransfer::lookup_in_turn``, which torch knows to have an effect: compilers keep their order, and leave none out.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.tracing import ONE_GRAPH, in_transform, recorded_as
from speedtransfer.once import once
from speedtransfer.optim.anchor import Joined, joins_kept

P = ParamSpec("P")
T = TypeVar("T")
# What an id may be. Others raise where they are looked up, outside of a graph.
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# A number is never used again: a graph may outlive its module.
_numbers = itertools.count(1)
_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_methods: dict[str, Callable[..., Any]] = {}


class _Arguments(NamedTuple):
    """What the operators get: tensors first, of which `key` names the module, and `leaf` is that of the anchor.

    `names` are those of the parts that `ids` are of, if they are not one tensor. The results have a row for each id, or there
    are `bags`. With `training` they have a graph, with `weighed` also of the `weights` of bags.
    """

    ids: list[Tensor]
    offsets: Tensor | None
    weights: Tensor | None
    leaf: Tensor
    key: Tensor
    method: str
    names: list[str]
    dim: int
    bags: int | None
    training: bool
    weighed: bool
    in_turn: bool


_SCHEMA = (
    "Tensor[] ids, Tensor? offsets, Tensor? weights, Tensor leaf, Tensor key, str method, str[] names, SymInt dim, "
    "SymInt? bags, bool training, bool weighed, bool in_turn"
)


class _Recorded:
    """The graph of a lookup: edges to it from its results, the rows that it begins with, weights of bags with a gradient."""

    def __init__(self, results: list[Tensor], joined: list[Joined], weights: Tensor | None) -> None:
        # Not the results themselves, whose memory would be kept.
        self._edges = [get_gradient_edge(part) if part.requires_grad else None for part in results]
        self._joined, self._weights = joined, weights
        for one in joined:
            one.handle.anchor.lookups.add(self)

    def deposit(self, grads: list[Tensor | None]) -> Tensor | None:
        """Leave the gradient of the rows for the optimizer, and return that of the weights."""
        pairs = zip(self._edges, grads, strict=True)
        given: list[Any] = [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]
        wanted = [one.rows for one in self._joined] + ([] if self._weights is None else [self._weights])
        if not given or not wanted:
            return None
        edges, parts = zip(*given, strict=True)
        found = torch.autograd.grad(edges, wanted, parts, retain_graph=True, allow_unused=True)
        for one, grad in zip(self._joined, found, strict=False):
            if grad is not None:
                one.arrive(grad)
        return None if self._weights is None else found[-1]


# By number. An entry lives as long as the memory of its number.
_recorded: dict[int, _Recorded] = {}


def _called(given: _Arguments) -> list[Tensor]:
    """Look up, and return the results."""
    module = _modules.get(int(given.key))
    if module is None:
        raise InvalidValueError(
            "this compiled graph looks rows up in a table that is gone; keep the module as long as what was compiled of it"
        )
    ids: Any = dict(zip(given.names, given.ids, strict=True)) if given.names else given.ids[0]
    more = () if given.bags is None else (given.offsets, given.weights)
    found = _methods[given.method](module, ids, *more)
    return list(found.values()) if given.names else [found]


def _record(given: _Arguments) -> tuple[list[Tensor], _Recorded]:
    """Look up, and return the results, and their graph."""
    weights = None if given.weights is None else given.weights.detach().requires_grad_(given.weighed)
    # The operator may have been called from below autograd.
    above = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with above, torch.enable_grad(), joins_kept() as joined:
        results = _called(given._replace(weights=weights))
        return results, _Recorded(results, joined, weights if given.weighed else None)


def _lookup(*args: Any) -> list[Tensor]:
    given, number = _Arguments(*args), np.array(next(_numbers))
    if given.training:
        results, _recorded[int(number)] = _record(given)
        weakref.finalize(number, _recorded.pop, int(number), None).atexit = False
    else:
        # Rows by themselves, as above: those read ahead for several features share memory.
        with torch.no_grad(), joins_kept():
            results = _called(given)
    # Parts of one tensor would share its memory, which compilers do not expect of results.
    parts = [part.detach().clone() if given.names else part.detach() for part in results]
    return [*parts, torch.from_numpy(number)]


def _deposit(grads: list[Tensor | None], number: Tensor, *args: Any) -> list[Tensor]:
    given, made = _Arguments(*args), _recorded.get(int(number))
    if made is None:
        # Saved tensors are copies (save_on_cpu), so that what was recorded is gone.
        if given.in_turn:
            raise InvalidTypeError(
                "what a compiled model has saved for backward was copied (saved_tensors_hooks, save_on_cpu), and a lookup "
                "with max_norm, with a vocabulary or of several processes is not made again; leave those hooks or "
                "torch.compile out"
            )
        made = _record(given)[1]
    grad, done = made.deposit(grads), [given.leaf.new_zeros(1)]
    if given.weighed and given.weights is not None:
        done.append(torch.zeros_like(given.weights) if grad is None else grad.contiguous())
    return done


# --- as compilers see them ------------------------------------------------------------------------------------------------


def _like_lookup(*args: Any) -> list[Tensor]:
    given = _Arguments(*args)
    shapes = [part.shape if given.bags is None else (given.bags,) for part in given.ids]
    return [*(given.leaf.new_empty((*shape, given.dim)) for shape in shapes), torch.empty_like(given.key)]


def _like_deposit(grads: list[Tensor | None], number: Tensor, *args: Any) -> list[Tensor]:
    given = _Arguments(*args)
    like = [given.leaf] if given.weights is None or not given.weighed else [given.leaf, given.weights]
    return [each.new_empty(each.shape) for each in like]


class _Differentiable(torch.autograd.Function):
    """The operator, and the one that its backward calls."""

    @staticmethod
    def forward(ctx: Any, given: _Arguments, leaf: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        found = _below_autograd(given)
        ids, *others = given[:5]
        ctx.rest = given[5:]
        ctx.save_for_backward(found[-1], *others, *ids)
        ctx.mark_non_differentiable(found[-1])
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        number, offsets, weights, leaf, key, *ids = ctx.saved_tensors
        given = _Arguments(ids, offsets, weights, leaf, key, *ctx.rest)
        if given.weighed and torch.is_grad_enabled():
            raise InvalidTypeError(
                "the gradient of per_sample_weights of a compiled lookup cannot be differentiated again (create_graph); leave "
                "torch.compile out there"
            )
        # Gradients for the optimizer are not differentiated again.
        with torch.no_grad():
            done = torch.ops.speedtransfer.deposit(list(grads[:-1]), number, *given)
        return None, done[0], done[1] if given.weighed else None


def _with_autograd(*args: Any) -> list[Tensor]:
    given = _Arguments(*args)
    if given.training and torch.is_grad_enabled():
        return list(_Differentiable.apply(given, given.leaf, given.weights))
    return _below_autograd(given)


def _below_autograd(given: _Arguments) -> list[Tensor]:
    if type(given.key) is Tensor and not torch._C._len_torch_dispatch_stack():
        # In a compiled graph that runs: nobody below is interested.
        return _lookup(*given)
    tracing = get_proxy_mode() if given.in_turn else None
    before = 0 if tracing is None else len(tracing.tracer.graph.nodes)
    with torch._C._AutoDispatchBelowAutograd():
        found: list[Tensor] = _operator(given)(*given)
    if tracing is not None:
        # Also within torch.utils.checkpoint: what has an effect is not done again in backward.
        nodes = tracing.tracer.graph.nodes
        for node in itertools.islice(reversed(nodes), len(nodes) - before):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return found


def _operator(given: _Arguments) -> Any:
    return torch.ops.speedtransfer.lookup_in_turn if given.in_turn else torch.ops.speedtransfer.lookup


@once
def register() -> torch.library.Library:
    """Make the operators, once: when the first module is made, as it takes milliseconds that an import should not."""
    # A replay of a CUDA graph would leave out what the host does.
    named = ("pt2_compliant_tag", "cudagraph_unsafe")
    tags = tuple(getattr(torch.Tag, name) for name in named if hasattr(torch.Tag, name))
    made = torch.library.Library("speedtransfer", "DEF")
    for schema, function, fake in (
        (f"lookup({_SCHEMA}) -> Tensor[]", _lookup, _like_lookup),
        (f"lookup_in_turn({_SCHEMA}) -> Tensor[]", _lookup, _like_lookup),
        (f"deposit(Tensor?[] grads, Tensor number, {_SCHEMA}) -> Tensor[]", _deposit, _like_deposit),
    ):
        name = made.define(schema, tags=tags)
        made.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"speedtransfer::{name}", fake, lib=made)
        if function is _lookup:
            made.impl(name, _with_autograd, "Autograd")
    if ONE_GRAPH:
        made._register_effectful_op("speedtransfer::lookup_in_turn", torch._library.effects.EffectType.ORDERED)
    return made


# --- as modules see them --------------------------------------------------------------------------------------------------


def new_key(module: nn.Module) -> Tensor:
    """Return what a compiled graph finds a module by, ``()`` int64 on the CPU.

    A tensor and no int, so that layers which share code share a graph.
    """
    number = next(_numbers)
    _modules[number] = module
    # An inference tensor could not be saved for backward.
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def looks_up(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Decorate the forward of a module that looks up: a compiled model has the operator in its place."""
    _methods[method.__qualname__] = method
    return recorded_as(functools.partial(_as_operator, method.__qualname__))(method)


def _as_operator(
    method: str,
    module: Any,
    input: Any = None,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    ids: Any = None,
) -> Any:
    """Return what `method` of a module returns, by the operator; None where that cannot be."""
    ids = input if ids is None else ids
    names: list[str] = []
    parts, bags = [ids], None
    if isinstance(ids, Mapping | list | tuple):
        names = list(ids if isinstance(ids, Mapping) else module._modules)
        parts = list(ids.values() if isinstance(ids, Mapping) else ids)
        if not names or len(names) != len(parts) or not all(name in module._modules for name in names):
            return None
    if not all(type(part) is Tensor and part.dtype in INTEGERS for part in parts):
        return None
    if not module._has_rows() or in_transform():
        return None
    handle = module._handle
    in_turn = handle.renormalizes or not handle.is_whole
    if in_turn and _in_a_region():
        return None
    if isinstance(module, nn.EmbeddingBag):
        beside = [each for each in (offsets, per_sample_weights) if each is not None]
        if not all(type(each) in (Tensor, nn.Parameter) for each in beside) or not ids.dim():
            return None
        bags = ids.shape[0] if offsets is None else offsets.numel() - int(module.include_last_offset)
    training = torch.is_grad_enabled()
    weighed = training and per_sample_weights is not None and per_sample_weights.requires_grad
    trained = training and handle.requires_grad
    leaf = handle.anchor.leaf if trained else handle.anchor.leaf.detach()
    given = _Arguments(
        parts,
        offsets,
        per_sample_weights,
        leaf,
        module._key,
        method,
        names,
        module.embedding_dim,
        bags,
        training=trained or weighed,
        weighed=weighed,
        in_turn=in_turn,
    )
    found = _operator(given)(*given)[:-1]
    if not names:
        return found[0]
    return dict(zip(names, found, strict=True)) if isinstance(ids, Mapping) else found


def _in_a_region() -> bool:
    """Tell whether what is traced is in a function of ``torch.compiler.nested_compile_region``.

    Torch 2.13 loses the gradients of what has an effect there.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if "invoke_subgraph" in str(tracer.source_target):
            return True
        tracer = tracer.parent
    return False


# The compiler calls it while it traces, as `torch.compiler.assume_constant_result` has it, which would import all of it here.
vars(_in_a_region)["_dynamo_marked_constant"] = True
