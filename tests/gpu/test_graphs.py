"""Training steps captured in a CUDA graph: replays compute what steps do, and what no replay could is refused by name."""

import contextlib
import functools
import gc
import threading
import warnings

import pytest
import torch
from torch import nn

import speedtransfer as st
from speedtransfer.errors import DeviceError

ROWS, DIM, IDS, WARM = 41, 8, 12, 3
# Of AdamW with capturable=True where nothing is captured; a capture that was given up is empty.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    # Of torch, where the graph of autograd of a capture that was given up is still alive.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]


adamw = functools.partial(functools.partial, torch.optim.AdamW, lr=0.05, capturable=True)
sgd = functools.partial(functools.partial, torch.optim.SGD, lr=0.05)


def batches():
    return [torch.randint(0, ROWS, (IDS,), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]


class Training:
    """A small model, its optimizer, and the static tensors of a graph."""

    def __init__(self, device, make=None, optimizer=None, forward=None, scaler=False, clips=False, **options):
        torch.manual_seed(3)
        options = {"idle": "lazy", "memory": "pinned", **options}
        self.emb = (make or st.Embedding)(ROWS, DIM, device=device, **options)
        self.table = self.emb.table
        self.linear = nn.Linear(DIM, 2).to(device)
        self.forward = forward or (lambda emb, ids: emb(ids))
        self.opt = (optimizer or adamw())([*self.emb.parameters(), *self.linear.parameters()])
        self.scaler = torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=2) if scaler else None
        self.clips = clips
        self.ids = torch.zeros(IDS, dtype=torch.int64, device=device)
        self.loss, self.graph = torch.zeros((), device=device), torch.cuda.CUDAGraph()

    def backward(self):
        loss = self.linear(self.forward(self.emb, self.ids)).pow(2).mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.loss = loss.detach()

    def update(self):
        if self.clips:
            nn.utils.clip_grad_norm_(self.emb.parameters(), 0.01)
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
            self.scaler.update()

    def step(self):
        self.opt.zero_grad(set_to_none=True)
        self.backward()
        self.update()

    def steps(self, given, function=None):
        """Return the losses of steps for the ids `given`."""
        losses = []
        for ids in given:
            self.ids.copy_(ids)
            (function or self.step)()
            losses.append(self.loss.item())
        return losses

    def warm_up(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            losses = self.steps(batches()[:WARM])
        torch.cuda.current_stream().wait_stream(stream)
        return losses

    def capture(self, function=None, graph=None):
        self.opt.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph if graph is None else graph):
            (function or self.step)()

    def result(self):
        """Return all rows, their state, the gradient, and a lookup, on the CPU."""
        found = [self.table.torch().cpu().clone(), self.emb.weight.grad.to_dense().cpu()]
        state = self.opt.state[self.emb.weight]
        found += [torch.as_tensor(state[name]).detach().cpu().clone() for name in sorted(state)]
        with torch.no_grad():
            return [*found, self.emb(self.ids.view(3, -1)).cpu()]


def warm_pair(device, **options):
    """Return two trainings at the same place: one for steps, and one for a graph."""
    pair = Training(device, **options), Training(device, **options)
    for training in pair:
        training.warm_up()
    return pair


def check_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def bag(mode, **options):
    return {
        "make": lambda *shape, **more: st.EmbeddingBag(*shape, mode=mode, **options, **more),
        "forward": lambda emb, ids: emb(ids.view(3, -1)),
    }


class OneBag(st.MultiEmbeddingBag):
    def __init__(self, rows, dim, **options):
        super().__init__([rows], dim, mode="sum", padding_idx=3, **options)

    def forward(self, ids):
        return super().forward([ids.view(3, -1)])[0]


FORMS = {
    "adamw": {},
    "adamw-fused": {"optimizer": adamw(fused=True)},
    "sgd-momentum": {"optimizer": sgd(momentum=0.9, weight_decay=0.1)},
    "scaler-adamw": {"optimizer": adamw(fused=True), "scaler": True},
    "scaler-sgd": {"optimizer": sgd(momentum=0.9, fused=True), "scaler": True},
    "bfloat16": {"dtype": torch.bfloat16, "forward": lambda emb, ids: emb(ids).float()},
    "records": {"layout": "rows"},
    "clipped": {"clips": True},
    "padding": {"padding_idx": 3},
    "by-freq": {"scale_grad_by_freq": True},
    "max-norm": {"max_norm": 1.0},
    "twice": {"forward": lambda emb, ids: emb(ids) + emb(ids.flip(0)).sin()},
    "bag-sum": bag("sum", padding_idx=3),
    "bag-max": bag("max"),
    "multi-bag": {"make": OneBag},
}


class TestReplays:
    @pytest.mark.parametrize("memory", ["pinned", "device"])
    @pytest.mark.parametrize("form", FORMS)
    def test_a_step(self, device, form, memory):
        plain, graphed = (Training(device, memory=memory, **FORMS[form]) for _ in range(2))
        expected = plain.warm_up() + plain.steps(batches()[WARM:])
        losses = graphed.warm_up()
        before = graphed.table.torch().cpu().clone()
        graphed.capture()
        # A capture does nothing.
        assert torch.equal(graphed.table.torch().cpu(), before)
        losses += graphed.steps(batches()[WARM:], graphed.graph.replay)
        assert losses == pytest.approx(expected, rel=1e-5)
        check_close(graphed.result(), plain.result())

    def test_the_step_in_a_graph_of_its_own(self, device):
        (plain, graphed), second = warm_pair(device), torch.cuda.CUDAGraph()
        graphed.capture(graphed.backward)
        with torch.cuda.graph(second):
            graphed.opt.step()
        plain.steps(batches()[:2])
        graphed.steps(batches()[:2], lambda: (graphed.graph.replay(), second.replay()))
        # Rows that change between the two are read again.
        for training in (plain, graphed):
            training.table.scatter([0], torch.ones(1, DIM, device=device))
            training.ids.zero_()
        plain.opt.zero_grad()
        plain.backward()
        graphed.graph.replay()
        for training in (plain, graphed):
            training.table.scatter([0], torch.full((1, DIM), 2.0, device=device))
        plain.opt.step()
        second.replay()
        check_close(graphed.result(), plain.result())

    STORED = [{"storage_dtype": dtype} for dtype in (torch.int8, torch.float8_e4m3fn, "split24")]

    @pytest.mark.parametrize("options", [{"memory": "device"}, {"idle": "exact"}, *STORED])
    def test_an_evaluation(self, device, options):
        emb, ids = Training(device, **options).emb, torch.zeros(IDS, dtype=torch.int64, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            emb(ids)
            with torch.cuda.graph(graph):
                rows = emb(ids)
            for given in batches():
                ids.copy_(given)
                graph.replay()
                assert torch.equal(rows, emb(given.to(device)))


class TestAfterReplays:
    @pytest.fixture
    def pair(self, device):
        """A training by steps and one by replays, both at the same place."""
        plain, graphed = warm_pair(device)
        graphed.capture()
        plain.steps(batches()[:2])
        graphed.steps(batches()[:2], graphed.graph.replay)
        return plain, graphed

    def test_writes_to_the_weight(self, pair):
        for training in pair:
            with torch.no_grad():
                training.emb.weight[2] = 0.5
                training.emb.weight.data[3] *= 2
        for training, step in zip(pair, (pair[0].step, pair[1].graph.replay), strict=True):
            training.steps(batches(), step)
        check_close(pair[1].result(), pair[0].result())

    def test_rows_are_there_when_the_host_looks(self, pair):
        plain, graphed = pair
        for _ in range(3):
            plain.steps(batches()[2:4])
            for ids in batches()[2:4]:
                graphed.ids.copy_(ids)
                graphed.graph.replay()
            check_close(graphed.table.torch(), plain.table.torch())
        before = graphed.table.version
        graphed.graph.replay()
        assert graphed.table.version > before
        state = graphed.opt.state_dict()["state"][0]["exp_avg"].clone()
        plain.step()
        check_close(state, plain.opt.state_dict()["state"][0]["exp_avg"])

    def test_auto_stays_with_mapped(self, device, monkeypatch):
        plain, graphed = Training(device), Training(device)
        engine = graphed.table._engine
        monkeypatch.setattr(engine, "choose", lambda *args: "staged")
        plain.warm_up()
        graphed.warm_up()
        graphed.capture()
        for ids in batches():
            plain.steps([ids, ids])
            graphed.steps([ids], graphed.graph.replay)
            graphed.steps([ids])
        check_close(graphed.result(), plain.result())

    def test_an_id_out_of_range(self, pair):
        _, graphed = pair
        graphed.steps([torch.full((IDS,), ROWS)], graphed.graph.replay)
        with pytest.raises(IndexError, match=rf"is {ROWS} but the table has {ROWS} rows"):
            graphed.table.wait()


@contextlib.contextmanager
def refused(match, graph=None):
    """Check that what is captured in the body raises, and says so in one line that names graphs."""
    with pytest.raises(DeviceError, match=match) as error, torch.cuda.graph(graph or torch.cuda.CUDAGraph()):
        yield
    assert "CUDA graph" in str(error.value)
    assert "\n" not in str(error.value)


REFUSED = {
    "exact": ({"idle": "exact"}, r"idle='exact'.*use idle='lazy'"),
    "storage": ({"storage_dtype": torch.int8}, "with storage_dtype or state_dtype .* same random numbers"),
    "state": ({"state_dtype": torch.uint8}, "with storage_dtype or state_dtype"),
    "pageable": ({"memory": "pageable"}, r"rows the host moves \(memory='pageable'\).*memory='pinned' or 'device'"),
    "cache": ({"cache_rows": 10}, "cache_rows"),
    "ids": ({"forward": lambda emb, ids: emb([1, 2, 3])}, "by ids on the host .* tensor on the device"),
    "activate": ({"forward": lambda emb, ids: emb.activate(ids).rows}, r"activate\(\), .* call the module"),
    "whole": ({"forward": lambda emb, ids: emb.weight * 2}, "a use of all of weight .*emb"),
}


class TestRefused:
    @pytest.mark.parametrize("form", REFUSED)
    def test_a_form(self, device, form):
        options, match = REFUSED[form]
        plain, graphed = Training(device, **options), Training(device, **options)
        expected = plain.warm_up()
        assert graphed.warm_up() == pytest.approx(expected)
        rows = graphed.table.gather(range(ROWS))
        with refused(match):
            graphed.step()
        assert torch.equal(graphed.table.gather(range(ROWS)), rows)
        # As if nothing had been.
        assert graphed.steps(batches()) == pytest.approx(plain.steps(batches()), rel=1e-5)
        check_close(graphed.table.torch().float(), plain.table.torch().float())

    def test_a_step_alone(self, device):
        graphed = Training(device)
        graphed.warm_up()
        with refused("has a gradient from before the capture .*capture forward and backward with the step"):
            graphed.opt.step()
        with refused(r"has a gradient from before the capture .*zero_grad\(set_to_none=True\)"):
            graphed.backward()
        graphed.steps(batches())

    def test_make_graphed_callables(self, device):
        graphed = Training(device)
        graphed.warm_up()
        with pytest.raises(DeviceError, match=r"make_graphed_callables\) cannot be captured .*capture the whole step"):
            torch.cuda.make_graphed_callables(graphed.emb, (graphed.ids,))
        graphed.steps(batches())

    def test_looking_for_repeats(self, device):
        table = Training(device).table
        with refused("names twice"):
            table.scatter(torch.arange(3, device=device), torch.zeros(3, DIM, device=device))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_tables_that_go_during_a_capture(elsewhere, device):
    """Freeing page-locked memory would make a capture fail: it is put off, by any thread."""
    graphed, garbage = Training(device), [Training(device).table]
    graphed.warm_up()
    graphed.opt.zero_grad(set_to_none=True)
    with warnings.catch_warnings(), torch.cuda.graph(graphed.graph):
        if elsewhere:
            thread = threading.Thread(target=garbage.clear)
            thread.start()
            thread.join()
        garbage.clear()
        gc.collect()
        graphed.step()
    graphed.steps(batches(), graphed.graph.replay)
    del graphed
    gc.collect()
    assert not st.Table(4, DIM, memory="pinned", device=device).gather([3]).any()
