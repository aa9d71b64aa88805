"""``emb.weight`` on a CUDA device reads and writes as that of ``nn.Embedding``; what it costs of memory, and waits."""

import gc
import re
from dataclasses import replace

import pytest
import torch
from test_weight import CASES, compare
from torch import nn
from torch.optim.swa_utils import AveragedModel
from weight_world import EXACT, LAZY

import speedtransfer as st
from gpu.tools import synchronizing
from speedtransfer.errors import InvalidValueError

# torch warns once a process that it does not check what sparse tensors hold.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
# Statements with NumPy, which has no view of a device, functions of the CPU, sparse tensors, and a state dict, which has rows
# where they are stored.
OTHERS = re.compile(
    r"numpy\(|np\.|apply_|share_memory_|dlpack|graph|to_sparse|opt.state\[emb|[^n]emb\.state_dict\(\)\[|state_dict\(\)\.items"
)
PARTS = {name: [part for part in case.parts if not OTHERS.search(f" {part}")] for name, case in CASES.items()}
KINDS = [
    replace(
        kind,
        name=f"{kind} {memory}",
        table={**kind.table, "device": "cuda", "memory": memory},
        copies=memory != "device",
    )
    for kind, memory in ((EXACT, "pinned"), (LAZY, "device"), (EXACT, "pageable"))
]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", [name for name, parts in PARTS.items() if parts])
def test_as_torch(kind, name):
    """What people do with it on the host, with all tensors on the device."""
    if name == "swap-Add_a_parameter_group" and kind.optimizer is torch.optim.Adagrad and torch.__version__ < "2.13":
        pytest.skip("Adagrad of this torch makes no state for a group that is added")
    case = replace(CASES[name], code="\n".join(PARTS[name]))
    moment = "trained" if case.group in ("swap", "train") else "between"
    compare(case, kind, torch.float64, moment, True)


class TestMemory:
    def test_construction_of_adagrad_takes_none_on_the_device(self, device):
        """Neither does the first step, which fills its plane of state in chunks."""
        emb = st.Embedding(500_000, 64, memory="pinned", device=device)
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        opt = torch.optim.Adagrad(emb.parameters(), lr=0.1, initial_accumulator_value=0.5)
        assert torch.cuda.memory_allocated() - before < 1 << 16
        torch.cuda.reset_peak_memory_stats()
        emb(torch.tensor([3, 3, 9], device=device)).sum().backward()
        opt.step()
        assert torch.cuda.max_memory_allocated() - before < emb.weight.nbytes / 2
        sums = opt.state_dict()["state"][0]["sum"]
        assert sums[[0, 3, 9], 0].tolist() == [0.5, 4.5, 1.5]

    def test_a_table_that_does_not_fit_as_a_whole(self, device, monkeypatch):
        emb = st.Embedding(1000, 64, memory="pinned", device=device)
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 160e6) / total, device)
        try:
            big = st.Embedding(1_000_000, 64, memory="pinned", device=device)
            with pytest.raises(InvalidValueError, match=r"1000000 rows do not fit on cuda:0; use the rows that are"):
                big.weight.norm()
            with torch.no_grad():
                nn.init.trunc_normal_(nn.init.normal_(big.weight, std=3), std=0.5)
                nn.init.xavier_uniform_(big.weight[7:8]).zero_()
                big.weight.mul_(2)
                average = AveragedModel(big)
                average.update_parameters(big)
                torch._foreach_lerp_([average.module.weight], [big.weight], 0.5)
            on_host = big.weight.detach().cpu()
            torch.testing.assert_close(on_host, average.module.table.torch())
            assert 0.9 < on_host.std() < 1.1
            assert not on_host[7].any()
            assert str(big.weight).count("\n") == 8
            big(torch.tensor([3, 3, 9], device=device)).sum().backward()
            assert torch.isfinite(big.weight.grad).all()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        assert emb.weight.norm() > 0


@pytest.mark.parametrize("memory", ["pinned", "device"])
def test_a_step_with_clipping_waits_once_at_most(device, memory):
    emb = st.Embedding(1000, 16, idle="lazy", memory=memory, device=device)
    opt = torch.optim.AdamW(emb.parameters(), lr=0.1)
    ids = torch.randint(1000, (64, 10)).to(device)
    for mode in ("default", "default", "default", "warn"):
        torch.cuda.synchronize()
        with synchronizing(mode) as found:
            opt.zero_grad()
            emb(ids).sum().backward()
            nn.utils.clip_grad_norm_(emb.parameters(), 1.0)
            nn.utils.clip_grad_value_(emb.parameters(), 1.0)
            opt.step()
    assert len(found) <= 1
