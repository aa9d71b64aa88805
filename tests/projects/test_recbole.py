"""RecBole's models, trainer, data and evaluation as they are; configured as its own quick start does."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from projects.data import write_atomic_files
from projects.pairs import Outcome, classes, compare, hand_over, in_both_ways

pytest.importorskip("recbole", reason="RecBole is not installed: make projects")

pytestmark = pytest.mark.slow

MODELS = {
    "BPR": {},
    "NeuMF": {"mf_embedding_size": 8, "mlp_embedding_size": 8, "mlp_hidden_size": [16, 8]},
    "DeepFM": {"embedding_size": 8, "mlp_hidden_size": [16]},
    "LightGCN": {"n_layers": 2},
    "SASRec": {"hidden_size": 16, "inner_size": 32, "n_layers": 1, "MAX_ITEM_LIST_LENGTH": 10},
    "GRU4Rec": {"hidden_size": 16, "num_layers": 1, "MAX_ITEM_LIST_LENGTH": 10},
}
SEQUENTIAL = {"SASRec", "GRU4Rec"}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """What RecBole 1.2 takes for granted: names that numpy 2 has taken away, checkpoints that torch.load unpickles."""
    monkeypatch.chdir(tmp_path)  # it writes logs where it is
    names = {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}
    aliases = {name: vars(np)[name + "_"] for name in ("bool", "int", "object", "str")}
    for name, value in {**names, **aliases, "float": float, "complex": complex}.items():
        monkeypatch.setitem(vars(np), name, value)  # RecBole writes some of them itself: put back afterwards
    update = lambda matrix, values: matrix._dict.update(values)  # noqa: E731
    monkeypatch.setattr(scipy.sparse.dok_matrix, "_update", update, raising=False)  # gone in scipy 1.13
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


@cache
def data_path():
    folder = tempfile.mkdtemp(prefix="recbole-")
    write_atomic_files(Path(folder))
    return folder


def configuration(name):
    from recbole.config import Config

    columns = {"inter": ["user_id", "item_id", "rating", "timestamp"]}
    options = {"embedding_size": 16, **MODELS[name], "load_col": columns}
    options |= {"data_path": data_path(), "checkpoint_dir": f"{data_path()}/saved"}
    options |= {"epochs": 3, "train_batch_size": 256, "learning_rate": 0.05, "seed": 2020, "reproducibility": True}
    options |= {"show_progress": False, "use_gpu": False, "state": "ERROR", "worker": 0}
    if name == "DeepFM":
        columns = {"inter": columns["inter"][:3], "user": ["user_id", "age", "gender"], "item": ["item_id", "class"]}
        split = {"split": {"RS": [0.8, 0.1, 0.1]}, "group_by": None, "order": "RO", "mode": "labeled"}
        options |= {"load_col": columns, "threshold": {"rating": 4}, "eval_args": split, "train_neg_sample_args": None}
        options |= {"metrics": ["AUC", "LogLoss"], "valid_metric": "AUC"}
    elif name in SEQUENTIAL:
        options |= {"train_neg_sample_args": None, "loss_type": "CE"}
    return Config(model=name, dataset="tiny", config_dict=options)


def train(way, name):
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer, init_seed

    config = configuration(name)
    init_seed(config["seed"], config["reproducibility"])
    train_data, valid_data, test_data = data_preparation(config, create_dataset(config))
    init_seed(config["seed"], config["reproducibility"])
    with classes(way, "recbole"):
        model = get_model(config["model"])(config, train_data.dataset).to(config["device"])
    hand_over(model, way)
    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    best, result = trainer.fit(train_data, valid_data, saved=True, show_progress=False)
    tested = trainer.evaluate(test_data, load_best_model=True, show_progress=False)
    return Outcome({"losses": trainer.train_loss_dict, "best": best, "valid": result, "test": tested}, {}, model)


@in_both_ways
@pytest.mark.parametrize("name", MODELS)
def test_recbole(name, way, double):
    compare(train, way, double, name)
