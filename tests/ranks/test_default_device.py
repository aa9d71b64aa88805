"""Under another default device of torch, such as ``torch.set_default_device("cuda")``, what is made here is on the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import speedtransfer as st


def trained(options: dict) -> torch.Tensor:
    torch.manual_seed(0)
    ids = torch.tensor([1, 2, 5 + dist.get_rank()])
    more = torch.arange(30)
    # What would be made on the default device has no values.
    with torch.device("meta"):
        emb = st.Embedding(30, 4, padding_idx=2, device="cpu", process_group=dist.group.WORLD, **options)
        opt = torch.optim.AdamW(emb.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            emb(ids).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(emb.parameters(), 1.0)
            opt.step()
        whole = st.full_state_dict(emb)
        assert not whole or not whole["weight"].is_meta
        with torch.no_grad():
            return emb(more)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's own optimizers count their steps on the default device")
@pytest.mark.parametrize(
    "options", [{"idle": "lazy"}, {"idle": "exact"}, {"memory": "shared"}, {"comm_dtype": torch.int8}], ids=str
)
def test_trains(two, options):
    first, second = two(trained, options)
    assert torch.equal(first, second)
    assert first.isfinite().all()
