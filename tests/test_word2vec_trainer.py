"""Training learns, repeats bit for bit, takes any optimizer, stops on Ctrl-C, and reports what is wrong."""

from __future__ import annotations

import io
import json
import signal
import threading

import numpy as np
import pytest
import torch
from lazy_oracle import one_thread  # noqa: F401
from rich.console import Console

from speedtransfer.errors import InvalidValueError, OptimizerError
from speedtransfer.word2vec import Corpus, Settings, Trainer, train
from speedtransfer.word2vec import progress as progress_module
from speedtransfer.word2vec import trainer as trainer_module
from speedtransfer.word2vec.optimizers import DEFAULT_LR, FALLBACK_LR, LR_END, make_optimizer, set_lr
from speedtransfer.word2vec.progress import StopOnSignal, TrainingProgress
from speedtransfer.word2vec.trainer import Callback

TOPICS, WORDS_A_TOPIC = 6, 8
QUICK = {"dim": 16, "epochs": 2, "block_words": 256, "shared_negatives": 64, "sample": 0, "device": "cpu"}


def planted_text(num_words=12_000, seed=0):
    """Sentences of ten words, each sentence from one of six topics; words t<topic>_<number>."""
    rng = np.random.default_rng(seed)
    topics = np.repeat(rng.integers(0, TOPICS, num_words // 10), 10)
    numbers = rng.integers(0, WORDS_A_TOPIC, len(topics))
    return " ".join(f"t{topic}_{number}" for topic, number in zip(topics, numbers, strict=True))


@pytest.fixture(scope="module")
def corpus():
    return Corpus(io.BytesIO(planted_text().encode()))


def quietly(corpus, **changes):
    return train(corpus, progress=False, **{**QUICK, **changes})


def test_seed_decides_every_bit(corpus):
    first, second, other = (quietly(corpus, seed=seed, sample=0.01) for seed in (7, 7, 8))
    assert first.matrix.tobytes() == second.matrix.tobytes()
    assert first.matrix.tobytes() != other.matrix.tobytes()


def test_memories_give_the_same_bits(corpus, tmp_path):
    pageable = quietly(corpus, memory="pageable")
    mapped = quietly(corpus, memory="mmap", path=tmp_path / "tables")
    assert pageable.matrix.tobytes() == mapped.matrix.tobytes()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("adamw", "adagrad", "sgd") else pytest.mark.slow) for name in DEFAULT_LR],
)
def test_every_default_learning_rate_learns(corpus, name):
    settings = Settings(**{**QUICK, "epochs": 6, "block_words": 1024, "shared_negatives": 128, "optimizer": name})
    trainer = Trainer(corpus, settings)
    trainer.train_step()
    assert 0.8 < trainer.loss / (6 * np.log(2)) < 1  # six scores of zero a pair, which fall while they are measured
    trainer.run(TrainingProgress(enabled=False))
    after = trainer.model.deposit_gradients(trainer.sampler.block(0))
    assert float(after.loss) / int(after.num_pairs) < 0.9 * 6 * np.log(2)


FUSED = [
    ("adam", {}),
    ("adamw", {}),
    ("adagrad", {}),
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("adam", {"amsgrad": True}),
]


@pytest.mark.parametrize(("name", "options"), FUSED)
def test_fused_kernels_train_as_single_calls_do(corpus, name, options):
    fused, single = (
        Trainer(corpus, Settings(**{**QUICK, "epochs": 1, "optimizer": name, "options": {**options, **choice}}))
        for choice in ({}, {"foreach": False})
    )
    assert fused.optimizer.param_groups[0]["fused"]
    assert not single.optimizer.param_groups[0]["fused"]
    for trainer in (fused, single):
        trainer.run(TrainingProgress(enabled=False))
    ours, theirs = fused.vectors().matrix, single.vectors().matrix
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
    assert np.abs(ours).max() > 0.1


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("adamw", {"fused": False}, torch.float32),
        ("adamw", {"foreach": True}, torch.float32),
        ("adam", {"differentiable": True}, torch.float32),
        ("adam", {}, torch.float64),
        ("rmsprop", {}, torch.float32),
    ],
)
def test_not_fused(name, options, dtype):
    optimizer = make_optimizer(name, [torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype))], options=options)
    assert not optimizer.param_groups[0].get("fused")


def test_kernel_that_a_device_lacks(monkeypatch):
    def step(self, closure=None):
        if self.param_groups[0]["fused"]:
            raise NotImplementedError("no fused kernel of it here")

    monkeypatch.setattr(torch.optim.Adagrad, "step", step)
    param = torch.nn.Parameter(torch.zeros(2, 2))
    assert not make_optimizer("adagrad", [param]).param_groups[0]["fused"]


def test_adamw_does_not_decay_by_default():
    param = [torch.nn.Parameter(torch.zeros(1))]
    assert make_optimizer("adamw", param).param_groups[0]["weight_decay"] == 0
    assert make_optimizer("adamw", param, options={"weight_decay": 0.1}).param_groups[0]["weight_decay"] == 0.1
    assert make_optimizer("adam", param, lr=0.5).param_groups[0]["lr"] == 0.5
    assert Settings(optimizer="LBFGS").first_lr == FALLBACK_LR


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_learning_rate_falls_along_a_line(lr):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    for done, expected in ((0.0, 0.5), (0.5, 0.25), (1.0, 0.5 * LR_END)):
        set_lr(optimizer, 0.5, done)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(expected)
    assert isinstance(optimizer.param_groups[0]["lr"], type(lr))


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS"])
def test_optimizers_that_do_not_work_row_by_row(corpus, name):
    with pytest.raises(OptimizerError):
        quietly(corpus, optimizer=name)


def test_learning_rate_that_blows_up(corpus):
    with pytest.raises(InvalidValueError, match=r"lr=1e\+20 is too large for sgd: the loss is (nan|inf) at step"):
        quietly(corpus, optimizer="sgd", lr=1e20, epochs=9)


def test_subsampling_that_leaves_nothing():
    with pytest.raises(
        InvalidValueError, match=r"sample=1e-09 leaves no two words in any of 2 blocks.*0 to keep every word"
    ):
        quietly(io.BytesIO(b"a b a b a b a b a b"), sample=1e-9)


@pytest.mark.parametrize("model", ["skipgram", "cbow"])
def test_lines_of_one_word_each(model):
    with pytest.raises(InvalidValueError, match=r"each of the 20 lines or walks has one word .*pass kind='text'"):
        quietly(io.BytesIO(b"a\nb\n" * 10), kind="lines", model=model)


def test_no_step_after_the_last(corpus):
    trainer = Trainer(corpus, Settings(**{**QUICK, "epochs": 1}))
    trainer.run(TrainingProgress(enabled=False))
    with pytest.raises(InvalidValueError, match=r"all .* steps are done"):
        trainer.train_step()


@pytest.mark.parametrize("buckets", [0, 30])
def test_vectors_of_the_frequent_words_leave_the_others_alone(corpus, buckets, monkeypatch):
    trainer = Trainer(corpus, Settings(**QUICK, buckets=buckets))
    whole, asked = trainer.vectors(), []
    word_vectors = trainer.model.word_vectors
    monkeypatch.setattr(trainer.model, "word_vectors", lambda *some: asked.append(some) or word_vectors(*some))
    few = trainer.vectors(5)
    assert asked == [(5,)]
    assert few.words == whole.words[:5]
    assert np.array_equal(few.matrix, whole.matrix[:5])


def test_facts_about_a_run(corpus):
    trainer = Trainer(corpus, Settings(**QUICK))
    assert np.isnan(trainer.loss)
    trainer.run(TrainingProgress(enabled=False))
    assert trainer.step == trainer.num_steps == 2 * len(trainer.sampler)
    assert (trainer.epoch, trainer.interrupted) == (2, False)
    assert trainer.words_per_s == pytest.approx(2 * 12_000 / trainer.elapsed_s)
    gathered, scattered = trainer.moved_bytes
    # Each step moves at least the 48 rows of each table, weights and two planes of state, four bytes a number.
    assert scattered > trainer.num_steps * 2 * 40 * 16 * 4 * 3
    assert gathered > scattered / 2
    assert json.loads(json.dumps(trainer.settings.as_dict()))["lr"] == DEFAULT_LR["adamw"]


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


class AtStep(Callback):
    """A callback that does something after a step."""

    def __init__(self, step, act):
        self.step, self.act, self.finished = step, act, 0

    def after_step(self, trainer):
        if trainer.step == self.step:
            self.act()

    def finish(self, trainer):
        self.finished += 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_vectors(corpus, capsys, number, fresh_signals):
    trainer = Trainer(corpus, Settings(**{**QUICK, "epochs": 1000}))
    callback = AtStep(3, lambda: signal.raise_signal(number))
    trainer.run(TrainingProgress(enabled=False), [callback])
    assert (trainer.interrupted, trainer.stop_signal, callback.finished) == (True, number, 1)
    assert trainer.step == 3
    assert trainer.vectors().matrix.any()
    by = {signal.SIGINT: "stopped at 0%", signal.SIGTERM: "stopped by SIGTERM at 0%"}[number]
    again = " again" if number == signal.SIGINT else ""
    err = capsys.readouterr().err
    assert err.startswith(by)
    assert f"the vectors so far are kept; Ctrl-C{again} aborts" in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    trainer.run(TrainingProgress(enabled=False), [AtStep(5, lambda: signal.raise_signal(number))])
    assert trainer.step == 5, "a second run of the trainer is not stopped by the signal of the first"


def test_sigterm_ends_a_program_that_calls_train(corpus, tmp_path, fresh_signals, monkeypatch, capsys):
    """With its checkpoint saved; Ctrl-C is for whoever sits before the program, and gives the vectors so far."""
    step = Trainer.train_step

    def train_step(self):
        step(self)
        if self.step == 3:
            signal.raise_signal(number)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    number = signal.SIGTERM
    with pytest.raises(SystemExit) as exit:
        quietly(corpus, epochs=2, checkpoint=tmp_path / "point")
    assert exit.value.code == 143
    assert f"checkpoint in {str(tmp_path / 'point')!r}: resume it" in capsys.readouterr().err
    number = signal.SIGINT
    assert len(quietly(corpus, epochs=2)) == len(corpus.vocabulary)
    monkeypatch.undo()
    resumed = quietly(corpus, epochs=2, checkpoint=tmp_path / "point", resume=True)
    assert "resumed at 3% (epoch 1 of 2) from " in capsys.readouterr().err
    assert resumed.matrix.tobytes() == quietly(corpus, epochs=2).matrix.tobytes()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_request_to_stop_aborts(first, fresh_signals):
    with pytest.raises(KeyboardInterrupt), StopOnSignal() as stop:  # noqa: PT012
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)  # `timeout` sends two
        assert stop.requested == first
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_reaches_all_that_are_entered(fresh_signals):
    with StopOnSignal() as outer:
        with StopOnSignal() as inner:
            signal.raise_signal(signal.SIGTERM)
        with StopOnSignal() as late:
            assert (outer.requested, inner.requested, late.requested) == (signal.SIGTERM,) * 3
        signal.raise_signal(signal.SIGTERM)
    with StopOnSignal() as other:
        assert other.requested is None


def test_signals_that_somebody_else_handles_or_ignores_are_left_alone(fresh_signals):
    seen = []
    signal.signal(signal.SIGTERM, lambda *args: seen.append(args))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for background jobs of a script
    with StopOnSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert (len(seen), stop.requested) == (1, None)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_training_leaves_a_core_to_the_thread_that_draws_blocks():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with trainer_module._leave_a_core(torch.device("cpu")):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
        with trainer_module._leave_a_core(torch.device("cuda")):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_training_in_another_thread(corpus):
    results = []
    thread = threading.Thread(target=lambda: results.append(quietly(corpus, epochs=1)))
    thread.start()
    thread.join()
    assert len(results) == 1


# --- progress ---------------------------------------------------------------------------------------------------------


def test_lines_where_there_is_no_terminal(corpus, monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    train(io.BytesIO(planted_text().encode()), **QUICK)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "reading: 12,000 words"  # the very last word comes when the text is known to end
    assert lines[2].startswith("epoch 1/2  ")
    for part in ("words/s", "loss 4.1", " left", "%"):
        assert part in lines[2]


def test_bar_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140)
    with TrainingProgress(console=console) as progress:
        progress.reading(1234)
        progress.training("epoch 2/5", 0.25, 123_456.0, 2.5, 61.0)
        progress.log("a line")
    shown = out.getvalue()
    for part in ("epoch 2/5", "123,456 words/s", "loss 2.500", "25%", "a line"):
        assert part in shown


def test_lines_on_a_terminal_that_draws_no_bar(monkeypatch):
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    with TrainingProgress(console=Console(file=out, force_terminal=True, width=140)) as progress:
        progress.training("epoch 2/5", 0.25, 123_456.0, 2.5e17, 61.0)
    assert out.getvalue() == "epoch 2/5  25%  123,456 words/s  loss 2.5e+17  0:01:01 left\n"


def test_vectors_that_are_not_finite_are_not_returned(corpus):
    """The steps are so few that the loss is measured at the first only."""
    with pytest.raises(
        InvalidValueError, match=r"lr=1e\+38 is too large for adagrad: there are vectors that are not finite"
    ):
        quietly(corpus, optimizer="adagrad", lr=1e38, options={"eps": 1e-30}, epochs=2, block_words=2000)


# --- runs that train nothing ------------------------------------------------------------------------------------------


def test_a_loss_at_chance_is_reported(corpus, caplog):
    quietly(corpus, lr=1e-9, epochs=2, block_words=200)
    assert caplog.messages[1:] == [
        "the loss ended at 4.159 and that of vectors which know nothing is 4.159: little was learnt; pass more epochs than 2, "
        "a smaller block_words, or a larger lr than 1e-09"
    ]


def test_running_losses_survive_a_break(corpus, tmp_path, caplog):
    settings = {**QUICK, "lr": 1e-9, "epochs": 4, "block_words": 64}
    stopped = Trainer(corpus, Settings(**settings))
    for _ in range(150):
        stopped.train_step()
    resumed = Trainer(corpus, Settings(**settings))
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert resumed.state() == stopped.state()
