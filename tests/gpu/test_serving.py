"""Frozen lookups of a few ids on a CUDA device: one kernel, the rows of the table, faults that are told; compiled lookups."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import take_step
from torch import nn

import speedtransfer as st
from gpu.tools import fakegpu
from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.tracing import ONE_GRAPH

ROWS, DIM = 300, 16
MEMORIES = ["pinned", "device", "pageable"]


def frozen(device, **options):
    torch.manual_seed(2)
    return st.Embedding(ROWS, DIM, _freeze=True, device=device, **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "options", [{}, {"storage_dtype": torch.int8}, {"storage_dtype": "split24"}, {"dtype": torch.bfloat16}], ids=str
)
def test_the_rows_of_the_ids(device, memory, mode, options):
    emb = frozen(device, memory=memory, **options)
    whole = emb.weight.detach().cpu()
    grid = torch.randint(0, ROWS, (6, 8), generator=torch.Generator().manual_seed(3))
    with mode():
        for ids in (grid, grid.t(), grid[:, ::3], grid.int(), grid[2, 3], grid[:0], grid.flatten()[:1]):
            converted = ids.dtype != torch.int64 or not ids.is_contiguous()
            if fakegpu is not None and mode is torch.inference_mode and converted:
                # The emulator loses what is converted in inference mode.
                continue
            for given in (ids.to(device), ids):
                found = emb(given)
                assert found.device.type == "cuda"
                assert found.shape == (*ids.shape, DIM)
                assert torch.equal(found.cpu(), F.embedding(ids.long(), whole))
    assert emb.table.stats().gathered_rows
    emb.table.wait()


@pytest.mark.skipif(fakegpu is None, reason="the calls of a GPU are listed where it is emulated")
def test_few_ids_are_one_launch(device):
    for memory in ("pinned", "device"):
        emb = frozen(device, memory=memory)
        for count in (1, 8, 64):
            ids = torch.randint(0, ROWS, (count,)).to(device)
            with torch.inference_mode():
                emb(ids)
                with fakegpu.recorded() as calls:
                    emb(ids)
            launches = [str(call) for call in calls if "launch" in str(call)]
            assert len(launches) == 1, launches
            assert "gather_rows" in launches[0]


@pytest.mark.skipif(fakegpu is not None, reason="the emulator compiles nothing")
# torch's import of inductor warns.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.skipif(not ONE_GRAPH, reason="older versions of torch break the graph")
@pytest.mark.parametrize("memory", ["pinned", "device", "pageable"])
def test_a_compiled_model(device, memory):
    torch.compiler.reset()
    torch.manual_seed(1)
    model = nn.Sequential(st.Embedding(40, 4, memory=memory, device=device), nn.Linear(4, 1, device=device))
    plain = copy.deepcopy(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    opts = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    for seed in range(3):
        ids = torch.randint(0, 40, (9,), generator=torch.Generator().manual_seed(seed)).to(device)
        for each, opt in zip((run, plain), opts, strict=True):
            take_step(opt, each(ids).square().sum())
    assert torch.equal(model[0].table.torch().cpu(), plain[0].table.torch().cpu())
    torch.compiler.reset()


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_copy_follows(device, memory, tmp_path):
    def make():
        torch.manual_seed(0)
        table = st.Embedding(100, 8, device=device, memory=memory, idle="lazy")
        return nn.Sequential(table, nn.Linear(8, 2, device=device))

    model, follower, path, known = make(), make(), tmp_path / "delta.safetensors", None
    opt, mark = torch.optim.AdamW(model.parameters()), st.mark(model)
    for _ in range(2):
        take_step(opt, model(torch.randint(0, 100, (6,), device=device)).square().sum())
        mark = st.save_delta(path, model, mark)
        known = st.apply_delta(path, follower, known)
        for ours, theirs in zip(follower.state_dict().values(), model.state_dict().values(), strict=True):
            assert torch.equal(ours.cpu(), theirs.cpu())
        assert known.fingerprints == mark.fingerprints == st.mark(follower).fingerprints
    with pytest.raises(InvalidValueError, match="has been applied"):
        st.apply_delta(path, follower)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("options", [{"idle": "lazy"}, {"idle": "exact"}, {"idle": "lazy", "cache_rows": 20}], ids=str)
def test_saved_while_it_is_trained(device, memory, options, tmp_path):
    if memory == "device" and "cache_rows" in options:
        pytest.skip("the rows are there already")

    def make():
        torch.manual_seed(0)
        table = st.Embedding(5000, 8, device=device, memory=memory, **options)
        model = nn.Sequential(table, nn.Linear(8, 2).to(device))
        opt = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            step(model, opt)
        return model, opt

    def step(model, opt):
        take_step(opt, model(torch.randint(0, 5000, (400,), device=device)).square().sum())

    st.save_checkpoint(tmp_path / "stopped", *make())
    model, opt = make()
    save = st.save_checkpoint(tmp_path / "saved", model, opt, background=True)
    step(model, opt)
    while not save.done():
        step(model, opt)
    save.wait()
    found = [make() for _ in range(2)]
    for name, pair in zip(("stopped", "saved"), found, strict=True):
        st.load_checkpoint(tmp_path / name, *pair)
    stopped, saved = ([model.state_dict(), opt.state_dict()["state"]] for model, opt in found)
    torch.testing.assert_close(saved, stopped, rtol=0, atol=0)
