"""The tokens of the n-gram that ends at each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError, RowIndexError
from speedtransfer.ngrams.constants import HashConstants, as_integers
from speedtransfer.nn import in_transform


def as_tokens(tokens: Any, vocab_size: int, name: str) -> Tensor:
    """Return `tokens` as int64, ``(..., time)``.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        They are no integers, or one number.
    RowIndexError
        One on the CPU is not below `vocab_size`; others the host cannot look at without waiting.
    """
    tokens = as_integers(tokens, name)
    if tokens.dim() == 0:
        raise InvalidValueError(f"{name} has no dimensions but must be (..., time); pass {name}[None]")
    tokens = tokens.long()
    if can_look_at(tokens):
        wrong = beyond(tokens, vocab_size)
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            raise RowIndexError(
                f"{name}{place} is {int(tokens[tuple(place)])} but vocab_size is {vocab_size}; pass tokens from 0 on, "
                "and the token of padding for positions without one"
            )
    return tokens


def can_look_at(tokens: Tensor) -> bool:
    """Tell whether the host sees values of `tokens` without waiting, and outside of what torch compiles or transforms."""
    return tokens.device.type == "cpu" and not torch.compiler.is_compiling() and not in_transform()


def beyond(tokens: Tensor, vocab_size: int) -> Tensor:
    """Tell which tokens are not below `vocab_size`."""
    return (tokens < 0) | (tokens >= vocab_size)


def ngrams_of(tokens: Tensor, context: Tensor | None, constants: HashConstants) -> list[Tensor]:
    """Return the token in each place of the longest n-gram that ends at each position, the last first.

    What lies beyond the border of a document, and before all tokens, is `constants.fill`.

    Parameters
    ----------
    tokens : Tensor
        ``(..., time)`` int64.
    context : Tensor, optional
        ``(..., k)`` int64, the tokens before.
    constants : HashConstants

    Returns
    -------
    list of Tensor
        Each ``(..., time)``.
    """
    time, reach = tokens.shape[-1], constants.orders[-1] - 1
    missing, known = reach, tokens
    if context is not None:
        if context.shape[:-1] != tokens.shape[:-1] or context.device != tokens.device:
            raise InvalidValueError(
                f"context is {tuple(context.shape)} on {context.device} but tokens is {tuple(tokens.shape)} on "
                f"{tokens.device}; pass the last tokens before each of its rows"
            )
        context = context[..., max(context.shape[-1] - reach, 0) :]
        missing -= context.shape[-1]
        known = torch.cat([context, tokens], -1)
    known = torch.cat([tokens.new_full((*tokens.shape[:-1], missing), constants.fill), known], -1)
    places = [known[..., reach - place : reach - place + time] for place in range(reach + 1)]
    ends = constants.eos if constants.pad is None else (*constants.eos, constants.pad)
    if not ends and not constants.bos:
        return places
    # Once an n-gram has met the border of a document all that is before it is missing.
    cut = _is_one_of(places[0], constants.bos)
    for place in range(1, reach + 1):
        cut = cut | _is_one_of(places[place], ends)
        begins = _is_one_of(places[place], constants.bos)
        places[place] = places[place].masked_fill(cut, constants.fill)
        cut = cut | begins
    return places


def _is_one_of(tokens: Tensor, wanted: Sequence[int]) -> Tensor:
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for token in wanted:
        found = found | (tokens == token)
    return found
