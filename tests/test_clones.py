"""Checkpoints that share bytes with the files of tables: by the file system where it has that, else by one that is played."""

import json
import os
import struct
import tempfile

import pytest
import torch
from cases import take_step
from safetensors.torch import load_file
from torch import nn

import speedtransfer as st
from speedtransfer.errors import StorageError
from speedtransfer.tables import clones, files

ROWS, DIM = 3001, 33


class Played:
    """`ioctl` of a file system that shares blocks: what it has shared, as it does, and copies."""

    def __init__(self):
        self.calls, self.most = list[tuple[int, int, int]](), 10**9

    def __call__(self, target, request, packed):
        source, begin, count, at = struct.unpack("=qQQQ", packed)
        assert request == 0x4020940D
        size = os.fstat(source).st_size
        if begin % 4096 or at % 4096 or (count % 4096 and begin + count != size) or begin + count > size:
            raise OSError(22, "Invalid argument")
        if len(self.calls) >= self.most:
            raise OSError(28, "No space left on device")
        self.calls.append((begin, count, at))
        data = os.pread(source, count, begin)
        # Opened for direct writes, perhaps, which must be aligned.
        with open(f"/proc/self/fd/{target}", "r+b") as file:
            file.seek(at)
            file.write(data)


@pytest.fixture(params=["played", "by the file system"])
def shared(request, tmp_path, monkeypatch):
    """Let tables of any size be shared."""
    monkeypatch.setattr(clones, "LARGE_PART", 1e-6)
    if request.param == "played":
        monkeypatch.setattr(clones.fcntl, "ioctl", found := Played())
        return found
    with tempfile.NamedTemporaryFile(dir=tmp_path) as source, tempfile.TemporaryFile(dir=tmp_path) as target:
        source.write(bytes(clones.BLOCK))
        source.flush()
        origin = clones.Origin(clones.OpenFile(source.fileno()), 0)
        if not clones.can_clone(target.fileno(), origin):
            pytest.skip("the file system of --basetemp shares no bytes")
    return None


class Run:
    """Two tables in files, whose sizes are those of no blocks, beside others and a dense layer."""

    def __init__(self, folder, idle="lazy"):
        torch.manual_seed(3)
        options = [{}, {}]
        if folder is not None:
            options = [{"memory": "mmap", "path": folder / f"{name}.safetensors"} for name in "ab"]
        first = st.Embedding(ROWS, DIM, idle=idle, **options[0])
        second = st.Embedding(ROWS + 7, DIM - 2, idle=idle, storage_dtype=torch.bfloat16, **options[1])
        self.net = nn.ModuleDict({"a": first, "b": second, "c": st.Embedding(50, 4), "d": nn.Linear(3, 5)})
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=0.1)

    def steps(self, *seeds):
        for seed in seeds:
            ids = torch.randint(ROWS, (300,), generator=torch.Generator().manual_seed(seed))
            take_step(
                self.opt, sum((net(ids % 50).square().sum() for name, net in self.net.items() if name != "d"), 0.0)
            )
        return self

    def values(self):
        states = self.opt.state_dict()["state"].values()
        return [*self.net.state_dict().values(), *(value for state in states for value in state.values())]


def sizes(path, role):
    content = json.loads((path / "manifest.json").read_text())["files"][role]
    return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in content["tensors"].items()}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_a_checkpoint_has_what_there_was(shared, tmp_path, idle, background):
    run = Run(tmp_path, idle).steps(1, 2, 3)
    path = tmp_path / "saved"
    save = st.save_checkpoint(path, run.net, run.opt, background=background)
    if save is not None:
        while not save.done():
            run.steps(4)
        save.wait()
    run.steps(5)
    wanted, found = Run(None, idle).steps(1, 2, 3), Run(None, idle)
    st.load_checkpoint(path, found.net, found.opt)
    for ours, theirs in zip(found.values(), wanted.values(), strict=True):
        assert torch.equal(ours, theirs)
    for role in ("model", "optimizer"):
        (name,) = path.glob(f"{role}-*")
        assert load_file(name).keys() == sizes(path, role).keys()
    gaps = [name for role in ("model", "optimizer") for name in sizes(path, role) if name.startswith("__gap__")]
    # Rows that have missed steps are not what the files have.
    assert bool(gaps) is not (background and idle == "exact")
    if shared is not None:
        large = sum(count for _, count, at in shared.calls if at)
        assert large >= 0.9 * (5 * ROWS * DIM) * 4 * bool(gaps)
    assert {each.name for each in tmp_path.iterdir()} == {"a.safetensors", "b.safetensors", "saved"}


def test_one_that_fails_half_way_leaves_the_one_before(shared, tmp_path):
    if shared is None:
        pytest.skip("played")
    run = Run(tmp_path).steps(1)
    st.save_checkpoint(tmp_path / "saved", run.net, run.opt, extra=1)
    shared.most = len(shared.calls) + 3
    with pytest.raises(StorageError, match=r"cannot save to .*shares no bytes"):
        st.save_checkpoint(tmp_path / "saved", run.steps(2).net, run.opt, extra=2)
    assert st.load_checkpoint(tmp_path / "saved", Run(None).net) == 1


def test_only_what_files_have_is_shared(tmp_path):
    table = st.Table(ROWS, DIM, memory="mmap", path=tmp_path / "t.npy", device="cpu", max_rows=2 * ROWS)
    table.add_plane("m", 3)
    for _ in range(2):
        for name in table.planes:
            plane = table.plane(name)
            plane.fill_(2.5)
            origin = clones.origin_of(plane)
            assert origin is not None
            os.fsync(origin.file.number)
            found = os.pread(origin.file.number, plane.nbytes, origin.begin)
            assert found == plane.numpy().tobytes()
        table.grow(2 * ROWS)
    private, _ = files.map_tensor(tmp_path / "t.npy", 128, (10, DIM), torch.float32, "c")
    for other in (torch.zeros(5000), private, table.plane("weight")[:, 1:], torch.empty(0)):
        assert clones.origin_of(other) is None
