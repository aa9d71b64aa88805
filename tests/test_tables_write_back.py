"""Rows that were read before they were written: what was written is put over them, in the order of the writes."""

import pytest
import torch

from speedtransfer.tables import overlay
from speedtransfer.tables.write_back import _places
from speedtransfer.tables.write_log import Write, WriteLog

ROWS, DIM = 30, 3


def some_ids(generator, most):
    count = int(torch.randint(most + 1, (), generator=generator))
    return torch.randperm(ROWS, generator=generator)[:count]


@pytest.mark.parametrize("seed", range(30))
def test_overlay(seed):
    generator = torch.Generator().manual_seed(seed)
    planes = {name: torch.randn(ROWS, DIM, generator=generator) for name in ("weight", "exp_avg")}
    ids = some_ids(generator, 20).sort().values
    fetched = {name: plane[ids] for name, plane in planes.items()}
    writes = []
    for _ in range(int(torch.randint(5, (), generator=generator))):
        named = some_ids(generator, 12)
        which = ["weight", "exp_avg"][: int(torch.randint(1, 3, (), generator=generator))]
        rows = {name: torch.randn(len(named), DIM, generator=generator) for name in which}
        for name, part in rows.items():
            planes[name][named] = part
        kept = bool(torch.randint(2, (), generator=generator))
        writes.append(Write(named, rows if kept else None))
    again = overlay(fetched, ids, writes, ROWS)
    unknown = [write.ids for write in writes if write.rows is None]
    assert (again is None) == (not unknown)
    wanted = torch.isin(ids, torch.cat(unknown)) if unknown else torch.zeros(len(ids), dtype=torch.bool)
    assert again is None or torch.equal(again, wanted)
    for name, plane in planes.items():
        fetched[name][wanted] = plane[ids[wanted]]
        assert torch.equal(fetched[name], plane[ids])


def test_padding_is_no_row():
    ids, among = torch.tensor([2, 5, ROWS, ROWS]), torch.tensor([ROWS, 5, ROWS, 1])
    places, found = _places(ids, among, ROWS)
    assert found.tolist() == [False, True, False, False]
    assert among[places[1]] == 5
    assert _places(ids, among[:0], ROWS)[1].tolist() == [False] * 4


def test_a_log_keeps_the_values_of_the_last_writes_only():
    plane = torch.zeros(ROWS, DIM)
    log = WriteLog({"weight": plane}, 0)
    for number in range(20):
        log.note(Write(torch.tensor([number]), {"weight": torch.zeros(1, DIM)}), number, number + 1)
    writes = log.written({"weight": plane}, 20)
    assert [write.ids.item() for write in writes] == list(range(20))
    assert [write.rows is not None for write in writes] == [False] * 12 + [True] * 8
