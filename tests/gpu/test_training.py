"""The drop-in on a CUDA device: every memory trains to the same bits, and as ``nn.Embedding`` does, idle rows apart."""

import copy

import pytest
import torch
from lazy_oracle import LazyOracle, skewed_batches, squared_loss
from optimizer_cases import case_named
from test_training_loops import run
from torch import nn
from training_loops import PROGRAMS

import speedtransfer as st
from gpu.tools import check_same, embedding_in
from speedtransfer.optim import find_handle

MEMORIES = ["pinned", "pageable", "mmap", "device"]
NAMES = ["adamw", "adamw-fused", "adam-foreach", "adamax", "sgd-momentum", "adagrad", "rmsprop-centered", "nadam"]
NUM_ROWS, DIM = 41, 16
TOLERANCE = 1e-5  # sums in another order


def embedding(memory, folder, device, num_rows=NUM_ROWS, dim=DIM, **kwargs):
    return embedding_in(memory, folder, device, num_rows, dim, **{"idle": "lazy", **kwargs})


def dense_embedding(device, num_rows=NUM_ROWS, dim=DIM, **kwargs):
    torch.manual_seed(3)
    return nn.Embedding(num_rows, dim, **kwargs).to(device)


def planes_of(emb, opt):
    """Return weights and state of all rows on the CPU, and what all rows share, by name."""
    state = opt.state.get(emb.weight, {})
    weight = emb.table.torch() if hasattr(emb, "table") else emb.weight.detach()
    return {"": weight.cpu().clone(), **{key: torch.as_tensor(value).cpu().clone() for key, value in state.items()}}


def assert_close(ours, expected, tolerance=TOLERANCE):
    assert set(ours) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def train(module, make, batches, ids_device="cpu", device="cpu"):
    """Return what `planes_of` does after training; ``nn.Embedding`` trains lazily."""
    opt = make(list(module.parameters()))
    loop = opt if hasattr(module, "table") else LazyOracle(opt, module)
    for ids, target in batches:
        loop.zero_grad()
        squared_loss(module(ids.to(ids_device)), target.to(device)).backward()
        loop.step()
    return planes_of(module, opt)


class TestTraining:
    @pytest.mark.parametrize("name", NAMES)
    def test_every_memory_to_the_same_bits_and_as_torch(self, device, tmp_path, name):
        make, batches = case_named(name).make, skewed_batches(NUM_ROWS, DIM, 12)
        results = {
            (memory, where): train(embedding(memory, tmp_path, device), make, batches, where, device)
            for memory in MEMORIES
            for where in ("cpu", device)
        }
        expected = results["device", device]
        for planes in results.values():
            assert set(planes) == set(expected)
            check_same(planes.values(), [expected[key] for key in planes])
        dense = dense_embedding(device)
        assert_close(expected, train(dense, make, batches, device, device))
        never = NUM_ROWS - 1
        assert torch.equal(expected[""][never], dense.weight[never].cpu())

    @pytest.mark.parametrize("name", ["adamw", "adamax"])
    def test_as_on_the_cpu(self, device, tmp_path, name):
        make, batches = case_named(name).make, skewed_batches(NUM_ROWS, DIM, 12)
        on_cpu = train(embedding("pageable", tmp_path, "cpu"), make, batches)
        on_cuda = train(embedding("pinned", tmp_path, device), make, batches, device, device)
        assert_close(on_cuda, on_cpu, 1e-4)

    def test_first_values_are_those_of_torch(self, device, tmp_path):
        expected = dense_embedding("cpu", padding_idx=2).weight.detach()
        for memory in MEMORIES:
            check_same([embedding(memory, tmp_path, device, padding_idx=2).table.torch()], [expected])

    @pytest.mark.parametrize("memory", ["pinned", "device"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_other_dtypes(self, device, tmp_path, memory, dtype):
        make = lambda params: torch.optim.Adam(params, lr=0.05, eps=1e-4)  # noqa: E731
        batches = skewed_batches(NUM_ROWS, 64, 6, dtype=dtype)
        ours = train(embedding(memory, tmp_path, device, dim=64, dtype=dtype), make, batches, device, device)
        expected = train(dense_embedding(device, dim=64, dtype=dtype), make, batches, device, device)
        assert_close(ours, expected, 1e-9 if dtype == torch.float64 else 0.05)

    def test_a_large_batch_of_few_rows(self, device, tmp_path):
        """Gradients of thousands of ids a row: another kernel of torch's backward, and one of ours in every lane."""
        emb, dense = embedding("pinned", tmp_path, device, 5000, 48), dense_embedding(device, 5000, 48)
        ids = torch.randint(5000, (64, 1000), generator=torch.Generator().manual_seed(0)) % 777 * 6
        weight = torch.randn(48, generator=torch.Generator().manual_seed(1)).to(device)
        for module in (emb, dense):
            (module(ids.to(device)) * weight).sum().backward()
        find_handle(emb.weight).pending.trim()
        assert torch.equal(find_handle(emb.weight).pending.ids.cpu(), ids.unique())
        assert emb.weight.grad.shape == (5000, 48)
        torch.testing.assert_close(emb.weight.grad.to_dense(), dense.weight.grad, rtol=1e-4, atol=1e-3)


class TestForward:
    IDS = [
        torch.tensor([3, 3, 0, 11, 7]),
        torch.arange(12).view(2, 3, 2) % 5,
        torch.tensor(4),
        torch.empty(3, 0, dtype=torch.int64),
        torch.tensor([[2], [9]]).expand(2, 4),
        torch.tensor([5, 5, 1], dtype=torch.int32),
    ]

    @pytest.mark.parametrize("memory", MEMORIES)
    @pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
    @pytest.mark.parametrize(
        "options", [{}, {"padding_idx": 3}, {"max_norm": 1.2}, {"scale_grad_by_freq": True}], ids=str
    )
    def test_output_gradient_and_table(self, device, tmp_path, memory, mode, options):
        for where in ("cpu", device):
            for ids in self.IDS:
                ours = embedding(memory, tmp_path, device, 12, 5, **options)
                dense = dense_embedding("cpu", 12, 5, **options)
                ours.train(mode == "train")
                with torch.set_grad_enabled(mode != "no_grad"):
                    out, expected = ours(ids.to(where)), dense(ids)
                assert out.device == device
                torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(ours.table.torch().cpu(), dense.weight.detach(), rtol=1e-6, atol=1e-6)
                if mode == "no_grad":
                    continue
                weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
                (out * weight.to(device)).sum().backward()
                (expected * weight).sum().backward()
                assert ours.weight.grad.device == device
                torch.testing.assert_close(ours.weight.grad.cpu().to_dense(), dense.weight.grad, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("memory", MEMORIES)
    @pytest.mark.parametrize("mode", ["sum", "mean", "max"])
    @pytest.mark.parametrize("padding_idx", [None, 3])
    def test_bags(self, device, tmp_path, memory, mode, padding_idx):
        flat = torch.tensor([3, 1, 3, 0, 11, 7, 3, 1])
        inputs = [
            (torch.tensor([[3, 1, 3], [0, 11, 7]]),),
            (flat, torch.tensor([0, 3, 5])),
            (flat, torch.tensor([0, 0, 3, 3, 8])),
            (flat.int(), torch.tensor([0, 2], dtype=torch.int32)),
        ]
        if mode == "sum":
            inputs.append((flat, torch.tensor([0, 3, 5]), torch.arange(8.0)))
        for place, arguments in enumerate(inputs):
            kwargs = {"path": tmp_path / f"bag{place}.npy"} if memory == "mmap" else {}
            torch.manual_seed(2)
            ours = st.EmbeddingBag(12, 5, mode=mode, padding_idx=padding_idx, memory=memory, device=device, **kwargs)
            torch.manual_seed(2)
            dense = nn.EmbeddingBag(12, 5, mode=mode, padding_idx=padding_idx)
            out, expected = ours(*(argument.to(device) for argument in arguments)), dense(*arguments)
            torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
            opt, oracle = torch.optim.AdamW([ours.weight], lr=0.1), torch.optim.AdamW([dense.weight], lr=0.1)
            lazy = LazyOracle(oracle, dense)
            lazy.zero_grad()
            out, expected = ours(*(argument.to(device) for argument in arguments)), dense(*arguments)
            out.square().sum().backward()
            expected.square().sum().backward()
            opt.step()
            lazy.step()
            touched = arguments[0].flatten().unique().long()  # one that is only padding is active, with no gradient
            torch.testing.assert_close(
                ours.table.torch().cpu()[touched], dense.weight.detach()[touched], rtol=1e-5, atol=1e-5
            )


class TestLoops:
    @pytest.mark.sweep
    @pytest.mark.parametrize("memory", MEMORIES)
    # Where a kernel makes the step, one that torch has ended with an error has not been counted.
    @pytest.mark.parametrize("program", [program for program in PROGRAMS if "fail()" not in program.code], ids=str)
    def test_as_on_the_host(self, device, tmp_path, program, memory):
        make = case_named("adamw").make
        emb, dense = embedding(memory, tmp_path, device), dense_embedding(device)
        opt, oracle = make([emb.weight]), LazyOracle(make([dense.weight]), dense)
        batches = [(ids.to(device), target.to(device)) for ids, target in skewed_batches(NUM_ROWS, DIM, 24)]
        seen = run(program, emb, opt, batches), run(program, dense, oracle.optimizer, batches, oracle)
        torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)
        assert_close(planes_of(emb, opt), planes_of(dense, oracle.optimizer))

    def test_a_whole_model_under_autocast_with_a_scaler(self, device, tmp_path):
        """Steps with an infinite gradient are skipped, and count for nothing."""
        results = []
        for memory in [*MEMORIES, "dense"]:
            emb = dense_embedding(device) if memory == "dense" else embedding(memory, tmp_path, device)
            torch.manual_seed(4)
            head = nn.Linear(DIM, DIM).to(device)
            opt = torch.optim.AdamW([emb.weight, *head.parameters()], lr=0.01)
            oracle = LazyOracle(opt, emb) if memory == "dense" else opt
            scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=5)
            for step, (ids, target) in enumerate(skewed_batches(NUM_ROWS, DIM, 12)):
                oracle.zero_grad()
                with torch.autocast(device.type, dtype=torch.float16):
                    out = head(emb(ids.to(device)))
                loss = squared_loss(out.float(), target.to(device)) * (float("inf") if step in (0, 4, 5) else 1.0)
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_([emb.weight, *head.parameters()], 5.0)
                if memory == "dense":
                    oracle.step(lambda scaler=scaler, opt=opt: scaler.step(opt))
                else:
                    scaler.step(opt)
                scaler.update()
            assert scaler.get_scale() < 1024.0
            results.append(planes_of(emb, opt))
            assert float(results[-1]["step"]) == 9
        for planes in results[1:-1]:
            check_same(planes.values(), [results[0][name] for name in planes])
        assert_close(results[0], results[-1], 1e-3)

    @pytest.mark.parametrize("memory", ["pinned", "device"])
    def test_a_fused_optimizer_with_a_scaler(self, device, tmp_path, memory):
        """It skips on the device: nobody asks the host."""
        emb = embedding(memory, tmp_path, device)
        opt = torch.optim.AdamW(emb.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler(device.type, init_scale=64.0)
        for step in range(4):
            before = emb.table.torch().cpu().clone()
            opt.zero_grad()
            scaler.scale(
                emb(torch.tensor([1, 5], device=device)).sum() * (float("inf") if step in (0, 2) else 1)
            ).backward()
            scaler.step(opt)
            scaler.update()
            assert torch.equal(emb.table.torch().cpu(), before) == (step in (0, 2))
        assert float(opt.state[emb.weight]["step"]) == 2

    @pytest.mark.parametrize("memory", ["pinned", "pageable", "mmap"])
    def test_to_the_cpu_and_back(self, device, tmp_path, memory):
        """The rows stay where they are, their state with them."""
        emb, batches = embedding(memory, tmp_path, device), skewed_batches(NUM_ROWS, DIM, 9)
        expected = train(embedding("pageable", tmp_path, "cpu"), case_named("adamw").make, batches)
        opt = case_named("adamw").make([emb.weight])
        pointer = emb.table.torch().data_ptr()
        for step, (ids, target) in enumerate(batches):
            where = ("cpu", device)[step // 3 % 2 == 0]
            emb.to(where)
            assert emb.table.device == torch.device(where)
            opt.zero_grad()
            squared_loss(emb(ids.to(where)), target.to(where)).backward()
            opt.step()
        assert emb.table.torch().data_ptr() == pointer
        assert_close(planes_of(emb, opt), expected, 1e-4)

    def test_device_memory_to_the_cpu_and_back(self, device, tmp_path):
        emb = embedding("device", tmp_path, device)
        before = emb.table.torch().clone()
        emb.cpu()
        assert emb.table.torch().device.type == "cpu"
        assert emb(torch.tensor([3])).device.type == "cpu"
        emb.to(device)
        check_same([emb.table.torch()], [before])

    @pytest.mark.parametrize("memory", MEMORIES)
    def test_checkpoints_go_both_ways(self, device, tmp_path, memory):
        make, batches = case_named("adamw").make, skewed_batches(NUM_ROWS, DIM, 8)
        emb, dense = embedding(memory, tmp_path, device), dense_embedding(device)
        opt, oracle = make([emb.weight]), LazyOracle(make([dense.weight]), dense)

        def step(ids, target):
            for optimizer, module in ((opt, emb), (oracle, dense)):
                optimizer.zero_grad()
                squared_loss(module(ids.to(device)), target.to(device)).backward()
                optimizer.step()

        for batch in batches[:3]:
            step(*batch)
        saved = copy.deepcopy((dense.state_dict(), oracle.optimizer.state_dict()))
        for batch in batches[3:5]:
            step(*batch)
        emb.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        for ids, target in batches[3:]:
            opt.zero_grad()
            squared_loss(emb(ids.to(device)), target.to(device)).backward()
            opt.step()
        for ids, target in batches[5:]:
            oracle.zero_grad()
            squared_loss(dense(ids.to(device)), target.to(device)).backward()
            oracle.step()
        assert_close(planes_of(emb, opt), planes_of(dense, oracle.optimizer))
        dense.load_state_dict(emb.state_dict())
        oracle.optimizer.load_state_dict(opt.state_dict())
        assert_close(planes_of(dense, oracle.optimizer), planes_of(emb, opt), 0.0)

    def test_one_model_of_every_memory_on_two_streams(self, device, tmp_path):
        """Forward and backward on a stream of their own, the step on the default one, as some loops have it."""
        embs = [embedding(memory, tmp_path, device) for memory in MEMORIES]
        opt = torch.optim.AdamW([emb.weight for emb in embs], lr=0.05)
        side = torch.cuda.Stream()
        for ids, target in skewed_batches(NUM_ROWS, DIM, 8):
            opt.zero_grad()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for emb in embs:
                    squared_loss(emb(ids.to(device)), target.to(device)).backward()
            torch.cuda.current_stream().wait_stream(side)
            opt.step()
        first = planes_of(embs[0], opt)
        for emb in embs[1:]:
            check_same(planes_of(emb, opt).values(), list(first.values()))


def test_autograd_grad(device, tmp_path):
    """Ids repeat: what pads the unique rows is in no gradient."""
    ids = torch.tensor([3, 5, 3, NUM_ROWS - 1], device=device)
    found = []
    for module in (embedding("pinned", tmp_path, device), dense_embedding(device)):
        rows = module(ids)
        found.append(torch.autograd.grad(rows.pow(2).sum(), module.weight)[0].cpu())
    torch.testing.assert_close(*found)


class TestPadding:
    """What the host does not know of a batch must not show."""

    def pair(self, device, module=st.Embedding, **options):
        torch.manual_seed(3)
        ours = module(10, 4, memory="pinned", device=device, idle="lazy", **options)
        dense = getattr(nn, module.__name__)(10, 4, **options).to(device)
        with torch.no_grad():
            dense.weight.copy_(ours.weight)
        return ours, dense

    def test_functional_bags_of_the_weight(self, device):
        ours, dense = self.pair(device)
        ids, offsets = torch.tensor([1, 3, 2, 3, 3, 5], device=device), torch.tensor([0, 3], device=device)
        outs = [
            torch.nn.functional.embedding_bag(ids, module.weight, offsets, mode="sum", padding_idx=3)
            for module in (ours, dense)
        ]
        torch.testing.assert_close(*outs)
        for out in outs:
            out.sum().backward()
        torch.testing.assert_close(ours.weight.grad.to_dense(), dense.weight.grad)

    def test_moved_between_backward_and_step(self, device):
        ours, dense = self.pair(device)
        for module in (ours, dense):
            module(torch.tensor([1, 1, 2], device=device)).sum().backward()
            module.cpu()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        torch.testing.assert_close(ours.weight.grad.to_dense(), dense.weight.grad)
        torch.testing.assert_close(ours.weight.detach(), dense.weight.detach())

    def test_the_gradient_of_a_gradient(self, device):
        ids = torch.tensor([1, 1, 2, 7], device=device)
        for options in ({}, {"padding_idx": 2}, {"scale_grad_by_freq": True}):
            pair = self.pair(device, **options)
            for module in pair:
                (grad,) = torch.autograd.grad(module(ids).tanh().sum(), module.weight, create_graph=True)
                (grad**2).sum().backward()
            torch.testing.assert_close(pair[0].weight.grad.to_dense(), pair[1].weight.grad)

    def test_an_old_gradient_that_is_read_does_not_become_the_new_one(self, device):
        ours, _ = self.pair(device)
        ours(torch.tensor([1, 1, 2], device=device)).sum().backward()
        old, ours.weight.grad = ours.weight.grad, None
        ours(torch.tensor([5, 6, 6], device=device)).sum().backward()
        repr(old)
        assert ours.weight.grad.to_dense()[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 2, 0, 0, 0]
