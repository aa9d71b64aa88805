"""Lightning's Trainer as its tutorials use it: fit, checkpoints, resuming, clipping, accumulation, averages."""

import functools
import logging

import pytest
import torch
import torch.nn.functional as F

from projects.pairs import DENSE, WAYS, Outcome, assert_same, compare, in_both_ways
from projects.two_towers import ahead, loader, make, scores

lightning = pytest.importorskip("lightning", reason="Lightning is not installed: make projects")

from lightning.pytorch import callbacks, seed_everything  # noqa: E402
from lightning.pytorch.plugins import io as plugins_io  # noqa: E402

import speedtransfer as st  # noqa: E402

pytestmark = pytest.mark.slow
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self, way, optimizer="AdamW", **options):
        super().__init__()
        self.net = make(way)
        self.optimizer, self.options = optimizer, options or {"lr": 0.02}
        self.losses = []

    def forward(self, users, items):
        return self.net(users, items)

    def training_step(self, batch, index):
        users, items, rating = batch
        loss = F.mse_loss(self.net(users, items).to(rating.dtype), rating)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        users, items, rating = batch
        self.log("val_loss", F.mse_loss(self.net(users, items).to(rating.dtype), rating))

    def configure_optimizers(self):
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), **self.options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def trainer(**options):
    seed_everything(7, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(**{"max_epochs": 3, "enable_checkpointing": False, **quiet, **options})


def outcome(module, runner):
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    return Outcome({"losses": module.losses, **metrics}, {"scores": scores(module)}, module)


def fit(way, optimizer="AdamW", **options):
    module, runner = Module(way, optimizer), trainer(**options)
    runner.fit(module, loader(), loader(seed=1))
    return outcome(module, runner)


def read_ahead(way, **options):
    """Batches of workers, of which a table reads rows ahead: fit twice, on from the checkpoint of the first."""
    printed = {}
    for epochs in (1, 3):
        module, runner = Module(way), trainer(max_epochs=epochs, **options)
        source, checked = (ahead(module.net, way, loader(seed=seed, num_workers=2)) for seed in (0, 1))
        runner.fit(module, source, checked, ckpt_path="1.ckpt" if epochs > 1 else None, weights_only=False)
        runner.save_checkpoint(f"{epochs}.ckpt")
        printed[epochs] = module.losses
    result = outcome(module, runner)
    result.printed |= printed
    return result


RUNS = {
    "plain": fit,
    "clipped": functools.partial(fit, gradient_clip_val=0.1),
    "accumulated": functools.partial(fit, accumulate_grad_batches=3),
    "read ahead": read_ahead,
    "read ahead, limited": functools.partial(read_ahead, limit_train_batches=5, num_sanity_val_steps=1),
}
# Made anew for each run.
CALLBACKS = {
    "early stopping": lambda: callbacks.EarlyStopping("val_loss", patience=1),
    "stochastic averages": lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1),
    "moving averages": lambda: callbacks.EMAWeightAveraging(decay=0.9),
}
RUNS |= {name: lambda way, make=make: fit(way, callbacks=[make()], max_epochs=4) for name, make in CALLBACKS.items()}


@in_both_ways
@pytest.mark.parametrize("run", RUNS)
def test_lightning(run, way, double, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compare(RUNS[run], way, double)


@pytest.mark.parametrize("way", WAYS)
def test_resumed(way, tmp_path):
    """Stopped after two epochs and resumed from the checkpoint: by ours from ours, and each from the other's."""
    whole = fit(DENSE, max_epochs=4)
    files = {}
    for which in (DENSE, way):
        module, runner = Module(which), trainer(max_epochs=2)
        runner.fit(module, loader(), loader(seed=1))
        files[which] = tmp_path / f"{which}.ckpt"
        runner.save_checkpoint(files[which])
    for source, target in ((way, way), (DENSE, way), (way, DENSE)):
        resumed = {}
        for name, path in (("ours", files[source]), ("dense", files[DENSE])):
            module, runner = Module(target if name == "ours" else DENSE), trainer(max_epochs=4)
            runner.fit(module, loader(), loader(seed=1), ckpt_path=path, weights_only=False)
            resumed[name] = outcome(module, runner)
        assert len(resumed["dense"].printed["losses"]) == len(whole.printed["losses"]) // 2
        assert_same(resumed["ours"], resumed["dense"], None)


class Meanwhile(callbacks.Callback):
    """Our own saver, while training goes on."""

    def __init__(self, folder):
        self.folder, self.saves = folder, {}

    def on_train_batch_end(self, runner, module, outputs, batch, index):
        step = runner.global_step
        if step % 4 == 0:
            path = self.folder / f"ours-{step}"
            self.saves[path] = st.save_checkpoint(path, module, runner.optimizers[0], background=True)


@pytest.mark.parametrize("way", WAYS)
def test_saved_while_training_goes_on(way, tmp_path):
    """By Lightning's asynchronous saver and by ours in a callback: they save what one does that training waits for."""
    found, ours = {}, Meanwhile(tmp_path)
    for name, plugins in (("waits", []), ("later", [plugins_io.AsyncCheckpointIO()])):
        folder = tmp_path / name
        every = callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=4)
        module = Module(way)
        runner = trainer(enable_checkpointing=True, callbacks=[every, *([] if plugins else [ours])], plugins=plugins)
        runner.fit(module, loader(), loader(seed=1))
        found[name] = {path.name: torch.load(path, weights_only=False) for path in sorted(folder.iterdir())}
    assert len(found["waits"]) > 2
    assert found["waits"].keys() == found["later"].keys()
    for name, saved in found["waits"].items():
        for part in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(found["later"][name][part], saved[part], rtol=0, atol=0)
    assert len(ours.saves) > 2
    for path, save in ours.saves.items():
        save.wait()
        again = Module(way)
        optimizer = again.configure_optimizers()["optimizer"]
        st.load_checkpoint(path, again, optimizer)
        saved = found["waits"][f"step={path.name.partition('-')[2]}.ckpt"]
        torch.testing.assert_close(dict(again.state_dict()), dict(saved["state_dict"]), rtol=0, atol=0)
        torch.testing.assert_close(
            optimizer.state_dict()["state"], saved["optimizer_states"][0]["state"], rtol=0, atol=0
        )
