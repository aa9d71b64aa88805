"""Files that 0.1.0 wrote are read, with every value, and training goes on from them.

A version that changes a format adds an archive of its own beside `tests/data/written.tar.xz`.
"""

import shutil
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checkpoint_cases import seed_all
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidValueError

ARCHIVE = Path(__file__).with_name("data") / "written.tar.xz"
ROWS, DIM, STEPS = 24, 8, 6
EXTRA = {
    "epoch": 3,
    "nan": float("nan"),
    "names": ("a", b"\x00b", None),
    "seen": Counter({7: 2}),
    "sizes": torch.Size([2, 3]),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "bits": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    2: {
        "set": {1, 2},
        "complex": 1 - 2j,
        "scalar": np.float32(0.1),
        "dtype": torch.int8,
        "device": torch.device("cpu"),
    },
}


class CheckpointCase(NamedTuple):
    """A model and an optimizer whose checkpoint is kept."""

    optimizer: Callable[[Any], torch.optim.Optimizer]
    options: dict[str, Any]
    # Of numbers after further steps, which Adam and a batch norm make of differences in the last bits.
    tolerance: float = 1e-4
    library: Any = st
    tied: bool = False


_HALF = {"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
_INT8 = {"storage_dtype": torch.int8, "state_dtype": torch.uint8, "idle": "lazy"}
_UINT8 = {"state_dtype": torch.uint8, "idle": "lazy"}
CHECKPOINTS = {
    "adamw_exact": CheckpointCase(lambda p: torch.optim.AdamW(p, lr=0.1), {"idle": "exact"}),
    "adam_lazy_amsgrad": CheckpointCase(lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), {"idle": "lazy"}),
    "sgd_momentum_bfloat16": CheckpointCase(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), _HALF, 0.02),
    "rmsprop_int8": CheckpointCase(lambda p: torch.optim.RMSprop(p, lr=0.01), _INT8, 0.05),
    "adagrad_float16": CheckpointCase(lambda p: torch.optim.Adagrad(p, lr=0.1), {"storage_dtype": torch.float16}, 0.01),
    "adamax_uint8_tied": CheckpointCase(lambda p: torch.optim.Adamax(p, lr=0.01), _UINT8, 0.05, tied=True),
    "adamw_of_torch": CheckpointCase(lambda p: torch.optim.AdamW(p, lr=0.1), {}, library=nn),
}
PICKLES = ("adamw_exact", "sgd_momentum_bfloat16")  # also kept as `torch.save` writes them
TABLES = {
    "float32.npy": torch.float32,
    "int16.npy": torch.int16,
    "float16.safetensors": torch.float16,
    "bfloat16.safetensors": torch.bfloat16,
    "int8.safetensors": torch.int8,
}


class Net(nn.Module):
    """Two tables beside a dense layer."""

    def __init__(self, library, tied, options):
        super().__init__()
        self.words = library.Embedding(ROWS, DIM, padding_idx=1, **options)
        self.bag = library.EmbeddingBag(ROWS // 2, DIM, **options)
        self.dense = nn.Linear(DIM, 2)
        self.norm = nn.BatchNorm1d(DIM)
        if tied:
            self.again = self.words

    def forward(self, ids):
        return self.dense(self.norm(self.words(ids).mean(1) + self.bag(ids % (ROWS // 2))))


class Run:
    """A short training run; its batches depend on the step alone."""

    def __init__(self, case):
        seed_all(1)
        self.model = Net(case.library, case.tied, case.options)
        self.optimizer = case.optimizer(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.5)
        self.step = 0

    def train(self):
        for _ in range(STEPS):
            ids = torch.randint(0, ROWS, (4, 3), generator=torch.Generator().manual_seed(self.step))
            self.optimizer.zero_grad()
            self.model(ids).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1

    def load(self, path):
        """Load, as one who goes on after the steps that were saved."""
        extra = st.load_checkpoint(path, self.model, self.optimizer, scheduler=self.scheduler)
        self.step = STEPS
        return extra

    def values(self):
        """Return every number of the model and of its optimizer."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found.update({f"state.{number}.{name}": torch.as_tensor(value) for name, value in state.items()})
        found["lr"] = torch.tensor(self.scheduler.get_last_lr())
        return {name: value.detach().float().numpy().copy() for name, value in found.items()}


# As pickles in the archive name them.
Net.__module__ = Run.__module__ = "written_files"
sys.modules["written_files"] = sys.modules[__name__]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def expected(written):
    return dict(np.load(written / "expected.npz"))


def part(expected, prefix):
    return {name.removeprefix(prefix): value for name, value in expected.items() if name.startswith(prefix)}


def check(run, name, expected, tolerance):
    """Compare every number with the one that was kept: as they are loaded, and after further steps."""
    assert run.values().keys() == part(expected, f"{name}.loaded.").keys()
    for when, bound in (("loaded", 0), ("trained", tolerance)):
        found = run.values()
        for key, value in part(expected, f"{name}.{when}.").items():
            np.testing.assert_allclose(found[key], value, bound, bound, err_msg=key)
        run.train()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name, written, expected):
    run = Run(CHECKPOINTS[name])
    assert repr(run.load(written / "checkpoints" / name)) == repr(EXTRA)  # which shows every value and its type
    check(run, name, expected, CHECKPOINTS[name].tolerance)


@pytest.mark.parametrize("name", PICKLES)
def test_pickle(name, written, expected):
    check(torch.load(written / "pickles" / f"{name}.pt", weights_only=False), name, expected, 0.05)


@pytest.mark.parametrize("memory", ["pageable", "mmap"])
@pytest.mark.parametrize("name", [*TABLES, "mapped.npy", "mapped.safetensors"])
def test_table(name, memory, written, tmp_path):
    path = shutil.copy(written / "tables" / name, tmp_path)
    table, values = st.Table.load(path, memory=memory), torch.arange(-60, ROWS * DIM - 60).view(ROWS, DIM) * 0.5
    values = values.to(TABLES.get(name, torch.float32))
    assert (table.num_rows, table.dim, table.dtype) == (ROWS, DIM, values.dtype)
    assert torch.equal(table.torch(), values)


def test_word2vec_run_whose_rates_mean_other_steps_is_not_resumed(written, tmp_path):
    folder, corpus = shutil.copytree(written / "word2vec", tmp_path / "run"), tmp_path / "corpus.txt"
    corpus.write_text("a dog and a fox sleep\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidValueError, match=r"begun by another version of speedtransfer.*begin a new run"):
        st.word2vec.train(corpus, checkpoint=folder, resume=True, progress=False, dim=8, epochs=2, min_count=1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("suffix", [".txt", ".bin", ".safetensors", ".glove"])
def test_vectors(suffix, written, expected):
    vectors = st.word2vec.Vectors.load(written / f"vectors{suffix}")
    assert vectors.words[0] == "the"
    np.testing.assert_array_equal(vectors.matrix, expected["word2vec.vectors"])
