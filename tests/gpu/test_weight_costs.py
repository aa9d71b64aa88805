"""What ``emb.weight`` costs on a CUDA device: memory there, and waits of the host."""

import gc

import pytest
import torch
from torch import nn

import speedtransfer as st
from gpu.tools import synchronizing
from speedtransfer.errors import InvalidValueError
from speedtransfer.optim.row_gradient import RowGradient


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

    def test_a_step_by_rows_takes_none_for_the_others(self, device):
        emb = st.Embedding(20_000, 64, memory="pinned", device=device, idle="lazy")
        opt = torch.optim.AdamW(emb.parameters())
        ids = torch.tensor([3, 3, 9], device=device)

        def step():
            opt.zero_grad()
            emb(ids).sum().backward()
            nn.utils.clip_grad_norm_(emb.parameters(), 1.0)
            opt.step()

        step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        assert torch.cuda.max_memory_allocated() - before < 1 << 20

    def test_a_table_that_does_not_fit_as_a_whole(self, device, monkeypatch):
        emb = st.Embedding(1000, 64, memory="pinned", device=device)
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1) / total, device)
        try:
            big = st.Embedding(200_000, 64, memory="pinned", device=device)
            with pytest.raises(
                InvalidValueError, match=r"200000 rows do not fit on cuda:0; use the rows that are needed"
            ):
                big.weight.norm()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        assert emb.weight.norm() > 0


class TestWaits:
    """What makes the host wait for the device, in a loop that is warm."""

    @staticmethod
    def waits(memory, device, loop):
        emb = st.Embedding(1000, 16, idle="lazy", memory=memory, device=device)
        head = nn.Linear(16, 16, device=device)
        opt = torch.optim.AdamW([*emb.parameters(), *head.parameters()], lr=0.1)
        scaler = torch.amp.GradScaler(device.type)
        ids = torch.randint(1000, (64, 10)).to(device)
        for _ in range(3):
            loop(emb, head, opt, scaler, ids)
        torch.cuda.synchronize()
        with synchronizing("warn") as found:
            loop(emb, head, opt, scaler, ids)
        return found

    @pytest.mark.parametrize("foreach", [None, True, False])
    @pytest.mark.parametrize("memory", ["pinned", "device"])
    def test_none_more_with_clipping(self, device, memory, foreach):
        def loop(emb, head, opt, scaler, ids):
            opt.zero_grad()
            head(emb(ids)).sum().backward()
            nn.utils.clip_grad_norm_([*emb.parameters(), *head.parameters()], 1.0, foreach=foreach)
            nn.utils.clip_grad_value_([*emb.parameters(), *head.parameters()], 1.0, foreach=foreach)
            opt.step()

        assert len(self.waits(memory, device, loop)) <= 1

    @pytest.mark.parametrize("memory", ["pinned", "device"])
    def test_that_of_a_scaler(self, device, memory):
        """It looks whether a gradient was infinite."""

        def loop(emb, head, opt, scaler, ids):
            opt.zero_grad()
            scaler.scale(head(emb(ids)).sum()).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_([*emb.parameters(), *head.parameters()], 1.0)
            scaler.step(opt)
            scaler.update()

        assert len(self.waits(memory, device, loop)) <= 2

    def test_none_in_what_is_done_with_a_gradient(self, device):
        grad = RowGradient(100, torch.arange(5, device=device), torch.randn(5, 4, device=device))
        factor = torch.tensor(0.5, device=device)
        for mode in ("default", "error"):
            with synchronizing(mode):
                norm = grad.norm()
                grad.mul_(factor)
                grad.div_(factor)
                grad.mul_(0.5)
                grad.clamp_(-1, 1)
                torch._foreach_mul_([grad], factor)
                torch._foreach_norm([grad])
                grad.detach()
                grad.zero_()
        assert norm.device == device
