"""Files that an earlier version wrote are read, with every value, and training goes on from them."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import written_files
from written_files import (
    CHECKPOINTS,
    DIM,
    EXTRA,
    MACHINE,
    PICKLES,
    ROWS,
    TABLES,
    Run,
    points,
    table_values,
    train_word2vec,
)

import speedtransfer as st
from speedtransfer.engines import calibration
from speedtransfer.errors import InvalidValueError


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(written_files.ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def expected(written) -> dict[str, np.ndarray]:
    return dict(np.load(written / "expected.npz"))


def part(expected: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in expected.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name, written, expected):
    case, run = CHECKPOINTS[name], Run(CHECKPOINTS[name])
    assert repr(run.load(written / "checkpoints" / name)) == repr(EXTRA)  # which shows every value and its type
    found, wanted = run.values(), part(expected, f"{name}.loaded.")
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    run.train()
    found = run.values()
    for key, value in part(expected, f"{name}.trained.").items():
        np.testing.assert_allclose(found[key], value, case.rtol, case.atol, err_msg=key)


@pytest.mark.parametrize("name", PICKLES)
def test_pickle(name, written, expected):
    run = torch.load(written / "pickles" / f"{name}.pt", weights_only=False)
    found = run.values()
    for key, value in part(expected, f"{name}.loaded.").items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    run.train()
    found = run.values()
    for key, value in part(expected, f"{name}.trained.").items():
        np.testing.assert_allclose(found[key], value, 0.05, 0.05, err_msg=key)


@pytest.mark.parametrize("memory", ["pageable", "mmap"])
@pytest.mark.parametrize("name", [*TABLES, "mapped.npy", "mapped.safetensors"])
def test_table(name, memory, written, tmp_path):
    path = shutil.copy(written / "tables" / name, tmp_path)
    table, values = st.Table.load(path, memory=memory), table_values(TABLES.get(name, torch.float32))
    assert (table.num_rows, table.dim, table.dtype) == (ROWS, DIM, values.dtype)
    assert torch.equal(table.torch(), values)


def test_calibration(written, monkeypatch):
    monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(written / "cache"))
    monkeypatch.setattr(calibration, "machine_of", lambda device: dict(MACHINE))
    found = calibration.load(torch.device("cpu"))
    assert found is not None, "a file of this machine is found by its name"
    assert (found.points, found.copy_bytes_per_s) == (points(), 5e9)


def test_word2vec_run_whose_rates_mean_other_steps_is_not_resumed(written, tmp_path):
    folder = shutil.copytree(written / "word2vec", tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidValueError, match=r"begun by another version of speedtransfer.*begin a new run"):
        train_word2vec(folder, resume=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("suffix", [".txt", ".bin", ".safetensors", ".glove"])
def test_vectors(suffix, written, expected):
    vectors = st.word2vec.Vectors.load(written / f"vectors{suffix}")
    assert vectors.words[0] == "the"
    np.testing.assert_array_equal(vectors.matrix, expected["word2vec.vectors"])
