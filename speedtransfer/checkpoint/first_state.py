"""State of rows that the constructor of an optimizer made, or that was loaded: planes take it over, as a step would."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import InvalidValueError
from speedtransfer.optim import probe_optimizer
from speedtransfer.optim.hooks import give_state, take_loaded
from speedtransfer.optim.state_dicts import handles_of


def store_all(optimizer: Optimizer, constructed: bool = True) -> None:
    """Have planes take over state of rows that was loaded, or made by a constructor, as the next step would.

    And forget what an optimizer has no state of any more. Without `constructed` what a constructor made stays, and state of
    rows that have that of another optimizer.
    """
    take_loaded(optimizer)
    for handle, group in handles_of(optimizer):
        entries, state = optimizer.state.get(handle.param, {}), handle.state
        owner = None if state is None else state.optimizer()
        if not constructed and owner not in (None, optimizer):
            continue
        if not entries and state is not None and owner is optimizer and not state.running:
            state.forget()
        stored = state.stored(entries) if state is not None and owner is optimizer else {}
        loose = [k for k, v in entries.items() if k not in stored and isinstance(v, Tensor) and v.dim() and len(v)]
        if not constructed:
            # A constructor makes one value, expanded.
            loose = [k for k in loose if 0 not in entries[k].stride()]
        if not loose or (state is not None and state.running):
            continue
        if owner not in (None, optimizer):
            raise InvalidValueError(
                f"{handle} has state {loose[0]!r} of an optimizer that made no step since another one did; make a step first"
            )
        if state is None or owner is None:
            specs = probe_optimizer(optimizer, group, handle.param, handle.sparse)
            state = give_state(handle, optimizer, group, specs)
        state.take_loaded(optimizer)


def make_first_state(optimizer: Optimizer) -> None:
    """Make planes for state that a constructor made (Adagrad) of no rows, or of as many as there were then.

    A dense optimizer has it of all rows.
    """
    for handle, group in handles_of(optimizer):
        if handle.state is not None and handle.state.optimizer() is not None:
            continue  # its own planes, or those of another, which only a step may replace
        entries = dict(optimizer.state.get(handle.param, {}))
        found = {k: v for k, v in entries.items() if isinstance(v, Tensor) and v.dim()}
        names = [k for k, v in found.items() if not len(v) or (0 in v.stride() and len(v) != handle.num_saved)]
        if names and handle.num_rows and optimizer not in handle.lost:
            specs = probe_optimizer(optimizer, group, handle.param, handle.sparse)
            state = give_state(handle, optimizer, group, specs)
            optimizer.state[handle.param].update(entries)
            state.adopt(optimizer, [key for key in names if key in specs])
