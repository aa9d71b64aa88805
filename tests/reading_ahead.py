"""Ways to look batches up, which must all read the same rows: each yields a batch and what to call the module with.

And reads ahead that are held back.
"""

import threading

import pytest

import speedtransfer as st
from speedtransfer.rows import Rows

LIMIT_S = 60


def at_once(module, batches):
    return ((ids, ids) for ids in batches)


def by_ticket(module, batches):
    """Tickets are two batches ahead."""
    tickets = [module.prefetch(ids) for ids in batches[:2]]
    for step, ids in enumerate(batches):
        tickets += [module.prefetch(later) for later in batches[step + 2 : step + 3]]
        yield ids, tickets.pop(0)


def by_loader(module, batches):
    return ((ids, ids) for ids in st.prefetch(batches, lambda ids: {module: ids}))


@pytest.fixture
def held(monkeypatch):
    """Reads ahead wait for this event; `held.begun` says that one does."""
    go_on = threading.Event()
    go_on.begun, fetch = threading.Event(), Rows.fetch

    def held_fetch(rows, ids, planes=None, *known):
        if threading.current_thread() is not threading.main_thread():
            go_on.begun.set()
            assert go_on.wait(LIMIT_S)
        return fetch(rows, ids, planes, *known)

    monkeypatch.setattr(Rows, "fetch", held_fetch)
    yield go_on
    go_on.set()
