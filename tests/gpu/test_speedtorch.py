"""SpeedTorch's names on the device: its users' loop in every memory, and what CuPy shows of the rows."""

import numpy as np
import pytest
import torch
from speedtorch_cases import KINDS, train
from torch import nn

import speedtransfer.speedtorch as SpeedTorch
from gpu.tools import hold


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_in_every_memory(kind, device):
    losses, u, v = train(KINDS[kind], device)
    expected, same, other = train(KINDS["torch-pageable"], torch.device("cpu"))
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    for ours, host in ((u, same), (v, other)):
        np.testing.assert_allclose(ours.getNumpyVersion(), host.getNumpyVersion(), rtol=1e-2, atol=1e-3)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


@pytest.mark.parametrize("pinned", [False, True])
def test_data_as_cupy_shows_them(pinned, device):
    import cupy

    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    np.save("data.npy", array)
    for source in ("data.npy", cupy.asarray(array), torch.from_numpy(array).to(device)):
        gadget = SpeedTorch.DataGadget(source, CPUPinn=pinned)
        gadget.gadgetInit()
        assert isinstance(gadget.CUPYcorpus, cupy.ndarray)
        assert gadget.getData(np.array([1, 1])).device == device
        assert gadget.getData((slice(0, 2), slice(1, 3))).cpu().numpy().tolist() == array[0:2, 1:3].tolist()
        gadget.insertData(torch.full((2, 4), 5.0, device=device), cupy.asarray([3, 0]))
        torch.cuda.synchronize()
        assert cupy.asnumpy(gadget.CUPYcorpus)[[3, 0]].tolist() == [[5.0] * 4] * 2
    matrix = SpeedTorch.COM(5, CPUPinn=pinned)
    matrix.comInit()
    matrix.insertData(np.array([7, 8], dtype=np.uint32), ([1, 1], [2, 2]))
    assert matrix.CUPYCom.dtype == np.uint32
    assert int(matrix.CUPYCom[1, 2]) == 8


def test_page_locked_rows_are_waited_for_once_a_view_is_out(device):
    import cupy

    variable = nn.Embedding(1, 64, device=device)
    weights = SpeedTorch.ModelFactory(variable, 1000, 64, CPUPinn=True)
    weights.zerosInit()

    def fetched():
        weights.beforeForwardPass(slice(None))
        return variable.weight.detach()

    def saved():
        weights.saveCupy("rows.npy")
        return torch.from_numpy(np.load("rows.npy"))

    rows, view = weights.CUPYcorpus, weights.getTorchVar()
    rows.fill(0)  # compiled by now
    stream = cupy.cuda.Stream(non_blocking=True)
    reads = [lambda: torch.from_numpy(weights.getNumpyVersion()), lambda: weights.getTorchVar().clone(), fetched, saved]
    with stream:
        for value, read in enumerate(reads, start=1):
            hold(torch.cuda.ExternalStream(stream.ptr))
            rows.fill(value)
            assert read().eq(value).all(), value
    variable.weight.data = torch.zeros(1000, 64, device=device)
    hold(torch.cuda.current_stream())
    variable.weight.data.fill_(7)
    weights.afterOptimizerStep(slice(None))
    assert view.eq(7).all()
    hold(torch.cuda.current_stream())
    weights.beforeForwardPass(slice(None))
    view.zero_()
    assert variable.weight.eq(7).all()


def test_arrays_of_cupy_come_when_they_are_filled(device):
    import cupy

    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    made = cupy.zeros_like(cupy.asarray(array))
    made += 0  # compiled by now
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        hold(torch.cuda.ExternalStream(stream.ptr))
        made += 1
        gadget = SpeedTorch.DataGadget(made)
        gadget.gadgetInit()
        assert gadget.getNumpyVersion().tolist() == np.ones((6, 4)).tolist()
    gadget.CUPYcorpus = cupy.asarray(array)[::-1]
    assert np.array_equal(gadget.getNumpyVersion(), array[::-1])
    gadget.insertData(cupy.asarray(array)[::-1, ::-1], slice(None))
    assert np.array_equal(gadget.getNumpyVersion(), array[::-1, ::-1])
    assert np.array_equal(gadget.getData(cupy.arange(6)[::-1]).cpu().numpy(), array[:, ::-1])
