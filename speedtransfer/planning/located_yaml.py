"""YAML files of which every complaint names the file, the line and the key; nothing in them is ever run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from speedtransfer.errors import InvalidValueError, StorageError, printable, suggest
from speedtransfer.untrusted import open_file

_MOST_BYTES = 1 << 20
_KINDS = {"scalar": "a single value", "sequence": "a list", "mapping": "a mapping"}
_T = TypeVar("_T")


class YamlMapping:
    """A mapping of a file, whose values are read by key.

    Parameters
    ----------
    file : str
        What messages call the file.
    node : yaml.Node
    what : str
        What the mapping should be, for messages.

    Raises
    ------
    InvalidValueError
        The node is no mapping of text, or has a key twice.
    """

    def __init__(self, file: str, node: Any, what: str) -> None:
        self.file, self._node, self._what = file, node, what
        if node.id != "mapping":
            raise self._at(node, f"{what} is {_KINDS[node.id]} but must be a mapping; write `key: value` lines")
        self._nodes = dict[str, tuple[Any, Any]]()
        for key, value in node.value:
            if key.id != "scalar":
                raise self._at(key, f"a key is {_KINDS[key.id]} but must be a word")
            if key.value in self._nodes:
                first = self._nodes[key.value][0].start_mark.line + 1
                raise self._at(key, f"{key.value!r} is given again, first on line {first}; remove one of them")
            self._nodes[key.value] = key, value

    @property
    def keys(self) -> list[str]:
        """The keys, in the order of the file."""
        return list(self._nodes)

    def check_keys(self, known: Collection[str]) -> None:
        """Raise InvalidValueError for the first key that is not in `known`."""
        for key in self._nodes:
            if key not in known:
                raise self.error(key, f"{key!r} is not a key of {self._what}{suggest(key, known)}")

    def mapping(self, key: str, what: str) -> YamlMapping:
        """Return the mapping below `key`."""
        return YamlMapping(self.file, self._nodes[key][1], what)

    def text(self, key: str) -> str | None:
        """Return a value as it is written; None for null or a key that is not there."""
        node = self._nodes.get(key, (None, None))[1]
        if node is None:
            return None
        if node.id != "scalar":
            raise self._at(node, f"{key} is {_KINDS[node.id]} but must be a single value")
        tag = node.tag.rpartition(":")[2]
        if tag == "null":
            return None
        if tag == "bool":
            raise self._at(
                node, f"{key} is {node.value}, which YAML reads as true or false; put it in quotes if it is text"
            )
        if node.tag.startswith("tag:yaml.org,2002:python") or node.tag.startswith("!"):
            raise self._at(node, f"{key} has the tag {node.tag!r}, which is not allowed here; remove it")
        if printable(" ".join(node.value.split())) != " ".join(node.value.split()):
            raise self._at(
                node, f"{key} is {node.value!r}, which a terminal would not show but carry out; write plain text"
            )
        return str(node.value)

    def parsed(self, key: str, parse: Callable[[str], _T]) -> _T | None:
        """Return ``parse(text)``; what it raises gets file, line and key in front.

        Raises
        ------
        InvalidValueError
        """
        text = self.text(key)
        if text is None:
            return None
        try:
            return parse(text)
        except InvalidValueError as error:
            raise self.error(key, f"{key} is {error}", value=True) from None

    def error(self, key: str | None, what: str, value: bool = False) -> InvalidValueError:
        """Return an error about `key`, or about its value; None: about the mapping."""
        return self._at(self._node if key is None else self._nodes[key][value], what)

    def _at(self, node: Any, what: str) -> InvalidValueError:
        return InvalidValueError(f"{self.file}, line {node.start_mark.line + 1}: {what}")


def read_yaml(path: Path, what: str) -> YamlMapping:
    """Return the mapping that a file holds.

    Parameters
    ----------
    path : Path
    what : str
        What the file should hold, for messages.

    Raises
    ------
    StorageError
        The file cannot be read.
    InvalidValueError
        It is empty, no YAML, no mapping, or has a key twice.
    """
    import yaml  # few commands need it

    file = str(path)
    try:
        data = None
        if path.is_file():
            with open_file(path) as opened:
                data = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise StorageError(f"cannot read {file!r} ({error.strerror}); choose a file that you may read") from error
    if data is None:
        raise StorageError(f"{file!r} is no file that is there; check the path")
    if len(data) > _MOST_BYTES:
        raise InvalidValueError(f"{file} has {path.stat().st_size:,} bytes, too many for {what}; check the path")
    try:
        node = yaml.compose(data.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InvalidValueError(f"{file}, line {line}: the text is not UTF-8; save the file as UTF-8") from None
    except yaml.YAMLError as error:
        raise InvalidValueError(f"{file}, line {_line(error, data)}: not YAML: {_problem(error)}; correct it") from None
    except RecursionError:
        raise InvalidValueError(
            f"{file}, line 1: nested too deeply for {what}; write plain `key: value` lines"
        ) from None
    if node is None:
        raise InvalidValueError(f"{file}, line 1: the file is empty but must hold {what}; write `key: value` lines")
    return YamlMapping(file, node, what)


def _line(error: Any, data: bytes) -> int:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return int(mark.line) + 1
    position = getattr(error, "position", 0)  # of a character that YAML does not allow
    return data.decode("utf-8-sig")[:position].count("\n") + 1


def _problem(error: Any) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    return " ".join(str(problem).split())
