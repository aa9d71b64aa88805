"""Training by all of ``emb.weight`` on a CUDA device equals that of ``nn.Embedding``, in every form and across devices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import speedtransfer as st
from gpu.weight_pairs import DIM, MEMORIES, ROWS, pair, pair_of, rows_of, stored, tolerance  # noqa: F401 - fixtures
from speedtransfer.nn.weight import TableWeight

USES = {
    "penalty and rows": lambda module, ids: module(ids).square().sum() + 0.1 * module.weight.square().sum(),
    "tied head": lambda module, ids: F.cross_entropy(module(ids) @ module.weight.T, ids),
    "rows by an index": lambda module, ids: module.weight[ids].square().sum(),
    "a slice": lambda module, ids: module.weight[2:9].square().sum(),
}


class TestGradients:
    @pytest.mark.parametrize("name", USES)
    def test_of_rows_in_every_form(self, pair, device, name):
        emb, dense = pair
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in pair]
        ids = torch.tensor([3, 3, 0, 49], device=device)
        for module, optimizer in zip(pair, optimizers, strict=True):
            USES[name](module, ids).backward()
            optimizer.step()
        torch.testing.assert_close(emb.weight.grad.to_dense(), dense.weight.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            rows_of(emb), dense.weight.detach().cpu(), rtol=1e-5, atol=tolerance(emb, 1.0), msg=lambda m: f"{name}: {m}"
        )

    @pytest.mark.parametrize("foreach", [None, True, False])
    def test_clipping(self, device, tmp_path, foreach):
        pair = pair_of("pinned", None, device, tmp_path)
        optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in pair]
        ids = torch.tensor([7, 7, 2], device=device)
        for _ in range(3):
            norms = []
            for module, optimizer in zip(pair, optimizers, strict=True):
                optimizer.zero_grad()
                module(ids).square().sum().backward()
                norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.5, foreach=foreach))
                optimizer.step()
            torch.testing.assert_close(norms[0], norms[1])
        torch.testing.assert_close(rows_of(pair[0]), rows_of(pair[1]), rtol=1e-5, atol=1e-5)

    def test_of_a_host_index_and_one_there_together(self, device, tmp_path):
        emb, dense = pair_of("pinned", None, device, tmp_path)
        for module in (emb, dense):
            module(torch.tensor([1, 2], device=device)).sum().backward()
        emb(torch.tensor([2, 9])).sum().backward()
        dense(torch.tensor([2, 9], device=device)).sum().backward()
        torch.testing.assert_close(emb.weight.grad.to_dense(), dense.weight.grad)


class TestModels:
    @pytest.mark.parametrize("options", [{}, {"memory": "device"}, {"storage_dtype": torch.bfloat16}], ids=str)
    def test_replaced_once_on_the_device(self, device, options):
        models = []
        for replaced in (True, False):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, ROWS)).to(device)
            model[2].weight = model[0].weight
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            weight = model[0].weight
            if replaced:
                assert st.replace_embeddings(model, min_rows=1, **options) == ["0"]
                assert model[0].weight is weight is model[2].weight is opt.param_groups[0]["params"][0]
                assert isinstance(weight, TableWeight)
                assert model[0].table.memory == options.get("memory", "pinned")
                assert model[0].table.device == weight.device == device
            for step in range(3):
                ids = (torch.arange(6, device=device) * 7 + step) % ROWS
                opt.zero_grad()
                F.cross_entropy(model(ids), ids).backward()
                opt.step()
            models.append(model)
        atol = tolerance(models[0][0], 0.1) if options.get("storage_dtype") else 1e-5
        torch.testing.assert_close(rows_of(models[0][0]), rows_of(models[1][0]), rtol=1e-5, atol=atol)

    @pytest.mark.parametrize("memory", ["auto", "pageable", "device"])
    def test_there_and_back(self, device, memory):
        """A model made on the host, moved in the midst of training, and back: its weight stays the same object."""
        results = []
        for make in (lambda *size: st.Embedding(*size, memory=memory, idle="exact", device="cpu"), nn.Embedding):
            torch.manual_seed(1)
            emb = make(ROWS, DIM)
            weight, opt = emb.weight, torch.optim.SGD(emb.parameters(), lr=0.1)
            for step, move in enumerate(("cpu", device, device, "cpu", "cpu")):
                ids = (torch.arange(6) * 7 + step) % ROWS
                opt.zero_grad()
                (emb(ids.to(weight.device)).square().sum() + emb.weight.square().sum()).backward()
                emb.to(move)
                assert emb.weight is weight
                assert weight.device == weight.data.device == weight.grad.device == torch.device(move)
                opt.step()
            results.append(rows_of(emb))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)

    def test_a_gradient_of_another_device_or_dtype(self, pair, device):
        for module in pair:
            with pytest.raises((TypeError, RuntimeError)):
                module.weight.grad = torch.zeros(ROWS, DIM)
            with pytest.raises((TypeError, RuntimeError)):
                module.weight.grad = torch.zeros(ROWS, DIM, device=device, dtype=torch.float64)
