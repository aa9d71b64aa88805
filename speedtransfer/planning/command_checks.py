"""Check the options of ``speedtransfer plan``; each raises `InvalidValueError` with the option, the rule and the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speedtransfer.dtypes import FLOAT8_DTYPES
from speedtransfer.errors import InvalidValueError, check_size, suggest
from speedtransfer.planning.forms import STORAGE
from speedtransfer.planning.optimizer_name import NONE
from speedtransfer.ranks.zipf import expected_unique


def check_kind(of_ranks: bool, rank: bool, of_rank: dict[str, Any], json: str | None, picture: Path | None) -> None:
    """Raise for an option that would be ignored: of a ranking without --rank, or one that --ranks does not know."""
    for option, value in of_rank.items():
        if value is not None and not rank:
            raise InvalidValueError(f"{option} is {str(value)!r} without --rank, which it is for; pass --rank too")
    if of_ranks:
        ignored = {"--rank": rank, "--json": json, "--picture": picture}
        for option in (option for option, value in ignored.items() if value):
            raise InvalidValueError(f"{option} is given with --ranks, which only prints a table; leave out one of them")


def whole_rows(rows: float) -> int:
    """Return --rows as an integer."""
    if not rows.is_integer():
        raise InvalidValueError(f"--rows is {rows} but must be a number of rows; pass for instance 1e9")
    return check_size(int(rows), "--rows", 1)


def check_unique(unique: float | None, asked: int | None, counts: Sequence[int], zipf: float) -> float | None:
    """Return the distinct rows of a step of the first table; None where its lookups are not known."""
    if asked is None:
        if unique is not None:
            raise InvalidValueError(f"--unique is {unique} without the lookups of a step; pass --lookups as well")
        return None
    if unique is None:
        return expected_unique(counts[0], zipf, asked)
    if len(counts) > 1:
        raise InvalidValueError(f"--unique is {unique} for {len(counts)} tables; leave it out, or plan them one by one")
    if not 0 < unique <= min(asked, counts[0]):
        raise InvalidValueError(
            f"--unique is {unique} but must be above 0 and at most --lookups and --rows, {min(asked, counts[0])}; "
            "pass a number between"
        )
    return unique


def check_ranks(ranks: int, counts: Sequence[int], asked: int | None, unique: float | None, optimizer: str) -> int:
    """Return --ranks, where the rest of what is given suits several processes."""
    check_size(ranks, "--ranks", 1)
    if len(counts) > 1:
        raise InvalidValueError(
            f"--ranks is for one table but --rows is given {len(counts)} times; plan them one by one"
        )
    if asked is None or unique is None:
        raise InvalidValueError("--ranks is given without the lookups of a step; pass --lookups as well")
    if optimizer.lower() == NONE:
        raise InvalidValueError("--ranks shows training steps but --optimizer is none; leave out one of them")
    return ranks


def check_lookups(
    lookups: float | None, tokens: int | None, rows_per_token: int | None, batch: int | None
) -> tuple[float | None, int]:
    """Return the lookups of a sample, None where nothing is given, and the samples of a step: one unless --batch says."""
    samples = 1 if batch is None else check_size(batch, "--batch", 1)
    if lookups is not None:
        if tokens is not None or rows_per_token is not None:
            raise InvalidValueError("--lookups is given, and --tokens or --rows-per-token too; pass one or the others")
        check_number("--lookups", lookups)
        if lookups < 1 or (batch is None and not float(lookups).is_integer()):
            raise InvalidValueError(f"--lookups is {lookups:g} but must be a number from 1 on; pass for instance 65536")
        return lookups, samples
    if tokens is None:
        if rows_per_token is not None:
            raise InvalidValueError("--rows-per-token is given without --tokens; pass both")
        return (None if batch is None else 1.0), samples
    if batch is not None:
        raise InvalidValueError("--batch is given, and --tokens too; pass one of them")
    per_token = 1 if rows_per_token is None else check_size(rows_per_token, "--rows-per-token", 1)
    return float(check_size(tokens, "--tokens", 1) * per_token), samples


def check_scale_block(scale_block: int | None, storage_dtype: str) -> None:
    """Raise for a block of rows that have none."""
    if scale_block is None:
        return
    check_size(scale_block, "--scale-block", 1)
    if STORAGE[storage_dtype] not in FLOAT8_DTYPES:
        raise InvalidValueError(
            f"--scale-block is {scale_block} but --storage is {storage_dtype!r}, and only float8 rows have blocks; leave it "
            "out, or pass --storage float8_e4m3fn"
        )


def check_number(option: str, value: float, zero: bool = False) -> None:
    """Raise unless `value` is finite and above 0, or 0 where `zero`."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise InvalidValueError(
            f"{option} is {value} but must be a number {'from 0 on' if zero else 'above 0'}; pass one, or leave it out"
        )


def chosen(option: str, name: str, choices: dict[str, Any]) -> Any:
    """Return the one of `choices` that an option names."""
    if name not in choices:
        raise InvalidValueError(f"{option} is {name!r}{suggest(name, choices)}")
    return choices[name]
