"""Training learns, repeats bit for bit, takes any optimizer, stops on a signal, and reports runs that train nothing."""

import io
import math
import re
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from weight_world import defaults

from speedtransfer.errors import InvalidValueError
from speedtransfer.word2vec import Corpus, Settings, Trainer, train
from speedtransfer.word2vec import progress as progress_module
from speedtransfer.word2vec.optimizers import DEFAULT_LR, FALLBACK_LR, default_lr, make_optimizer, options_apart
from speedtransfer.word2vec.progress import (
    FEW_STEPS,
    Losses,
    StopOnSignal,
    TrainingProgress,
    warning_of_few_steps,
    warning_of_loss,
    warning_of_rate,
    warning_of_vectors,
)
from speedtransfer.word2vec.sampler import choose_schedule
from speedtransfer.word2vec.trainer import Callback

TOPICS, WORDS_A_TOPIC = 6, 8
QUICK = {"dim": 16, "epochs": 2, "block_words": 256, "shared_negatives": 64, "sample": 0, "device": "cpu"}
CHANCE = 6 * math.log(2)  # six scores of zero a pair
BASE_RATE = math.log(6) + 5 * math.log(6 / 5)  # the loss of who knows only that one in six pairs is real
QUIET = TrainingProgress(enabled=False)


def planted_text(num_words=12_000, topics=TOPICS):
    """Sentences of ten words, each sentence from one topic; words t<topic>_<number>."""
    rng = np.random.default_rng(0)
    drawn = np.repeat(rng.integers(0, topics, num_words // 10), 10)
    numbers = rng.integers(0, WORDS_A_TOPIC, len(drawn))
    return " ".join(f"t{topic}_{number}" for topic, number in zip(drawn, numbers, strict=True)).encode()


@pytest.fixture(scope="module")
def corpus():
    return Corpus(io.BytesIO(planted_text()))


def quietly(corpus, **changes):
    return train(corpus, progress=False, **{**QUICK, **changes})


def test_seed_decides_every_bit_and_memory_none(corpus, tmp_path):
    first, second, other = (quietly(corpus, seed=seed, sample=0.01, epochs=1) for seed in (7, 7, 8))
    mapped = quietly(corpus, seed=7, sample=0.01, epochs=1, memory="mmap", path=tmp_path / "tables")
    with defaults(torch.float64):
        wide = quietly(corpus, seed=7, sample=0.01, epochs=1)
    assert first.matrix.tobytes() == second.matrix.tobytes() == mapped.matrix.tobytes() == wide.matrix.tobytes()
    assert first.matrix.tobytes() != other.matrix.tobytes()


def test_facts_about_a_run(corpus):
    trainer = Trainer(corpus, Settings(**QUICK))
    assert np.isnan(trainer.loss)
    trainer.run(QUIET)
    assert trainer.step == trainer.num_steps == 2 * len(trainer.sampler)
    assert (trainer.epoch, trainer.interrupted) == (2, False)
    assert trainer.words_per_s == pytest.approx(2 * 12_000 / trainer.elapsed_s)
    gathered, scattered = trainer.moved_bytes
    # Each step moves at least the 48 rows of each table, weights and two planes of state, four bytes a number.
    assert scattered > trainer.num_steps * 2 * 40 * 16 * 4 * 3
    assert gathered > scattered / 2
    with pytest.raises(InvalidValueError, match=r"all .* steps are done"):
        trainer.train_step()


# --- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("adamw", "sgd"))) for n in DEFAULT_LR]
)
def test_every_default_learning_rate_learns(corpus, name):
    settings = Settings(**{**QUICK, "epochs": 6, "block_words": 1024, "shared_negatives": 128, "optimizer": name})
    trainer = Trainer(corpus, settings)
    trainer.train_step()
    assert 0.8 < trainer.loss / CHANCE < 1  # scores of zero, which fall while they are measured
    trainer.run(QUIET)
    after = trainer.model.deposit_gradients(trainer.sampler.block(0))
    assert float(after.loss) / int(after.num_pairs) < 0.9 * CHANCE


def test_options_of_optimizers(monkeypatch):
    param = [torch.nn.Parameter(torch.zeros(1))]
    assert make_optimizer("adam", param).param_groups[0]["fused"]
    for choice in ("differentiable", "foreach"):
        assert not make_optimizer("adam", param, options={choice: True}).param_groups[0]["fused"]
    monkeypatch.setattr(torch.optim.Adagrad, "step", lambda self, closure=None: 1 / 0)  # it has no fused kernel here
    assert not make_optimizer("adagrad", param).param_groups[0]["fused"]
    assert make_optimizer("adamw", param).param_groups[0]["weight_decay"] == 0
    assert make_optimizer("adamw", param, options={"weight_decay": 0.1}).param_groups[0]["weight_decay"] == 0.1
    assert make_optimizer("adam", param, lr=0.5).param_groups[0]["lr"] == 0.5
    assert default_lr("one of a newer torch") == FALLBACK_LR


def test_options_of_several_processes():
    for name in ("adam", "AdamW", "rmsprop", "nadam", "radam"):
        lr = default_lr(name)
        assert options_apart(name, lr) == (pytest.approx(30), {"eps": 1000.0})
        assert options_apart(name, lr, {"eps": 5.0}) == (lr, {"eps": 5.0})
    assert options_apart("adamw", 0.6, {"weight_decay": 0.1}) == (
        pytest.approx(60),
        {"weight_decay": 0.1, "eps": 1000.0},
    )
    for name in ("adagrad", "adamax", "sgd", "adadelta"):
        assert options_apart(name, 0.1) == (0.1, None)
    chosen, parameters = Settings(lr=0.02), [torch.nn.Parameter(torch.zeros(1, 1))]
    apart = make_optimizer(chosen.optimizer, parameters, *options_apart(chosen.optimizer, chosen.first_lr))
    # In the numbers that the user has given, or may give.
    assert "lr=0.02 with eps=10 moves rows at 0.002" in warning_of_rate(chosen, apart)


# --- signals ----------------------------------------------------------------------------------------------------------


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
        quietly(corpus, checkpoint=tmp_path / "point")
    assert exit.value.code == 143
    assert f"checkpoint in {str(tmp_path / 'point')!r}: resume it" in capsys.readouterr().err
    number = signal.SIGINT
    assert len(quietly(corpus)) == len(corpus.vocabulary)
    monkeypatch.undo()
    resumed = quietly(corpus, checkpoint=tmp_path / "point", resume=True)
    assert "resumed at 3% (epoch 1 of 2) from " in capsys.readouterr().err
    assert resumed.matrix.tobytes() == quietly(corpus).matrix.tobytes()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_request_to_stop_aborts(first, fresh_signals):
    with pytest.raises(KeyboardInterrupt), StopOnSignal() as stop:  # noqa: PT012
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)  # `timeout` sends two
        assert stop.requested == first
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_somebody_else_handles_or_ignores_are_left_alone(fresh_signals):
    seen = []
    signal.signal(signal.SIGTERM, lambda *args: seen.append(args))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for background jobs of a script
    with StopOnSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert (len(seen), stop.requested) == (1, None)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


# --- progress ---------------------------------------------------------------------------------------------------------


def test_lines_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    train(io.BytesIO(planted_text()), **QUICK)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "reading: 12,000 words"  # the very last word comes when the text is known to end
    for part in ("epoch 1/2  ", "words/s", "loss 4.1", " left", "%"):
        assert part in lines[2]


def test_a_line_that_changes_on_a_terminal():
    out = io.StringIO()
    with TrainingProgress(console=Console(file=out, force_terminal=True, width=140)) as progress:
        progress.reading(1234)
        state = {"step": 25, "num_steps": 100, "epoch": 2, "epochs": 5, "elapsed_s": 61 / 3, "words_per_s": 123_456.0}
        progress.training(SimpleNamespace(**state, loss=2.5))
        progress.log("a line")
    for part in ("epoch 2/5", "123,456 words/s", "loss 2.5", "25%", "0:01:01 left", "a line"):
        assert part in out.getvalue()


# --- schedules --------------------------------------------------------------------------------------------------------

SCHEDULES = {0: (50, 32), 640: (50, 32), 1000: (32, 32), 12_799: (5, 32), 12_800: (5, 64), 1e12: (5, 16_384)}


def test_schedule():
    for num_kept_words, chosen in SCHEDULES.items():
        assert choose_schedule(num_kept_words, None, None) == chosen
    assert choose_schedule(1e12, None, None, 200) == (5, 16_384)
    assert choose_schedule(1_000_000, None, None, 4) == (5, 1024)
    assert choose_schedule(640, None, 5000, 4) == choose_schedule(640, None, 5000) == (50, 5000)
    assert choose_schedule(10_000, 100, None) == (100, 512)  # more epochs, larger blocks


def test_words_count_that_subsampling_keeps():
    text = " ".join(f"w{n}" for n in np.random.default_rng(0).integers(0, 50, 20_000))
    corpus = Corpus(io.BytesIO(text.encode()))
    # Of words that are 1 in 50 a threshold of 1e-3 keeps 0.05 + sqrt(0.05) = 27%.
    few = Trainer(corpus, Settings(dim=2, sample=1e-3, device="cpu"))
    assert (few.epochs, few.block_words) == (6, 32)
    trainer = Trainer(corpus, Settings(dim=2, sample=0, device="cpu"))
    assert trainer.settings == Settings(dim=2, sample=0, device="cpu", epochs=5, block_words=64)
    assert trainer.num_steps == 5 * math.ceil(20_000 / 64) == 5 * len(trainer.sampler)


def test_a_small_text_is_learnt_by_default(caplog):
    """In a thread other than the main one, which handles no signals."""
    trainer = Trainer(Corpus(io.BytesIO(planted_text(4000, topics=5))), Settings(dim=16, device="cpu"))
    used = Callback()
    used.after_step = lambda trainer: setattr(used, "threads", torch.get_num_threads())
    torch.set_num_threads(2)
    thread = threading.Thread(target=trainer.run, args=[QUIET, [used]])
    thread.start()
    thread.join()
    assert (caplog.messages, trainer.step) == ([], trainer.num_steps)
    assert used.threads == 1, "a core is left to the thread that draws blocks"
    assert trainer.loss < BASE_RATE - 0.1
    vectors = trainer.vectors()
    near = [other[:2] == word[:2] for word in vectors.words for other, _ in vectors.most_similar(word, 7)]
    assert np.mean(near) > 0.9


# --- runs that train nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (b"a b a b a b a b a b", {"sample": 1e-9}, r"in any of 2 blocks; .* larger sample than 1e-09 \(0: every"),
        (b"a\nb\n" * 10, {"kind": "lines"}, r"no word has another .* kind='text' for lines"),
        (planted_text(), {"optimizer": "sgd", "lr": 1e20, "epochs": 9}, r"lr=1e\+20 is too large for sgd: the loss is "),
        # The steps are so few that the loss is measured at the first only.
        (planted_text(), {"optimizer": "adagrad", "lr": 1e38, "options": {"eps": 1e-30}, "block_words": 2000},
         r"lr=1e\+38 is too large for adagrad: there are vectors that are not finite"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_train_raises_and_leaves_no_tables(text, settings, message, tmp_path):
    with pytest.raises(InvalidValueError, match=message):
        quietly(io.BytesIO(text), memory="mmap", path=tmp_path / "tables", **settings)
    assert not list(tmp_path.iterdir())


def test_few_steps(caplog):
    assert warning_of_few_steps(FEW_STEPS, 5, 2048) == ""
    assert "pass more epochs than 5, or a smaller block_words than 2048" in warning_of_few_steps(10, 5, 2048)
    train(io.BytesIO(b"one two three four five six\n" * 4), 4, min_count=1, sample=0, device="cpu", progress=False)
    assert caplog.messages == [warning_of_few_steps(50, 50, 32)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([CHANCE], ""),
        ([2.6] * 20, ""),  # learnt within the first block, while it was measured
        ([2.7] * 10 + [CHANCE] * 40, "little was learnt; pass more epochs than 5, .* or a larger lr than 0.03"),
        ([900.0] + [4.4] * 60, "know nothing is 4.159: little was learnt; pass a smaller lr than 0.03"),
    ],
)
def test_loss(values, expected):
    losses = Losses()
    for value in values:
        losses.add(value, 1)
    found = warning_of_loss(losses, Settings(lr=0.03), 5)
    assert re.search(expected, found) if expected else found == ""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr": 0.05, "optimizer": "sgd"}, ""),
        ({"lr": 0.06, "options": {"eps": 1.0}}, ""),
        ({"lr": 0.02, "optimizer": "rprop"}, ""),  # its steps are not a part of the gradient
        ({"lr": 0.02}, "lr=0.02 with eps=10 moves rows at 0.002, less than an eighth of the usual rate, 0.03; for that pass "
                       "lr=0.3, or drop lr"),
        ({"lr": 0.02, "model": "cbow"}, "the usual rate, 0.05; for that pass lr=0.5"),
        ({"lr": 0.5, "optimizer": "SGD"}, "lr=0.5 moves rows at 0.5, more than eight times the usual rate, 0.03"),
    ],
)  # fmt: skip
def test_rates_far_from_those_of_word2vec(settings, expected):
    chosen = Settings(**settings)
    parameters = [torch.nn.Parameter(torch.zeros(1, 1))]
    warning = warning_of_rate(chosen, make_optimizer(chosen.optimizer, parameters, chosen.first_lr, chosen.options))
    assert expected in warning
    assert bool(expected) == bool(warning)


def test_vectors_that_have_one_dimension_in_common_are_reported():
    """As AdamW made them with 64 shared negatives: a loss lower than that of good vectors, and words like any other."""
    vectors, settings = torch.randn(1000, 100, generator=torch.Generator().manual_seed(0)), Settings(dim=100)
    assert warning_of_vectors(vectors, settings) == ""
    vectors[:, 7] = 8
    warning = warning_of_vectors(vectors, settings)
    assert "39% of their squared length in common, in dimension 7" in warning
    assert "more shared_negatives than 512" in warning
    assert warning_of_vectors(torch.ones(5, 4), Settings(dim=4)) == ""  # so few that they say nothing
    assert warning_of_vectors(torch.zeros(5, 100), settings) == ""
