"""Machines by name, from the published figures that come with this package, and from users' YAML files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from speedtransfer.errors import InvalidValueError, suggest
from speedtransfer.once import once
from speedtransfer.planning.links import link_named
from speedtransfer.planning.located_yaml import YamlMapping, read_yaml
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.quantities import parse_bytes, parse_count, parse_number, parse_rate

PUBLISHED = Path(__file__).with_name("machines.yaml")
_SUFFIXES = (".yaml", ".yml")
_WHAT = "a machine"


_PARSERS: dict[str, Callable[[str], Any]] = {
    "device": str,
    "devices": parse_count,
    "currency": str,
    **{f"{name}_bytes": parse_bytes for name in ("device", "host", "pinned", "disk")},
    **{f"{n}_bytes_per_s": parse_rate for n in ("device", "link_up", "link_down", "peer", "host", "disk")},
    **{f"{name}_price": parse_number for name in ("device", "machine", "hourly")},
}
_KEYS = ("name", "base", "link", "source", "sources", *_PARSERS)
_LINK_RATES = ("link_up_bytes_per_s", "link_down_bytes_per_s")


def machine_names() -> list[str]:
    """Return the names of the machines of which published figures come with this package."""
    return list(_published())


def load_machine(machine: str) -> Machine:
    """Return a machine by its name, in whatever case, or from a YAML file.

    Parameters
    ----------
    machine : str
        One of :func:`machine_names`; or the path of a file (one that is there, or ends in .yaml or .yml), with ``#name`` at
        its end where it holds several machines.

    Returns
    -------
    Machine

    Raises
    ------
    InvalidValueError
        There is no such machine; or the file is wrong, by file and line.
    StorageError
        The file cannot be read.
    """
    path, name = _path_in(machine)
    if path is None:
        return _by_name(machine, _published(), f"machine is {machine!r}, which is neither a name nor a YAML file")
    found = _machines_of(path)
    if name:
        return _by_name(name, found, f"{path} has no machine {name!r}")
    if len(found) > 1:
        first = next(iter(found))
        raise InvalidValueError(f"{path} holds {len(found)} machines; name one, such as '{path}#{first}'")
    return next(iter(found.values()))


def load_machines(machine: str) -> list[Machine]:
    """Return the machine of that name, or all those that a file holds; raises as :func:`load_machine` does."""
    path, name = _path_in(machine)
    return [load_machine(machine)] if path is None or name else list(_machines_of(path).values())


def published_machines() -> list[Machine]:
    """Return the machines of which published figures come with this package."""
    return list(_published().values())


@once
def _published() -> Mapping[str, Machine]:
    return _machines_of(PUBLISHED)


def _path_in(machine: str) -> tuple[Path | None, str]:
    """Return the path that `machine` names and what follows its "#"; (None, "") for a plain name."""
    whole, (path, _, name) = Path(machine), machine.rpartition("#")
    if machine.lower().endswith(_SUFFIXES) or whole.is_file():
        return whole, ""
    if path and (path.lower().endswith(_SUFFIXES) or Path(path).is_file()):
        return Path(path), name
    return None, ""


def _by_name(name: str, machines: Mapping[str, Machine], what: str) -> Machine:
    by_lower = {each.lower(): machine for each, machine in machines.items()}
    if name.lower() not in by_lower:
        raise InvalidValueError(f"{what}{suggest(name, machines)}")
    return by_lower[name.lower()]


def _machines_of(path: Path) -> dict[str, Machine]:
    """Return the machines of a file by name: those below `machines:`, or the file itself is one."""
    root = read_yaml(path, _WHAT)
    if "machines" not in root.keys:
        name = root.text("name") or path.stem
        return {name: _Reader({name: root}).machine(name)}
    root.check_keys(("machines",))
    below = root.mapping("machines", "`machines`")
    if not below.keys:
        raise below.error(None, "`machines` is empty; write a machine below it, or leave it out")
    reader = _Reader({name: below.mapping(name, _WHAT) for name in below.keys}, published=path == PUBLISHED)
    return {name: reader.machine(name) for name in below.keys}


class _Reader:
    """Machines of one file, each of which may be based on another or on a published one."""

    def __init__(self, entries: dict[str, YamlMapping], published: bool = False) -> None:
        self._entries, self._published = entries, published
        self._done = dict[str, Machine]()
        self._open = list[str]()

    def machine(self, name: str) -> Machine:
        if name not in self._done:
            self._open.append(name)
            self._done[name] = self._read(name, self._entries[name])
            self._open.pop()
        return self._done[name]

    def _read(self, name: str, entry: YamlMapping) -> Machine:
        entry.check_keys(_KEYS)
        base = self._base(entry)
        given: dict[str, Any] = {key: entry.parsed(key, parse) for key, parse in _PARSERS.items() if key in entry.keys}
        sources = dict(base.sources) if base else {}
        where = entry.text("source") or "given"
        sources |= dict.fromkeys(given, where)
        if "link" in entry.keys:
            self._add_link(entry, given, sources)
            sources |= {key: where for key in _LINK_RATES if key in entry.keys}
        sources |= _sources(entry, given)
        sources = {key: value for key, value in sources.items() if key not in given or given[key] is not None}
        if given.get("devices", 1) is None:
            raise entry.error("devices", "devices is null but must be a number of GPUs; leave it out for one")
        known = dataclasses.replace(base or Machine(name), **given)
        return dataclasses.replace(known, name=entry.text("name") or name, sources=sources)

    def _base(self, entry: YamlMapping) -> Machine | None:
        base = entry.text("base")
        if base is None:
            return None
        if base in self._open:
            raise entry.error("base", f"base is {base!r}, which is based on this machine itself; name another")
        if base in self._entries:
            return self.machine(base)
        published = {} if self._published else _published()
        for name, machine in published.items():
            if name.lower() == base.lower():
                return machine
        choices = [*self._entries, *published]
        raise entry.error("base", f"base is {base!r}{suggest(base, choices)}")

    @staticmethod
    def _add_link(entry: YamlMapping, given: dict[str, Any], sources: dict[str, str]) -> None:
        """Add the link's name and, where they are not given, what copies over it are expected to get."""
        given["link"] = entry.text("link")
        if given["link"] is None or all(given.get(key) is not None for key in _LINK_RATES):
            return
        link = entry.parsed("link", link_named)
        assert link is not None
        given["link"] = link.name
        for key, rate in zip(_LINK_RATES, (link.up_bytes_per_s, link.down_bytes_per_s), strict=True):
            if given.get(key) is None:
                given[key], sources[key] = rate, link.source


def _sources(entry: YamlMapping, given: Mapping[str, object]) -> dict[str, str]:
    """Return what stands below `sources:`; all figures that are given may have one."""
    if "sources" not in entry.keys:
        return {}
    below = entry.mapping("sources", "`sources`")
    below.check_keys(given)
    return {key: below.text(key) or "given" for key in below.keys}
