"""The machine to plan for: this one, one by name or file, or a `Machine`; with memory that a user says it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.machine_files import load_machine
from speedtransfer.planning.quantities import parse_bytes
from speedtransfer.planning.this_machine import this_machine

_GIVEN = "given"


def machine_given(
    machine: Any, host_memory: Any = None, disk: Any = None, rates: Collection[str] = ()
) -> tuple[Machine, bool]:
    """Return the machine to plan for, and whether it is this one.

    Parameters
    ----------
    machine : str, Machine or None
        None: this one.
    host_memory, disk : str or float, optional
        Bytes that take the place of its own figures, such as "512GB".
    rates : collection of str
        What is measured of this one, see :func:`speedtransfer.planning.this_machine.this_machine`.

    Raises
    ------
    InvalidValueError, InvalidTypeError, StorageError
        There is no such machine, or no such size.
    """
    here = machine is None
    if here:
        found = this_machine(rates=rates)
    elif isinstance(machine, Machine):
        found = machine
    elif isinstance(machine, str):
        found = load_machine(machine)
    else:
        raise InvalidTypeError(
            f"machine is {machine!r} ({type(machine).__name__}) but must be a name, the path of a YAML file or a Machine; "
            "pass one, or None for this machine"
        )
    changed: dict[str, Any] = {}
    if host_memory is not None:
        changed["host_bytes"] = _bytes(host_memory, "host_memory")
        # What can be page-locked is no more than that.
        changed["pinned_bytes"] = min(changed["host_bytes"], found.pinned_bytes or changed["host_bytes"])
        if not here:
            changed["pinned_bytes"] = changed["host_bytes"]
    if disk is not None:
        changed["disk_bytes"] = _bytes(disk, "disk")
    if changed:
        sources = {**found.sources, **dict.fromkeys(changed, _GIVEN)}
        found = dataclasses.replace(found, **changed, sources=sources)
    return found, here


def _bytes(value: Any, label: str) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidTypeError(
            f"{label} is {value!r} ({type(value).__name__}) but must be bytes; pass for instance '512GB'"
        )
    try:
        return parse_bytes(value if isinstance(value, str) else repr(value))
    except InvalidValueError as error:
        raise InvalidValueError(f"{label} is {error}") from None
