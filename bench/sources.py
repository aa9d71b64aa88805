"""What a recorded result depends on: the definitions that the measured code reaches, from the functions where it begins.

A definition (function, class, constant) reaches those that it mentions, in its module or through an import, and a module or
kernel that it names as a text. Comments, docstrings, the place of a definition and all that is not reached count for nothing:
words and pictures may share a file with what is measured. Where more than this could be told from the text (a module passed
on as a value, a private definition that nothing mentions) all of it counts. What a package of others does is left out.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tree import Read

_PLACES = ("", "bench/", "examples/")  # on the path of a benchmark
_KERNELS = "speedtransfer/kernels/"
_TEXT = re.compile(r"[\w/]+(\.\w+)+")  # may name a file or a module
_INCLUDED = re.compile(r'^#include "(.+)"', re.MULTILINE)
ALL = "*"  # of a module, in place of a name
_ANYWAY = ""  # what runs when a module is imported

Mention = tuple[str, ...]


class Module(NamedTuple):
    """What a module defines and imports, by the names that it gives them."""

    name: str
    definitions: dict[str, list[ast.AST]]
    imports: dict[str, Mention]


class Sources:
    """The Python modules and kernels of a tree; `read` returns the text of a file."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._modules: dict[str, Module | None] = {}
        self._found: dict[tuple[str, str], tuple[str, list[tuple[str, tuple[str, str]]]]] = {}

    def digest(self, entries: Iterable[str]) -> str:
        """Return the SHA-256 of all that is reached from `entries`: "module:name", or "module:*" for all of a module."""
        keys = [(module, name) for module, _, name in (entry.partition(":") for entry in entries)]
        lines = {f"{module}:{name} {self._look(module, name)[0]}" for module, name in keys}
        for key in self._reach(keys):
            own, targets = self._look(*key)
            lines |= {f"{own} {mention} {self._look(*target)[0]}" for mention, target in targets}
        return _hash("\n".join(sorted(lines)))

    def modules(self, entries: Iterable[str]) -> set[str]:
        """Return the modules (by dotted name) and kernels (by path) of which something is reached from `entries`."""
        keys = [(module, name) for module, _, name in (entry.partition(":") for entry in entries)]
        return {module for module, name in self._reach(keys) if name != _ANYWAY}

    def _reach(self, keys: list[tuple[str, str]]) -> set[tuple[str, str]]:
        done, waiting = set(keys), [*keys]
        while waiting:
            found = {target for _, target in self._look(*waiting.pop())[1]} - done
            done |= found
            waiting += found
        return done

    def has(self, entry: str) -> bool:
        """Tell whether there is such a definition."""
        module, _, name = entry.partition(":")
        found = self._module(module)
        return found is not None and (name == ALL or name in found.definitions)

    def _look(self, module: str, name: str) -> tuple[str, list[tuple[str, tuple[str, str]]]]:
        """Return the digest of a definition by itself, and what it mentions with what that is."""
        if (module, name) not in self._found:
            self._found[module, name] = self._look_anew(module, name)
        return self._found[module, name]

    def _look_anew(self, name: str, definition: str) -> tuple[str, list[tuple[str, tuple[str, str]]]]:
        module = self._module(name)
        if module is None:
            text = self._read(name) or ""
            return _hash(text), [(part, (_KERNELS + part, ALL)) for part in _INCLUDED.findall(text)]
        kept = [definition] if definition != ALL else [*module.definitions]
        nodes = [node for key in kept for node in module.definitions.get(key, [])]
        targets = [("", (name, _ANYWAY))] if definition != _ANYWAY else []
        if definition == ALL:
            targets += [(key, target) for key in module.imports for target in self._targets(module, (key,), {})]
        for node in nodes:
            _, mentions, imports, texts = _facts(node)
            for mention in mentions:
                targets += [(".".join(mention), target) for target in self._targets(module, mention, imports)]
            targets += [(text, target) for text in texts if (target := self._named(text))]
        return _hash("\n".join(_facts(node).code for node in nodes)), targets

    def _targets(self, module: Module, mention: Mention, local: dict[str, Mention]) -> Iterator[tuple[str, str]]:
        """Yield the definition that is mentioned, if it is one of the tree."""
        first, *rest = mention
        place = local.get(first) or module.imports.get(first)
        if place is None:
            if first in module.definitions:
                yield module.name, first
            return
        parts = [*place, *rest]
        sizes = (size for size in range(len(parts), 0, -1) if self._module(".".join(parts[:size])) is not None)
        size = next(sizes, 0)
        if not size:
            return
        path, rest = ".".join(parts[:size]), parts[size:]
        found = self._module(path)
        assert found is not None
        if not rest:
            yield path, ALL
        elif rest[0] in found.definitions:
            yield path, rest[0]
        elif rest[0] in found.imports:
            yield path, _ANYWAY
            yield from self._targets(found, tuple(rest), {})
        elif not rest[0].startswith("__"):
            yield path, ALL  # made where this cannot see it

    def _named(self, text: str) -> tuple[str, str] | None:
        """Return what a text names: a module to be run, a script of bench/ or a kernel."""
        if text.endswith((".cu", ".cuh")):
            return (_KERNELS + text, ALL) if self._read(_KERNELS + text) is not None else None
        script = text.removesuffix(".py")
        return (script, ALL) if script and self._module(script) is not None else None

    def _module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            paths = (f"{place}{path}{end}" for place in _PLACES for end in (".py", "/__init__.py"))
            text = None if "/" in name else next((t for p in paths if (t := self._read(p)) is not None), None)
            self._modules[name] = None if text is None else _parse(name, text)
        return self._modules[name]


class Facts(NamedTuple):
    """What a definition says, by itself."""

    code: str
    mentions: frozenset[Mention]
    imports: dict[str, Mention]
    texts: frozenset[str]


@functools.cache
def _facts(node: ast.AST) -> Facts:
    parts = [*ast.walk(node)]
    return Facts(_dump(node), frozenset(_mentions(node)), _imports(parts), frozenset(_texts(parts)))


# Of one commit and another most modules are the same.
@functools.cache
def _parse(name: str, text: str) -> Module:
    tree = ast.parse(text)
    definitions: dict[str, list[ast.AST]] = {_ANYWAY: []}
    statements = [*_flat(tree.body)]
    for node in statements:
        for key in _defined(node) or [_ANYWAY]:
            definitions.setdefault(key, []).append(node)
    mentioned = {mention[0] for node in statements for mention in _facts(node).mentions}
    for key in [key for key in definitions if key.startswith("_") and not key.endswith("__")]:
        if key not in mentioned:  # nothing asks for it: it is there for what it does
            definitions[_ANYWAY] += definitions[key]
    return Module(name, definitions, _imports(_import_statements(tree.body)))


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those within conditions too, without docstring, imports and types."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With) and not _is_main(node):
            inner = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            for part in [*inner, *(handler.body for handler in getattr(node, "handlers", []))]:
                yield from _flat(part)
        elif not isinstance(node, ast.Import | ast.ImportFrom) and not _is_text(node):
            yield node


def _import_statements(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With | ast.Import | ast.ImportFrom):
            yield from ast.walk(node)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in {mention[0] for mention in _mentions(node.test)}


def _defined(node: ast.stmt) -> list[str]:
    if _is_main(node):
        return ["__main__"]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets: list[Any] = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [part.id for target in targets if target for part in ast.walk(target) if isinstance(part, ast.Name)]


def _imports(nodes: Iterable[ast.AST]) -> dict[str, Mention]:
    found: dict[str, Mention] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = tuple(alias.name.split("."))
                found[alias.asname or parts[0]] = parts if alias.asname else parts[:1]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = (*node.module.split("."), alias.name)
    return found


def _mentions(node: ast.AST) -> Iterator[Mention]:
    parts, inner = [], node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield (inner.id, *reversed(parts))
        return
    for child in ast.iter_child_nodes(inner):
        yield from _mentions(child)


def _texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for part in nodes:
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and _TEXT.fullmatch(part.value):
            yield part.value


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _dump(node: Any) -> str:
    """Return the code of a node, the same in every version of Python, without docstrings and places."""
    if isinstance(node, list):
        return f"[{','.join(_dump(part) for part in node if not _is_text(part))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment"))
    inner = ",".join(f"{name}={_dump(value)}" for name, value in fields if value not in (None, []))
    return f"{type(node).__name__}({inner})"


def normal_form(name: str, text: str) -> str:
    """Return what counts of a file: of Python its code without comments and docstrings, of others all."""
    return _dump(ast.parse(text).body) if name.endswith(".py") else text


@functools.cache
def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
