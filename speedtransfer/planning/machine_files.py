"""Machines by name, from the published figures that come with this package, and from users' YAML files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError, suggest
from speedtransfer.once import once
from speedtransfer.planning.machine import Machine, link_rates, parse_bytes, parse_count, parse_text
from speedtransfer.untrusted import open_file

PUBLISHED = Path(__file__).with_name("machines.yaml")
_MOST_BYTES = 1 << 20  # of a YAML file

_PARSERS: dict[str, Callable[[Any], Any]] = {
    "device": parse_text,
    "devices": parse_count,
    **{f"{name}_bytes": parse_bytes for name in ("device", "host", "pinned", "disk")},
    **{
        f"{name}_bytes_per_s": lambda value: parse_bytes(value, "/s")
        for name in ("device", "link_up", "link_down", "peer", "host", "disk")
    },
}
_KEYS = ("name", "base", "link", "source", "sources", *_PARSERS)
_LINK_RATES = ("link_up_bytes_per_s", "link_down_bytes_per_s")


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Return the mapping that a YAML file holds; `what` it should be is for messages.

    Raises
    ------
    StorageError
        The file cannot be read.
    InvalidValueError
        It is too large, no YAML, or no mapping.
    """
    import yaml  # few commands need it

    if not path.is_file():
        raise StorageError(f"{str(path)!r} is no file that is there; check the path")
    try:
        with open_file(path) as opened:
            data = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r} ({error.strerror}); choose a file that you may read") from error
    if len(data) > _MOST_BYTES:
        raise InvalidValueError(f"{path} has more than {_MOST_BYTES:,} bytes, too many for {what}; check the path")
    try:
        found = yaml.safe_load(data.decode("utf-8-sig"))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidValueError(f"{path} is no YAML ({' '.join(str(error).split())}); correct it") from None
    return mapping_of(found, f"{path}: {what}")


def mapping_of(value: Any, label: str, known: Collection[str] | None = None) -> dict[str, Any]:
    """Return `value` if it is a mapping with words as keys, of those `known` if they are given."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidValueError(f"{label} must be a mapping of words to values; write `key: value` lines")
    for key in value:
        if known is not None and key not in known:
            raise InvalidValueError(f"{label} has a key {key!r}{suggest(key, known)}")
    return value


def parsed(entry: Mapping[str, Any], key: str, parse: Callable[[Any], Any], label: str) -> Any:
    """Return the value below `key`, None if there is none; what `parse` raises gets the label and the key in front."""
    if entry.get(key) is None:
        return None
    try:
        return parse(entry[key])
    except InvalidValueError as error:
        raise InvalidValueError(f"{label}: {key} is {error}") from None


def load_machines(machine: str) -> list[Machine]:
    """Return the machine of a name, in whatever case, or those of a YAML file.

    Parameters
    ----------
    machine : str
        A name of :func:`published_machines`; or the path of a file (one that is there, or ends in .yaml or .yml).

    Raises
    ------
    InvalidValueError
        There is no such machine, or the file is wrong.
    StorageError
        The file cannot be read.
    """
    if machine.lower().endswith((".yaml", ".yml")) or Path(machine).is_file():
        return list(_machines_of(Path(machine), _published()).values())
    found = _published().get(machine.lower())
    if found is None:
        what = f"machine is {machine!r}, which is neither a name nor a YAML file"
        raise InvalidValueError(f"{what}{suggest(machine, _published())}")
    return [found]


def load_machine(machine: str) -> Machine:
    """Return a machine as :func:`load_machines` does, which must be one."""
    found = load_machines(machine)
    if len(found) > 1:
        raise InvalidValueError(f"{machine} holds {len(found)} machines; pass a file with the one to plan for")
    return found[0]


def published_machines() -> list[Machine]:
    """Return the machines of which published figures come with this package."""
    return list(_published().values())


@once
def _published() -> Mapping[str, Machine]:
    return _machines_of(PUBLISHED, {})


def _machines_of(path: Path, known: Mapping[str, Machine]) -> dict[str, Machine]:
    """Return the machines of a file: those below `machines:`, or the file is one. A base is one before it, or of `known`."""
    root = read_yaml(path, "a machine")
    entries = {str(root.get("name") or path.stem): root}
    if "machines" in root:
        entries = mapping_of(root["machines"], f"{path}: `machines`")
        if len(root) > 1 or not entries:
            raise InvalidValueError(
                f"{path}: `machines` is empty or not alone; write all machines of the file below it"
            )
    found: dict[str, Machine] = {}
    for name, entry in entries.items():
        label = f"{path}, {name!r}"
        base = mapping_of(entry, label, _KEYS).get("base")
        bases = {**known, **{each.lower(): machine for each, machine in found.items()}}
        if base is not None and str(base).lower() not in bases:
            raise InvalidValueError(f"{label}: base is {base!r}{suggest(str(base), bases)}")
        found[name] = _machine(name, entry, None if base is None else bases[str(base).lower()], label)
    return found


def _machine(name: str, entry: Mapping[str, Any], base: Machine | None, label: str) -> Machine:
    """Return a machine with the figures of a file, where each is from, and the rates of its link."""
    given: dict[str, Any] = {key: parsed(entry, key, _PARSERS[key], label) for key in entry if key in _PARSERS}
    if given.get("devices", 1) is None:
        raise InvalidValueError(f"{label}: devices is null but must be a number of GPUs; leave it out for one")
    where = parsed(entry, "source", parse_text, label) or "given"
    sources = {**(base.sources if base else {}), **dict.fromkeys(given, where)}
    if "link" in entry:
        given["link"], sources["link"] = parsed(entry, "link", parse_text, label), where
        if given["link"] is not None and any(given.get(key) is None for key in _LINK_RATES):
            given["link"], *rates, source = parsed(entry, "link", link_rates, label)
            for key, rate in zip(_LINK_RATES, rates, strict=True):
                if given.get(key) is None:
                    given[key], sources[key] = rate, source
    own = mapping_of(entry.get("sources") or {}, f"{label}: `sources`", given)
    sources |= {key: parsed(own, key, parse_text, label) or "given" for key in own}
    sources = {key: value for key, value in sources.items() if key not in given or given[key] is not None}
    shown = parsed(entry, "name", parse_text, label) or parse_text(name)
    return dataclasses.replace(base or Machine(name), **given, name=shown, sources=sources)


def machine_given(machine: Any) -> Machine:
    """Return a machine that is given by name, by file, or as it is; raises as :func:`load_machine` does."""
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, str):
        return load_machine(machine)
    raise InvalidTypeError(
        f"machine is {machine!r} ({type(machine).__name__}) but must be a name, the path of a YAML file or a Machine; "
        "pass one, or None for this machine"
    )
