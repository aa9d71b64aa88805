"""Rounds of spans, compiled by numba."""

from __future__ import annotations

import numpy as np

from speedtransfer.jit import compile_function


@compile_function
def find_rounds(
    rows: np.ndarray, starts: np.ndarray, draws: np.ndarray, counts: tuple[int, int], most_spans: int, most_times: int
) -> np.ndarray:  # fmt: skip
    """Return the span that each round begins with, and last how many spans there are.

    `starts` (spans + 1,) says where each span begins in `rows` (n,) and last where they end; `draws` (spans, num_draws) are
    other rows. They are below `counts`. A round is as long as it may be: of `most_spans`, with no row of either kind more than
    `most_times`, but for what one span has.
    """
    found, times, drawn = [0], np.zeros(counts[0], np.int64), np.zeros(counts[1], np.int64)
    for span in range(len(draws)):
        is_full = span - found[-1] == most_spans
        for is_new in (False, True):
            for row in rows[starts[span] : starts[span + 1]]:
                times[row] += 1
                is_full = is_full or times[row] > most_times
            for row in draws[span]:
                drawn[row] += 1
                is_full = is_full or drawn[row] > most_times
            if is_new or not is_full or span == found[-1]:
                break
            for row in rows[starts[found[-1]] : starts[span + 1]]:
                times[row] = 0
            for row in draws[found[-1] : span + 1].flat:
                drawn[row] = 0
            found.append(span)
    found.append(len(draws))
    return np.array(found)
