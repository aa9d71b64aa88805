"""The disk: what a save needs, leaves and removes, also where it is killed, and the memory that saving and loading take."""

import errno
import fcntl
import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoint_cases import Run, trained
from forked import run_script
from in_child import skip_where_torch_refuses
from optimizer_cases import case_named
from sweeps import few
from torch import nn

import speedtransfer as st
from speedtransfer.checkpoint.folder import Folder
from speedtransfer.checkpoint.large_writes import LargeWrites
from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.system import create_file

LEFT = f"model-{'5' * 32}.safetensors"


@pytest.fixture
def run():
    return trained(1)


def loaded(path):
    """Return the digest of what the checkpoint at `path` holds."""
    other = Run(case_named("adamw"), 6)
    other.load(path)
    return other.digest()


def assert_clean(path, *more):
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert set(os.listdir(path)) == {"manifest.json", *(facts["name"] for facts in files.values()), *more}


# --- what is there already --------------------------------------------------------------------------------------------


def test_a_save_replaces_the_one_before_and_what_was_left(run, tmp_path):
    run.save(tmp_path)
    (tmp_path / LEFT).write_bytes(b"half")
    (tmp_path / f".manifest-{'a' * 32}.json").write_text("{")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model-1.safetensors").write_text("mine")  # another program's
    run.epochs(1)
    run.save(tmp_path)
    assert_clean(tmp_path, "notes.txt", "model-1.safetensors")
    assert loaded(tmp_path) == run.digest()


def test_what_is_no_checkpoint_is_left_alone(run, tmp_path):
    foreign, other, linked = (tmp_path / name for name in ("foreign", "other", "linked"))
    for folder in (foreign, other, linked):
        folder.mkdir()
        (folder / LEFT).write_text("mine")
    (foreign / "mine.txt").write_text("mine")
    (other / "manifest.json").write_text('{"name": "web app"}')
    run.save(tmp_path / "real")
    (linked / "manifest.json").symlink_to(tmp_path / "real" / "manifest.json")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for path in (foreign, other, linked, tmp_path / "file", tmp_path / "dangling"):
        with pytest.raises(InvalidValueError, match=r"choose (an empty or new folder|another path)"):
            run.save(path)
    assert sorted(tmp_path.rglob("*")) == before


# --- no room ----------------------------------------------------------------------------------------------------------


def test_too_little_room_is_noticed_first(run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=12_345))
    with pytest.raises(StorageError, match=r"needs \d+\.\d kB but 12\.3 kB are free; free some space"):
        run.save(tmp_path / "point")
    assert not (tmp_path / "point").exists()


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_every_call_may_fail(call, run, tmp_path, monkeypatch):
    path, error = tmp_path / "point", OSError(errno.ENOSPC, "No space left on device")
    run.save(path)
    before = loaded(path)
    run.epochs(1)
    real, failed = getattr(os, call), 0
    for number in range(30):
        left = [number]

        def fail(*arguments, **options):
            left[0] -= 1  # noqa: B023 - called at once
            if left[0] == -1:  # noqa: B023
                raise error
            return real(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            try:
                run.save(path)
            except StorageError as refusal:
                assert "No space left on device" in str(refusal)  # noqa: PT017
            else:
                break
        failed += 1
        # The folder is synchronised once more when the manifest is in place: the new one then, and the files of both.
        assert loaded(path) in (before, run.digest())
        if loaded(path) == before:
            assert_clean(path)
    assert failed
    assert loaded(path) == run.digest()
    assert_clean(path)


# --- several at a time ------------------------------------------------------------------------------------------------


def test_savers_and_loaders_at_the_same_time(tmp_path):
    *models, other = (nn.Sequential(st.Embedding(300, 8), nn.Linear(8, 1)) for _ in range(4))
    for number, model in enumerate(models):
        model[0].table.fill_(number)
    st.save_checkpoint(tmp_path, models[0], extra=0)

    def save(number):
        for _ in range(15):
            st.save_checkpoint(tmp_path, models[number], extra=number)

    with ThreadPoolExecutor(3) as pool:
        saves = [pool.submit(save, number) for number in range(3)]
        loads = 0
        while not (loads and all(each.done() for each in saves)):
            number = st.load_checkpoint(tmp_path, other)
            assert bool((other[0].table.torch() == number).all())
            loads += 1
    assert not any(each.exception() for each in saves)
    assert_clean(tmp_path)


def test_a_save_in_progress_is_not_cleaned_away(run, tmp_path, monkeypatch):
    commit, inner = Folder.commit, Run(case_named("adamw"), 3)

    def late(folder, content):
        monkeypatch.setattr(Folder, "commit", commit)
        inner.save(tmp_path)  # another one starts later and ends first
        assert len(os.listdir(tmp_path)) == 7
        commit(folder, content)

    monkeypatch.setattr(Folder, "commit", late)
    run.save(tmp_path)
    assert_clean(tmp_path)
    assert loaded(tmp_path) == run.digest()


# --- memory -----------------------------------------------------------------------------------------------------------

# A table and planes of 50 MB each, in files: its pages count as shared memory, so what is counted is private.
MEMORY = r"""
import resource, sys, threading, time
import psutil, torch
import speedtransfer as st
folder, what = sys.argv[1:]
torch.set_num_threads(1)
emb = st.Embedding(200_000, 64, memory="mmap", path=folder + f"/{what}.safetensors")
model = torch.nn.ModuleList([emb, st.Embedding(3, 64)])
opt = torch.optim.Adam(model.parameters(), lr=0.1)
if what == "save":
    model[0](torch.tensor([1, 199_999])).sum().backward()
    opt.step()
small = st.Embedding(9, 4)  # what torch imports at its first step is no matter of ours
warm = torch.optim.Adam(small.parameters())
small(torch.tensor([1])).sum().backward()
warm.step()
st.save_checkpoint(folder + "/warm", small, warm)
st.load_checkpoint(folder + "/warm", small, warm)

def private():
    info = psutil.Process().memory_info()
    return info.rss - info.shared

start, peak, done = private(), [0], False
def watch():
    while not done:
        peak[0] = max(peak[0], private())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
if what == "save":
    st.save_checkpoint(folder + "/point", model, opt)
else:
    st.load_checkpoint(folder + "/point", model, opt)
done = True
thread.join()
state = opt.state[emb.weight]
print((peak[0] - start) >> 20, float(emb.table.torch().double().sum()), float(state["exp_avg"][199_999].sum()))
"""


def test_memory_does_not_grow_with_the_table(tmp_path):
    sums = []
    for what in ("save", "load"):
        result = run_script(MEMORY, str(tmp_path), what, timeout=500)
        assert result.returncode == 0, result.stderr[-3000:]
        extra, *values = result.stdout.split()
        assert int(extra) < 70, f"{what} took {extra} MB more"
        sums.append(values)
    assert sums[0] == sums[1]
    assert sum(file.stat().st_size for file in (tmp_path / "point").iterdir()) > 150e6
    shutil.rmtree(tmp_path)


# --- killed at any line: the last finished checkpoint loads, and the run that goes on from there ends bit-equal ---------

# One process imports torch and starts no thread, then forks a child for each life of the training run. A life is ended by
# SIGKILL at a random line of the code that saves. Its table is in a file, grows, and evicts ids.
SCRIPT = r"""
import os, random, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import checkpoint_cases
from in_child import kill_at_line, run_child
from optimizer_cases import case_named
import speedtransfer as st

EPOCHS = 8
FILES = "checkpoint/folder.py", "checkpoint/tensors.py", "checkpoint/save.py", "tables/files.py"
folder, moments = Path(sys.argv[1]), int(sys.argv[2])
point, log, report = folder / "point", folder / "log", folder / "report"

def digest(run):
    state = run.model.state_dict()
    # A number of this vocabulary.
    del state["words.vocabulary.origin"]
    return checkpoint_cases.digest([state, run.optimizer.state_dict(), run.losses[-1], torch.get_rng_state()])

def life(line):
    vocabulary = st.Vocabulary(2, max_capacity=30, evict="lru", seed=1)
    table = folder / f"table-{os.getpid()}.npy"
    run = checkpoint_cases.Run(case_named("adamw"), vocabulary=vocabulary, memory="mmap", path=table)
    checkpoint_cases.seed_all(5)
    done = run.load(point)["epoch"] if (point / "manifest.json").exists() else 0
    finished = [int(text) for text in log.read_text().split()]
    assert done >= max(finished, default=0), f"epoch {finished[-1]} was saved but {done} loaded"
    if line:
        kill_at_line(line, FILES)
    saved = done < EPOCHS
    while done < EPOCHS:
        run.epochs(1)
        done += 1
        run.save(point, extra={"epoch": done})
        with open(log, "a") as file:
            file.write(f"{done}\n")
    sys.settrace(None)
    # It counts those of this life.
    assert vocabulary.stats().evicted or not saved
    assert vocabulary.capacity == 30
    report.write_text(digest(run))
    # The first save removes what is left of those that were killed.
    assert len(os.listdir(point)) == 4 or not saved, os.listdir(point)

def live(line=0):
    report.unlink(missing_ok=True)
    run_child(lambda: life(line))
    for table in folder.glob("table*"):
        table.unlink()
    # One that is killed at its very end has ended all the same.
    return report.read_text() if report.exists() else None

def reset():
    for file in point.glob("*"):
        file.unlink(missing_ok=True)
    log.write_text("")

point.mkdir()
reset()
whole = live()
reset()
random.seed(3)
killed = 0
while killed < moments:
    found = live(random.randrange(1, 2500))
    killed += found is None
    if found is not None:
        assert found == whole, "a resumed run ended elsewhere"
        reset()
assert live() == whole, "a resumed run ended elsewhere"
print("killed", killed)
"""


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("moments", few([1, 80], 1))
def test_killed_at_any_line(moments, tmp_path):
    result = run_script(SCRIPT, str(tmp_path), str(moments), timeout=900)
    skip_where_torch_refuses(result.stderr)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == f"killed {moments}"


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="all writes go by the cache here")
@pytest.mark.parametrize("refused", [False, True])
def test_pieces_of_any_size_are_written_past_the_cache(refused, tmp_path, monkeypatch):
    draw, write, begun = random.Random(3), os.write, list[bool]()

    def partly(handle, data):
        begun.append(bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT))
        if begun[-1] and refused:
            raise OSError(errno.EINVAL, "not here")
        some = draw.choice([len(data), 4096, 100])
        return write(handle, data[: max(some // 4096 * 4096, 4096) if begun[-1] else some])

    monkeypatch.setattr("speedtransfer.checkpoint.large_writes._BUFFER_BYTES", 1 << 16)
    for number, sizes in enumerate(([0], [5], [4096], [4095, 2], [65536], [65535, 70000, 1], [200_000, 3, 12345])):
        pieces, path = [draw.randbytes(size) for size in sizes], tmp_path / f"{number}"
        begun.clear()
        with LargeWrites(create_file(path, path)) as file, monkeypatch.context() as patch:
            patch.setattr(os, "write", partly)
            for piece in pieces:
                file.write(piece)
            assert file.tell() == sum(sizes)
            file.flush()
        assert path.read_bytes() == b"".join(pieces)
        # Where it is refused nobody asks again.
        assert not refused or sum(begun) <= 1
