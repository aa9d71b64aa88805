"""What only some of the processes have rows for, or are part of."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import speedtransfer as st
from ranks.small import DIM, ROWS, ids, rows_of, table


def set_by_one(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    emb = table(kind, idle="exact")
    opt = torch.optim.AdamW(emb.parameters(), lr=0.1)
    for step in range(3):
        opt.zero_grad()
        emb(ids(step)).sum().backward()
        opt.step()
    before = rows_of(emb)
    # Rows of one owner, so that the others have none to write.
    owned: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(owned, emb.table.local_ids().tolist())
    some = torch.tensor(owned[0][:3])
    mine = some if dist.get_rank() == 1 else some[:0]
    emb.table.scatter(mine, torch.ones(len(mine), DIM, dtype=torch.float64))
    before[some] = 1
    return before, rows_of(emb)


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_rows_that_one_process_sets_and_one_owns(three, kind):
    for wanted, found in three(set_by_one, kind):
        assert torch.equal(wanted, found)


def of_others() -> dict:
    # In it the last process is the first.
    last = dist.get_world_size() - 1
    group = dist.new_group([last])
    if dist.get_rank() < last:
        return {}
    return st.full_state_dict(st.Embedding(ROWS, DIM, process_group=group))


def test_all_rows_come_to_the_first_of_the_group(two):
    first, second = two(of_others)
    assert first == {}
    assert second["weight"].shape == (ROWS, DIM)


def float64_in_bfloat16() -> str:
    with pytest.raises(st.errors.InvalidTypeError) as error:
        st.Embedding(ROWS, DIM, dtype=torch.float64, storage_dtype=torch.bfloat16, process_group=dist.group.WORLD)
    return str(error.value)


def test_forms_are_refused_as_in_one_process(two):
    with pytest.raises(st.errors.InvalidTypeError) as error:
        st.Embedding(ROWS, DIM, dtype=torch.float64, storage_dtype=torch.bfloat16)
    assert two(float64_in_bfloat16) == [str(error.value)] * 2
