"""Exceptions of speedtransfer: each is also the standard exception that Python or PyTorch would raise.

Catch :class:`SpeedtransferError` for all of them, or ``IndexError``, ``ValueError``, ... as everywhere else. A message
names the bad value, the rule it broke and the remedy, on one line: the command line prints it as it is.
"""

from __future__ import annotations

import difflib
import errno
import math
import numbers
import operator
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

_MOST_LISTED = 30
_MOST_COMPARED = 10_000


# A `Path` of a URL has one slash. A drive of Windows has one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,3}\S")
# What a terminal carries out instead of showing it: control characters, ends of lines, and what turns text round.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` with everything escaped that a terminal would carry out: words, names and paths may be a stranger's."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class SpeedtransferError(Exception):
    """Base of every error raised on purpose by this package."""

    def __str__(self) -> str:
        """Return the message, which may name what is in a file of a stranger, as a terminal may show it."""
        # Not that of KeyError, which puts quotes around it.
        return "\n".join(map(printable, Exception.__str__(self).split("\n")))


class RowIndexError(SpeedtransferError, IndexError):
    """An index names a row that the table does not have."""


class InvalidValueError(SpeedtransferError, ValueError):
    """A value (a size, a shape, a name) breaks a rule."""


class InvalidTypeError(SpeedtransferError, TypeError):
    """A value has the wrong type or dtype."""


class DeviceError(SpeedtransferError, RuntimeError):
    """A device, driver or package for it is missing, or refused the request."""


class HostMemoryError(SpeedtransferError, MemoryError):
    """The host or the device cannot give the memory asked for."""


class StorageError(SpeedtransferError, OSError):
    """A file or folder cannot be read, written or trusted."""


class OptimizerError(SpeedtransferError, RuntimeError):
    """An optimizer cannot train rows on their own, or its state does not fit the table."""


class ProcessGroupError(SpeedtransferError, RuntimeError):
    """The processes of a group disagree, or one of them failed at what all do together."""


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of `choices`, or lists them where none is near."""
    choices = list(choices)
    by_lower = {choice.lower(): choice for choice in choices}
    # Comparing with millions of names takes a minute.
    near = difflib.get_close_matches(str(name).lower(), list(by_lower)[:_MOST_COMPARED], n=2, cutoff=0.6)
    if near:
        return "; did you mean " + " or ".join(repr(by_lower[n]) for n in near) + "?"
    more = f" and {len(choices) - _MOST_LISTED} more" if len(choices) > _MOST_LISTED else ""
    return "; choose from " + ", ".join(repr(c) for c in choices[:_MOST_LISTED]) + more


def one_line(value: object) -> str:
    """Return what a message says of a value of any type: its beginning, on one line."""
    return textwrap.shorten(repr(value), 80, placeholder=" ...")


def describe_ending(path: object) -> str:
    """Return what a message says of the ending of the file name `path`: "ends in '.txt'", or "has no ending"."""
    suffix = PurePath(str(path)).suffix
    return f"ends in {suffix!r}" if suffix else "has no ending"


def check_path(path: object, name: str = "path", what: str = "a file", more: str = "") -> Path:
    """Return `path`, that of `what`, or raise where it cannot be one; errors call it `name` and end with `more`."""
    if not isinstance(path, str | os.PathLike):
        said, kind = one_line(path), type(path).__name__
        raise InvalidTypeError(f"{name} is {said} ({kind}) but must be the path of {what}; pass one{more}")
    check_no_url(path, name)
    if not os.fspath(path) or "\0" in os.fsdecode(path):
        raise InvalidValueError(f"{name} is {os.fspath(path)!r}, not a path; pass the path of {what}")
    check_length(path, name)
    return Path(path)


def check_length(path: str | os.PathLike[str], name: str = "path") -> None:
    """Raise `InvalidValueError` where a path is longer than the file system allows; errors call it `name`."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InvalidValueError(
                f"{name} {os.fspath(path)!r} is too long for the file system; choose a shorter one"
            ) from None


def check_png(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture; raise unless it ends in .png."""
    found = check_path(path, what="a picture")
    if found.suffix != ".png":
        raise InvalidValueError(f"{str(path)!r} {describe_ending(path)} but the picture is a PNG; use the ending .png")
    return found


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` with a decimal unit (1 GB = 1e9 bytes), three significant digits."""
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB" if abs(value) < 999.5 else f"{value:,.0f} TB"


def check_loader(value: object, name: str) -> None:
    """Raise `InvalidTypeError` where `value` is nothing that ``iter`` takes, and so gives no batches."""
    if not hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__"):
        raise InvalidTypeError(
            f"{name} is {value!r} ({type(value).__name__}) but must be an iterable of batches; pass a DataLoader or a list"
        )


def is_url(path: object) -> bool:
    """Tell whether `path` is a URL."""
    return bool(_URL.match(str(path)))


def check_no_url(path: object, name: str = "path") -> None:
    """Raise `InvalidValueError` where `path` is a URL: as a path it would be that of folders on this machine."""
    if is_url(path):
        raise InvalidValueError(
            f"{name} is the URL {str(path)!r} but must be a path of this machine; mount the store, or pass a "
            "local path and copy what is there (fsspec, rclone)"
        )


def check_choice(value: object, name: str, choices: Iterable[str]) -> Any:
    """Return `value`, which must be one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise InvalidValueError(f"{name} is {value!r}, not one of its values{suggest(str(value), choices)}")
    return value


def check_size(value: object, name: str, minimum: int = 0) -> int:
    """Return `value` as an int of at least `minimum`, or raise an error that names it.

    Raises
    ------
    InvalidTypeError
        `value` is no integer (bool counts as none).
    InvalidValueError
        `value` is below `minimum`, or no 64-bit integer.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidTypeError(
            f"{name} is {value!r} ({type(value).__name__}) but must be an integer; pass int({name})"
        ) from None
    if number < minimum:
        raise InvalidValueError(f"{name} is {number} but must be at least {minimum}; pass {minimum} or more")
    if number >= 2**63:
        raise InvalidValueError(f"{name} is {number} but must be below 2**63; pass a smaller {name}")
    return number


def check_number(
    value: object, name: str, minimum: float = 0.0, maximum: float = math.inf, above: bool = False
) -> float:
    """Return `value` as a finite float from `minimum`, or `above` it, to `maximum`, or raise an error that names it.

    Raises
    ------
    InvalidTypeError
        `value` is no real number (bool counts as none).
    InvalidValueError
        `value` is not within, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidTypeError(f"{name} is {value!r} ({type(value).__name__}) but must be a number; pass float({name})")
    number: Any = value
    # An int may be too large for a float.
    if not -sys.float_info.max <= number <= sys.float_info.max:
        raise InvalidValueError(f"{name} is {value} but must be finite; pass an ordinary number")
    if not minimum <= number <= maximum or (above and number == minimum):
        least = f"above {minimum:g}" if above else f"at least {minimum:g}"
        most = "" if maximum == math.inf else f" and at most {maximum:g}"
        raise InvalidValueError(f"{name} is {value} but must be {least}{most}; pass such a number")
    return float(number)
