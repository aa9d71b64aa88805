"""Ways to look batches up, which must all read the same rows: each yields a batch and what to call the module with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import speedtransfer as st


def at_once(module: Any, batches: Any) -> Iterator[tuple[Any, Any]]:
    return ((ids, ids) for ids in batches)


def by_ticket(module: Any, batches: Any) -> Iterator[tuple[Any, Any]]:
    """Tickets are two batches ahead."""
    tickets = [module.prefetch(ids) for ids in batches[:2]]
    for step, ids in enumerate(batches):
        tickets += [module.prefetch(later) for later in batches[step + 2 : step + 3]]
        yield ids, tickets.pop(0)


def by_loader(module: Any, batches: Any) -> Iterator[tuple[Any, Any]]:
    return ((ids, ids) for ids in st.prefetch(batches, lambda ids: {module: ids}))
