"""``emb.weight`` on a CUDA device: the whole table, wherever its rows live, as the weight of ``nn.Embedding`` there."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import speedtransfer as st
from gpu.tools import hold, synchronizing
from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.weight import TableWeight
from speedtransfer.optim.row_gradient import RowGradient

ROWS, DIM = 50, 8
MEMORIES = ["pinned", "pageable", "mmap", "device"]
STORED = [
    *((memory, None) for memory in MEMORIES),
    *((memory, dtype) for dtype in (torch.bfloat16, torch.int8) for memory in ("pinned", "device")),
]


@pytest.fixture(params=STORED, ids=lambda stored: f"{stored[0]}-{stored[1] or 'float32'}".replace("torch.", ""))
def stored(request):
    """A memory, and the form in which rows are stored there."""
    return request.param


@pytest.fixture
def pair(stored, device, tmp_path):
    """An embedding with a table, and ``nn.Embedding`` with the same rows."""
    return pair_of(*stored, device, tmp_path, idle="lazy")


def embedding(memory, dtype, device, folder, rows=ROWS, dim=DIM, **options):
    if memory == "mmap":
        options["path"] = folder / f"rows{len(list(folder.iterdir()))}.npy"
    torch.manual_seed(3)
    return st.Embedding(rows, dim, memory=memory, storage_dtype=dtype, device=device, **options)


def dense_of(emb):
    return nn.Embedding.from_pretrained(rows_of(emb).to(emb.weight.device), freeze=False)


def pair_of(memory, dtype, device, folder, **options):
    emb = embedding(memory, dtype, device, folder, **options)
    return emb, dense_of(emb)


def rows_of(emb):
    """Return all rows on the CPU, not by way of the weight."""
    return emb.state_dict()["weight"].detach().cpu().float().clone()


def tolerance(emb, update=0.0):
    """Return how far a value may be off once `update` at most was added to it and it was stored."""
    dtype = emb._handle.rows.storage_dtype if isinstance(emb, st.Embedding) else None
    steps = {None: 1e-6, torch.bfloat16: 2.0**-7, torch.int8: 2.0 / 127}
    return steps[dtype] * (float(rows_of(emb).abs().max()) + update)


def check_rows(emb, dense):
    torch.testing.assert_close(rows_of(emb), dense.weight.detach().cpu(), rtol=1e-5, atol=tolerance(emb))


READS = {
    "norm": lambda w: w.norm(),
    "norms of rows": lambda w: torch.linalg.norm(w, dim=1),
    "a row": lambda w: w[3],
    "a value": lambda w: w[3, 2],
    "some rows": lambda w: w[2:9],
    "every other column": lambda w: w[:, ::2],
    "rows by an index there": lambda w: w[torch.tensor([4, 0, -1, 4], device=w.device)],
    "rows by an index of the host": lambda w: w[torch.tensor([4, 0, -1])],
    "rows by a list": lambda w: w[[3, 30]],
    "rows by a mask": lambda w: w[w.detach()[:, 0] > 0],
    "index_select": lambda w: w.index_select(0, torch.tensor([1, 1, 7], device=w.device)),
    "all scores": lambda w: torch.ones(3, DIM, device=w.device) @ w.T,
    "linear": lambda w: F.linear(torch.ones(3, DIM, device=w.device), w),
    "embedding": lambda w: F.embedding(torch.tensor([[1, 2], [2, 2]], device=w.device), w),
    "embedding_bag": lambda w: F.embedding_bag(torch.tensor([[1, 2], [2, 2]], device=w.device), w, mode="sum"),
    "cat": lambda w: torch.cat([w, w * 2]),
    "double": lambda w: w.double(),
    "a copy": lambda w: w.detach().clone(),
}


class TestReads:
    @pytest.mark.parametrize("name", READS)
    def test_values(self, pair, device, name):
        emb, dense = pair
        found, expected = (READS[name](module.weight) for module in (emb, dense))
        assert (found.device, found.dtype, found.shape) == (expected.device, expected.dtype, expected.shape)
        assert found.requires_grad == expected.requires_grad
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=1e-5)

    def test_what_it_tells_of_itself(self, pair, device):
        emb, dense = pair
        weight, other = emb.weight, dense.weight
        assert weight.device == device
        assert isinstance(weight, nn.Parameter)
        for ask in ("shape", "dtype", "is_cuda", "is_leaf", "requires_grad", "nbytes"):
            assert getattr(weight, ask) == getattr(other, ask), ask
        assert (weight.stride(), weight.is_contiguous(), weight.numel()) == ((DIM, 1), True, ROWS * DIM)
        assert weight.to(device) is weight
        assert weight.cuda() is weight
        assert weight.cpu().device.type == "cpu"

    def test_after_a_step_that_is_on_its_way(self, pair, device):
        """A read waits for rows that the step before has still to write."""
        emb, _ = pair
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in pair]
        side, ids = torch.cuda.Stream(), torch.tensor([1, 4, 4], device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            hold(side, 20)
            for module, optimizer in zip(pair, optimizers, strict=True):
                module(ids).sum().backward()
                optimizer.step()
            found, expected = (module.weight.detach().clone() for module in pair)
        side.synchronize()
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance(emb, 1.0))


USES = {
    "penalty": lambda module, ids: module.weight.pow(2).sum(),
    "penalty and rows": lambda module, ids: module(ids).square().sum() + 0.1 * module.weight.square().sum(),
    "tied head": lambda module, ids: F.cross_entropy(module(ids) @ module.weight.T, ids),
    "linear": lambda module, ids: F.linear(torch.ones(2, DIM, device=ids.device), module.weight).square().sum(),
    "rows by an index": lambda module, ids: module.weight[ids].square().sum(),
    "a slice": lambda module, ids: module.weight[2:9].square().sum(),
    "embedding": lambda module, ids: F.embedding(ids, module.weight).square().sum(),
}


class TestGradients:
    @pytest.mark.parametrize("name", USES)
    @pytest.mark.parametrize("memory", MEMORIES)
    @pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
    def test_steps_equal_those_of_torch(self, device, tmp_path, memory, name, make):
        emb, dense = pair_of(memory, None, device, tmp_path)
        optimizers = [make(module.parameters(), lr=0.05) for module in (emb, dense)]
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            ids = torch.randint(ROWS, (6,), generator=generator).to(device)
            for module, optimizer in zip((emb, dense), optimizers, strict=True):
                optimizer.zero_grad()
                USES[name](module, ids).backward()
            assert (emb.weight.grad.shape, emb.weight.grad.device) == (dense.weight.shape, device)
            torch.testing.assert_close(emb.weight.grad.to_dense(), dense.weight.grad, rtol=1e-5, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(rows_of(emb), dense.weight.detach().cpu(), rtol=1e-5, atol=2e-5)

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

    @pytest.mark.parametrize("memory", MEMORIES)
    def test_stays_until_zero_grad(self, device, tmp_path, memory):
        emb = embedding(memory, None, device, tmp_path)
        opt = torch.optim.AdamW(emb.parameters())
        emb(torch.tensor([1, 5], device=device)).sum().backward()
        before = emb.weight.grad.to_dense()
        opt.step()
        assert torch.equal(emb.weight.grad.to_dense(), before)
        assert (before.device, before.sum().item()) == (device, 2.0 * DIM)
        opt.zero_grad()
        assert emb.weight.grad is None

    @pytest.mark.parametrize("foreach", [None, True, False])
    @pytest.mark.parametrize("memory", MEMORIES)
    def test_clipping(self, device, tmp_path, memory, foreach):
        pair = pair_of(memory, None, device, tmp_path)
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

    @pytest.mark.parametrize("memory", MEMORIES)
    def test_a_scaler(self, device, tmp_path, memory):
        """A step with an infinite gradient is skipped, also where the weight is used as a whole."""
        pair = pair_of(memory, None, device, tmp_path)
        ids = torch.tensor([7, 7, 2], device=device)
        for module in pair:
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler(device.type, init_scale=128.0)
            for step in range(5):
                optimizer.zero_grad()
                loss = module(ids).square().sum() + (0.1 * module.weight.square().sum() if step % 2 else 0)
                scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_value_(module.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 64.0
        torch.testing.assert_close(rows_of(pair[0]), rows_of(pair[1]), rtol=1e-5, atol=2e-5)

    def test_of_a_host_index_and_one_there_together(self, device, tmp_path):
        emb, dense = pair_of("pinned", None, device, tmp_path)
        for module in (emb, dense):
            module(torch.tensor([1, 2], device=device)).sum().backward()
        emb(torch.tensor([2, 9])).sum().backward()
        dense(torch.tensor([2, 9], device=device)).sum().backward()
        torch.testing.assert_close(emb.weight.grad.to_dense(), dense.weight.grad)


WRITES = {
    "init.uniform_": lambda m: (torch.manual_seed(0), nn.init.uniform_(m.weight, -0.1, 0.1)),
    "init.xavier_normal_": lambda m: (torch.manual_seed(0), nn.init.xavier_normal_(m.weight)),
    "init.zeros_ of data": lambda m: nn.init.zeros_(m.weight.data),
    "data.uniform_": lambda m: (torch.manual_seed(0), m.weight.data.uniform_(-1, 1)),
    "data.mul_": lambda m: m.weight.data.mul_(0.5),
    "a row of data": lambda m: m.weight.data.__setitem__(7, 0.25),
    "rows of data by an index": lambda m: m.weight.data.__setitem__(
        torch.tensor([1, 4], device=m.weight.device), torch.ones(2, DIM, device=m.weight.device)
    ),
    "a row of data in place": lambda m: m.weight.data[3].zero_(),
    "a part of a row of data": lambda m: m.weight.data[3][2:4].fill_(0.5),
    "a slice of data from the host": lambda m: m.weight.data[2:5].copy_(torch.ones(3, DIM)),
    "data from the host": lambda m: m.weight.data.copy_(torch.arange(ROWS * DIM).view(ROWS, DIM) / 400),
    "data assigned": lambda m: setattr(m.weight, "data", torch.ones(ROWS, DIM, device=m.weight.device) / 2),
    "data of itself": lambda m: setattr(m.weight, "data", m.weight.data * 2),
    "data normalized": lambda m: setattr(m.weight, "data", F.normalize(m.weight.data, dim=1)),
    "without gradients": lambda m: no_grad(lambda: m.weight.mul_(0.9)),
    "without gradients, a row": lambda m: no_grad(lambda: m.weight.__setitem__(7, 1.0)),
    "without gradients, a view": lambda m: no_grad(lambda: m.weight[2:4].fill_(0.125)),
    "detached": lambda m: m.weight.detach()[:, 1].zero_(),
    "renorm_": lambda m: m.weight.data.renorm_(2, 0, 1.0),
}


def no_grad(function):
    with torch.no_grad():
        return function()


class TestWrites:
    @pytest.mark.parametrize("name", WRITES)
    def test_rows(self, pair, device, name):
        for module in pair:
            WRITES[name](module)
        check_rows(*pair)
        emb, dense = pair
        ids = torch.arange(ROWS, device=device)
        torch.testing.assert_close(emb(ids), dense(ids), rtol=1e-5, atol=tolerance(emb))

    @pytest.mark.parametrize("name", WRITES)
    @pytest.mark.parametrize("memory", MEMORIES)
    def test_between_backward_and_step(self, device, tmp_path, memory, name):
        pair = pair_of(memory, None, device, tmp_path)
        optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in pair]
        ids = torch.tensor([3, 7, 7], device=device)
        for step in range(3):
            for module, optimizer in zip(pair, optimizers, strict=True):
                optimizer.zero_grad()
                module(ids + step).square().sum().backward()
                if step == 1:
                    WRITES[name](module)
                optimizer.step()
        torch.testing.assert_close(rows_of(pair[0]), rows_of(pair[1]), rtol=1e-5, atol=2e-5)

    def test_a_write_is_seen_on_another_stream_once_waited_for(self, pair, device):
        emb, _ = pair
        side = torch.cuda.Stream()
        ids = torch.arange(ROWS, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            hold(side, 20)
            emb.weight.data.fill_(0.5)
        torch.cuda.current_stream().wait_stream(side)
        torch.testing.assert_close(emb(ids), torch.full((ROWS, DIM), 0.5, device=device), rtol=0, atol=1e-3)


class TestModels:
    @pytest.mark.parametrize("memory", ["pinned", "pageable", "device"])
    def test_a_tied_head(self, device, memory):
        class Tied(nn.Module):
            def __init__(self, make):
                super().__init__()
                torch.manual_seed(1)
                self.emb, self.head = make(ROWS, DIM).to(device), nn.Linear(DIM, ROWS, bias=False).to(device)
                self.head.weight = self.emb.weight

            def forward(self, ids):
                return self.head(self.emb(ids))

        models = [Tied(lambda *size: st.Embedding(*size, memory=memory, device=device)), Tied(nn.Embedding)]
        assert models[0].head.weight is models[0].emb.weight
        for model in models:
            opt = torch.optim.AdamW(model.parameters(), lr=0.05)
            for step in range(4):
                ids = (torch.arange(6, device=device) * 7 + step) % ROWS
                opt.zero_grad()
                F.cross_entropy(model(ids), ids).backward()
                opt.step()
        torch.testing.assert_close(rows_of(models[0].emb), rows_of(models[1].emb), rtol=1e-5, atol=1e-5)

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

    def test_a_weight_assigned(self, pair, device):
        emb, dense = pair
        values = torch.linspace(-1, 1, ROWS * DIM, device=device).view(ROWS, DIM)
        for module in pair:
            param = nn.Parameter(values.clone())
            module.weight = param
            assert module.weight is param
        check_rows(emb, dense)


class TestMemory:
    def test_construction_of_adagrad_takes_none_on_the_device(self, device):
        """Neither does the first step, which fills its plane of state in chunks."""
        emb = st.Embedding(200_000, 64, memory="pinned", device=device)
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
        free = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1) / free, device)
        try:
            torch.cuda.empty_cache()
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

    @pytest.mark.parametrize("memory", ["pinned", "device"])
    def test_one_in_a_step_for_the_number_of_rows(self, device, memory):
        def loop(emb, head, opt, scaler, ids):
            opt.zero_grad()
            head(emb(ids)).sum().backward()
            opt.step()

        assert len(self.waits(memory, device, loop)) <= 1

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
