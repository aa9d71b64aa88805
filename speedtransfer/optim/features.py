"""The features of a table: each has rows of its own, and optimizers leave out those that have no gradient.

They share one parameter, and in a step one state, as long as each step has a gradient of every feature. From the first on that
has not, an optimizer finds in a step a parameter for each feature with a gradient, as in ``nn.ModuleList``, and what it keeps
beside rows (its count of steps) is kept for each: in ``optimizer.state[weight]["features"]``, by name.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.cuda import check_not_capturing
from speedtransfer.errors import InvalidValueError, OptimizerError
from speedtransfer.idle import FeatureLag
from speedtransfer.optim.id_space import IdSpace
from speedtransfer.optim.leaves import APART, cloned, leaves, put
from speedtransfer.optim.probe import sparse_gradient
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.ranks import to_words


class UsedFeatures:
    """The features that a lookup gives a gradient: bit n is that of feature n.

    Attributes
    ----------
    given : int
        Those that any gradient of the rows is of.
    used : int
        Those whose part of the rows backward has come to since the last deposit.
    """

    __slots__ = ("given", "used")

    def __init__(self, given: int) -> None:
        self.given, self.used = given, 0

    def take(self) -> int:
        """Return the features that a gradient is of, for its deposit."""
        used, self.used = self.used, 0
        return self.given | used


class _Lent(NamedTuple):
    """What a step has of a feature: where its rows are among the active ones, their parameter, and its version then."""

    name: str
    at: Tensor
    param: nn.Parameter
    version: int


class _Step(NamedTuple):
    """A running step of features apart: the state of the table, of each feature before, the gradient, and what is lent.

    `made` is the state of each that the optimizer has left.
    """

    group: dict[str, Any]
    state: dict[str, Any] | None
    kept: dict[str, Any]
    grad: Tensor | None
    lent: list[_Lent]
    made: list[dict[str, Any] | None]


class Features:
    """The features of the table of one handle.

    Parameters
    ----------
    names : sequence of str
        With ids of a vocabulary the first, "", is that of the rows without an id.
    starts : sequence of int
        The first row of each. With ids of a vocabulary, of which each is one of a feature, there are none.
    id_space : IdSpace
        Tells the feature of a row.

    Attributes
    ----------
    touched : int
        Those with a gradient, bit by bit.
    left : int
        Those whose gradient goes to other processes at the end of this backward.
    is_apart : bool
        Whether the last step that began was one of features apart.
    """

    def __init__(self, names: Sequence[str], starts: Sequence[int], id_space: IdSpace) -> None:
        self.names, self.starts, self._id_space = tuple(names), tuple(starts), id_space
        self.all = (1 << len(self.names)) - 1
        self.touched = self.left = self._before = 0
        self.is_apart = False
        self._step: _Step | None = None
        # By feature: its gradient as it was returned last, and what that and its aliases show.
        self.shown = weakref.WeakValueDictionary[int, RowGradient]()
        self.parts = weakref.WeakValueDictionary[int, Any]()
        # By feature, references to what was given out as the data of its weight.
        self.aliases: dict[int, list[Callable[[], Any]]] = {}

    def every(self) -> int:
        """Return all features: those of a gradient of all rows."""
        return self.all

    def of(self, rows: Tensor) -> Tensor:
        """Return the number of the feature of each of `rows` (n,), numbered as in all processes together."""
        return self._id_space.features_of(rows, self.starts)

    def mask_of(self, rows: Tensor) -> int:
        """Return the features of `rows` (n,)."""
        return sum(1 << number for number in self.of(rows).unique().tolist())

    def note(self, handle: Any, rows: Tensor | None, given: int | None) -> None:
        """Note that there is a gradient of the features `given`, a bit for each; None: of those of `rows` (n,)."""
        touched = given or (0 if rows is None else self.mask_of(rows))
        if handle.owners.holds:
            self.left |= touched
        else:
            self.touched |= touched

    def clear(self) -> None:
        """Forget which have a gradient: there is none."""
        self._before, self.touched, self.left = self.touched, 0, 0

    def assign(self, rows: Tensor | None, of: int = 0, again: bool = False) -> None:
        """Note that the gradient was assigned, of `rows` (n,) and the features `of`, or of all; `again`: the one before."""
        self.touched = self._before if again else self.all if rows is None else of | self.mask_of(rows)

    # --- other processes ------------------------------------------------------------------------------------------------

    def announce(self) -> list[int]:
        """Return `left` as numbers of so many bits that they can be sent."""
        return to_words(self.left, len(self.names))

    def arrive(self, announced: Sequence[int]) -> None:
        """Note the features that each process has announced."""
        self.left = 0
        for features in announced:
            self.touched |= features

    # --- a step ---------------------------------------------------------------------------------------------------------

    def begin(self, handle: Any, optimizer: Optimizer) -> None:
        """Find out whether the features make the step that begins apart, and prepare the table for that."""
        if handle.pending.touched is not None and self.touched != self.all:
            # The gradient became dense, and may have been written to anywhere.
            self.touched |= self.mask_of(handle.named_rows((handle.pending.grad != 0).any(1).nonzero().flatten()))
        if self.touched and self._id_space.come_and_go:
            # Rows without an id take part in every step.
            self.touched |= 1
        rows, state = handle.rows, optimizer.state.get(handle.param) or {}
        self.is_apart = self.touched != self.all or APART in state or isinstance(rows.lag, FeatureLag)
        if not self.is_apart:
            return
        if handle.table.device.type == "cuda":
            check_not_capturing(f"a step that leaves features of {handle} out", "look all of them up in each step")
        handle.pending.trim()
        if rows.lag is not None and not isinstance(rows.lag, FeatureLag):
            # Once; what they miss from now on differs.
            rows.catch_up()
            feature_of = functools.partial(_feature_of, self, rows.name_rows)
            rows.lag = FeatureLag(rows.lag, self.names, feature_of, not self._id_space.come_and_go)
        if rows.lag is not None:
            rows.lag.stepping = [n for n in range(len(self.names)) if self.touched >> n & 1]

    def lend(self, handle: Any, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Give the optimizer a parameter for each feature with a gradient, in the place of that of the table."""
        if not self.is_apart:
            return
        param = handle.param
        for name, value in vars(optimizer).items():
            if name not in ("state", "param_groups") and value is not group["params"] and _holds(value, param):
                raise OptimizerError(
                    f"{type(optimizer).__name__} keeps {handle} outside of its param_groups (in .{name}), where a step that "
                    "leaves features out cannot give it those with a gradient; look all features up in each step, or use an "
                    "optimizer that goes by param_groups"
                )
        state = optimizer.state.get(param) or None
        found = leaves(state or {})
        if state is None:
            kept: dict[str, Any] = {}
        elif APART in state:
            kept = state[APART]
        else:
            kept = {name: _without_rows(state, handle.state.stored_names) for name in self.names}
        unknown = kept.keys() - set(self.names)
        # First: from here on `restore` undoes it.
        self._step = step = _Step(group, state, kept, param.grad, [], [])
        optimizer.state.pop(param, None)
        param.grad = None
        if unknown:
            raise OptimizerError(
                f"the state of {type(optimizer).__name__} is of the features {sorted(kept)} but {handle} has those named "
                f"{list(self.names)}; load the state that was saved with these"
            )
        pending = handle.pending
        for number, name in enumerate(self.names):
            # Those of ids that come and go begin when they come; of several processes rows keep what they began with.
            new = self.touched >> number & 1 and name not in kept
            if new and not self._id_space.come_and_go and handle.rows.name_rows is None:
                stop = self.starts[number + 1] if number + 1 < len(self.starts) else handle.num_rows
                handle.state.begin_rows(optimizer, group, torch.arange(self.starts[number], stop, device="cpu"))
        numbers = _feature_of(self, handle.rows.name_rows, pending.ids)
        for number, name in enumerate(self.names):
            if not self.touched >> number & 1:
                continue
            at = (numbers == number).nonzero().flatten()
            lent = nn.Parameter(pending.active[at], requires_grad=param.requires_grad)
            grad = pending.grad[at]
            lent.grad = sparse_gradient(grad) if handle.state.sparse else grad
            step.lent.append(_Lent(name, at, lent, lent._version))
            if name in kept:
                own = cloned(kept[name])
                put(own, {plane: found[plane][at] for plane in leaves(own) if plane in handle.state.stored_names})
                optimizer.state[lent] = own
        place = next(place for place, each in enumerate(group["params"]) if each is param)
        group["params"][place + 1 : place + 1] = [lent.param for lent in step.lent]

    def is_changed(self, before: Tensor | None) -> bool:
        """Tell whether the optimizer has changed rows of a feature since the step began; `before` are the active rows then."""
        return self._step is not None and any(
            lent.param._version != lent.version or (before is not None and differ(lent.param.data, before[lent.at]))
            for lent in self._step.lent
        )

    def take_back(self, handle: Any, optimizer: Optimizer) -> None:
        """Put what the step has made of each feature into the active rows, and into the state of the table.

        Called again after an interrupt it does the same; `restore` undoes it, until `end`.
        """
        step = self._step
        if step is None:
            return
        if not step.made:
            step.made[:] = [optimizer.state.get(lent.param) for lent in step.lent]
        self._give_up(handle, optimizer)
        active, kept = handle.pending.active, dict(step.kept)
        loaded, whole = leaves(step.state or {}), dict[str, Tensor]()

        def rows_of(name: str) -> Tensor:
            if name not in whole:
                whole[name] = loaded[name] if name in loaded else handle.state.initial_rows(name, active)
            return whole[name]

        for lent, own in zip(step.lent, step.made, strict=True):
            active[lent.at] = lent.param.detach()
            if own:
                for name, values in handle.state.learned(leaves(own), optimizer).items():
                    rows_of(name)[lent.at] = values
                kept[lent.name] = _without_rows(own, handle.state.stored_names)
        # As by an optimizer.
        torch.autograd.graph.increment_version(handle.param)
        if kept:
            # Of the form of the one with the most: others may not have made all yet.
            made = cloned(max(kept.values(), key=lambda own: len(leaves(own))))
            put(made, {name: rows_of(name) for name in leaves(made) if name in handle.state.stored_names})
            optimizer.state[handle.param] = {**made, APART: kept}

    def restore(self, handle: Any, optimizer: Optimizer) -> None:
        """Have all be as before the step, which has failed."""
        step = self._step
        if step is not None:
            self._give_up(handle, optimizer)
            if step.state is not None:
                optimizer.state[handle.param] = step.state

    def end(self) -> None:
        """Forget the step, which was made or undone."""
        self._step = None

    def _give_up(self, handle: Any, optimizer: Optimizer) -> None:
        """Take the parameters of the features from the optimizer."""
        step = self._step
        assert step is not None
        ours = {id(lent.param) for lent in step.lent}
        step.group["params"][:] = [param for param in step.group["params"] if id(param) not in ours]
        handle.param.grad = step.grad
        for lent in step.lent:
            optimizer.state.pop(lent.param, None)


def differ(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors hold other values; NaN is as NaN."""
    return not torch.equal(one.nan_to_num(), other.nan_to_num())


def _holds(value: Any, param: nn.Parameter, depth: int = 3) -> bool:
    """Tell whether containers in `value` have `param` among their items or keys."""
    if value is param or depth == 0 or not isinstance(value, list | tuple | set | dict):
        return value is param
    return any(
        _holds(item, param, depth - 1) for item in ([*value, *value.values()] if isinstance(value, dict) else value)
    )


def _feature_of(features: Features, name_rows: Callable[[Tensor], Tensor] | None, ids: Tensor) -> Tensor:
    """Return the number of the feature of each of the rows `ids` (n,) of the table here."""
    return features.of(ids if name_rows is None else name_rows(ids))


def _without_rows(state: dict[str, Any], planes: Any) -> dict[str, Any]:
    """Return a copy of state with zeros, (), in the place of what it has for each row, which a table keeps."""
    made = cloned({key: value for key, value in state.items() if key != APART}, tensors=False)
    put(made, {n: v.new_zeros(()) if n in planes else v.detach().clone() for n, v in leaves(made).items()})
    return made


def check_alike(handle: Any, ours: Features, theirs: Features | None) -> None:
    """Raise unless a weight of features can take the place of another."""
    if theirs is None or (theirs.names, theirs.starts) != (ours.names, ours.starts):
        raise InvalidValueError(
            f"{handle} has the features {list(ours.names)} from the rows {list(ours.starts)} on, and the weight assigned is "
            "not of the same; assign the weight of a MultiEmbedding of the same features"
        )
