"""Calls that are refused, as data: lines ``CALL -> ERROR: WORDS``, where the words are a regular expression."""

import builtins
from typing import NamedTuple

import pytest

from speedtransfer import errors


class Refusal(NamedTuple):
    """A call, the name of the error that it raises, and words of the message."""

    call: str
    error: str
    words: str

    def __str__(self):
        return self.call


def refusals(text):
    """Return the lines of a text; one that begins with ``->`` belongs to the line before."""
    found = []
    for line in text.strip().replace("\n->", " ->").splitlines():
        call, _, rest = line.partition(" -> ")
        error, _, words = rest.partition(": ")
        found.append(Refusal(call, error, words))
    return found


def check_refused(refusal, lines=False, **names):
    """Make the call with these names and check the error; return its message, which is one line, or may be `lines`."""
    error = getattr(errors, refusal.error, None) or getattr(builtins, refusal.error)
    with pytest.raises(error, match=refusal.words) as caught:
        eval(refusal.call, names)
    message = str(caught.value)
    assert lines or "\n" not in message
    return message
