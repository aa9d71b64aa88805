"""Rows that an interrupt has left half written: finished before they are used, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speedtransfer as st
from speedtransfer.engines import HostEngine
from speedtransfer.errors import OptimizerError
from speedtransfer.tables import loading


class Interrupted(HostEngine):
    """An engine into whose first writes an interrupt comes, after one plane."""

    def __init__(self, times: int, kind: type[BaseException]) -> None:
        super().__init__()
        self.times, self.kind = times, kind

    def scatter(self, planes: Any, index: Any, rows: Any, *args: Any, **kwargs: Any) -> None:
        if self.times:
            self.times -= 1
            super().scatter(planes[:1], index, rows[:1])
            raise self.kind
        super().scatter(planes, index, rows, *args, **kwargs)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_write_is_finished(times: int, kind: type[BaseException]) -> None:
    table = st.Table(5, 2)
    table.add_plane("state")
    table.engine = Interrupted(times, kind)
    ids, version = torch.tensor([1, 3]), table.version
    with pytest.raises(kind):
        table.write(ids, {"weight": torch.ones(2, 2), "state": torch.full((2, 2), 2.0)})
    if times == 3:
        with pytest.raises(kind):
            table.look_up(ids)
    assert torch.equal(table.look_up(ids), torch.ones(2, 2))
    assert torch.equal(table.gather(ids, "state"), torch.full((2, 2), 2.0))
    assert table.version > version
    assert table.engine == "host"


def test_a_write_that_cannot_be_is_not_tried_for_ever() -> None:
    table = st.Table(5, 2)
    table.engine = Interrupted(2, ValueError)
    with pytest.raises(ValueError, match=r"^$"):
        table.write(torch.tensor([1]), {"weight": torch.ones(1, 2)})
    assert table.look_up(torch.tensor([0])).sum() == 0


def load_half(table: st.Table) -> None:
    def load() -> None:
        with loading({table: "emb.weight"}, "st.load_checkpoint") as changes:
            changes.append(True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load()


def test_rows_loaded_in_part_are_refused_until_they_are_loaded() -> None:
    table = st.Table(5, 2)
    with pytest.raises(KeyboardInterrupt), loading({table: "emb.weight"}, "st.load_checkpoint"):
        raise KeyboardInterrupt
    assert table[0].sum() == 0
    load_half(table)
    uses: list[Any] = [
        lambda: table[0],
        lambda: table.look_up(torch.tensor([0])),
        table.torch,
        table.numpy,
        table.wait,
        lambda: table.scatter([0], torch.ones(1, 2)),
        lambda: table.astype(torch.float64),
    ]
    for use in uses:
        with pytest.raises(
            OptimizerError, match=r"emb.weight has been loaded or written in part only.*st.load_checkpoint"
        ):
            use()
    # Another way to load leaves some of it as it is.
    with loading({table: "emb.weight"}, "load_state_dict"):
        pass
    with pytest.raises(OptimizerError):
        table.wait()
    with pytest.raises(ValueError, match=r"^$"), loading({table: "emb.weight"}, "st.load_checkpoint"):
        raise ValueError
    with pytest.raises(OptimizerError):
        table.wait()
    with loading({table: "emb.weight"}, "st.load_checkpoint"):
        table.scatter([0], torch.ones(1, 2))
    assert table[0].sum() == 2
