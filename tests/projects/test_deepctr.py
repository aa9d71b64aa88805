"""DeepCTR-Torch's models and their `fit` as they are: the L2 penalty on by default, its list made in `__init__`."""

import functools

import numpy as np
import pytest
import torch

from projects.data import FIELDS, ITEMS, clicks, sequences
from projects.pairs import WAYS, Outcome, classes, compare, hand_over

pytest.importorskip("deepctr_torch.models", reason="DeepCTR-Torch is not installed: make projects")

pytestmark = pytest.mark.slow


def columns():
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    sparse = [SparseFeat(f"field {k}", vocabulary_size=size, embedding_dim=8) for k, size in enumerate(FIELDS)]
    return [*sparse, DenseFeat("numbers", 2)]


def fit(model, way, optimizer, x, y, epochs=3) -> Outcome:
    hand_over(model, way)
    model.compile(optimizer, "binary_crossentropy", metrics=["binary_crossentropy", "auc"])
    torch.manual_seed(5)
    history = model.fit(x, y, batch_size=64, epochs=epochs, verbose=2, validation_split=0.2)
    return Outcome(history.history, {"predictions": model.predict(x, 256)}, model)


def deepfm(way: str, optimizer: str = "adam", **options) -> Outcome:
    from deepctr_torch.models import DeepFM

    fields, numbers, clicked = clicks()
    x = {**{f"field {k}": fields[:, k] for k in range(len(FIELDS))}, "numbers": numbers}
    with classes(way, "deepctr_torch"):
        model = DeepFM(columns(), columns(), dnn_hidden_units=(16,), **options)
    return fit(model, way, optimizer, x, clicked)


def din(way: str) -> Outcome:
    from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DIN

    history, target = sequences(length=6)
    others = np.random.default_rng(3).integers(1, ITEMS + 1, len(target))
    users = np.arange(len(target))
    item = SparseFeat("item_id", ITEMS + 1, embedding_dim=8)
    past = SparseFeat("hist_item_id", vocabulary_size=ITEMS + 1, embedding_dim=8, embedding_name="item_id")
    features = [
        SparseFeat("user", len(target), embedding_dim=4),
        item,
        VarLenSparseFeat(past, 6, length_name="seq_length"),
    ]
    x = {
        "user": np.repeat(users, 2),
        "item_id": np.stack([target, others], 1).flatten(),
        "hist_item_id": np.repeat(history, 2, axis=0)[:, ::-1].copy(),
        "seq_length": np.full(2 * len(target), 6),
    }
    with classes(way, "deepctr_torch"):
        model = DIN(features, ["item_id"], dnn_hidden_units=(16, 8), att_hidden_size=(8,), dnn_dropout=0.1)
    return fit(model, way, "adagrad", x, np.tile([1.0, 0.0], len(target)).astype(np.float32))


RUNS = {
    "deepfm": deepfm,
    # A penalty that shows in four digits.
    "deepfm, strong": functools.partial(deepfm, l2_reg_embedding=1e-2, l2_reg_linear=1e-2),
    "deepfm, adagrad": functools.partial(deepfm, optimizer="adagrad"),
    "din": din,
}


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", RUNS)
def test_deepctr(run, way, double):
    compare(RUNS[run], way, double)
