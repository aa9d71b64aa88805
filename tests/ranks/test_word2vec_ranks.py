"""word2vec of several processes: each has a part of the vocabulary, and blocks of its own, of one corpus or of its part."""

import collections
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hosts import end, torchrun
from test_word2vec_resume import BreakAt, BreakError

from ranks.pair import told
from ranks.run import on
from speedtransfer.errors import InvalidValueError
from speedtransfer.ranks import exchange_of, world
from speedtransfer.word2vec import Corpus, Settings, train
from speedtransfer.word2vec import trainer as trainer_module
from speedtransfer.word2vec.gradients import block_gradients
from speedtransfer.word2vec.optimizers import set_lr
from speedtransfer.word2vec.run_folder import train_into
from speedtransfer.word2vec.trainer import Trainer
from speedtransfer.word2vec.vectors import Vectors

# --- a part of the corpus for each -------------------------------------------------------------------------------------

QUICK = {
    "dim": 8,
    "epochs": 2,
    "block_words": 128,
    "min_count": 2,
    "sample": 0,
    "shared_negatives": 32,
    "device": "cpu",
}


@pytest.fixture
def pattern(tmp_path):
    """Write files of several sizes, and the counts of their words; return a pattern of them."""
    draw, counts = random.Random(1), collections.Counter[str]()
    for i, size in enumerate((3000, 900, 100, 50, 1500)):
        words = [f"w{int(draw.paretovariate(0.7))}" for _ in range(size)]
        counts.update(words)
        (tmp_path / f"part{i}.txt").write_text(" ".join(words))
    (tmp_path / "counts.tsv").write_text("word\tcount\n" + "".join(f"{word}\t{n}\n" for word, n in counts.items()))
    return str(tmp_path / "part*.txt")


def divided(pattern, **settings):
    return Corpus(pattern, settings=Settings(**QUICK, divide=True, **settings))


def read_parts(pattern):
    counts = str(Path(pattern).with_name("counts.tsv"))
    found = []
    for settings in ({}, {"max_words": 9}, {"vocabulary": counts}):
        corpus = divided(pattern, **settings)
        sizes = corpus.num_words, corpus.num_raw_words
        found.append((corpus.vocabulary.words, corpus.vocabulary.counts.tolist(), *sizes, corpus.ids.tolist()))
    trainer = Trainer(corpus, Settings(**QUICK))
    blocks = [trainer._block_of(step) for step in range(trainer.num_steps)]
    return [found, corpus.fingerprint(), blocks, 2 * len(trainer.sampler)]


def test_each_reads_its_part_and_counts_are_of_all(three, pattern):
    ranks = three(read_parts, pattern)
    for place, settings in enumerate(({}, {"max_words": 9}, {})):
        whole = divided(pattern, **settings)
        ids = []
        for found, *_ in ranks:
            words, counts, num_words, num_raw_words, own = found[place]
            assert (words, counts) == (whole.vocabulary.words, whole.vocabulary.counts.tolist())
            assert (num_words, num_raw_words) == (len(whole), whole.num_raw_words)
            ids += own
        assert sorted(ids) == sorted(whole.ids.tolist())
    assert [len(found[0][-1]) for found, *_ in ranks] == sorted(
        (len(found[0][-1]) for found, *_ in ranks), reverse=True
    )
    assert ranks[0][1] == ranks[1][1] == ranks[2][1]
    for _, _, blocks, own_blocks in ranks:
        # All end together, and each trains on all of its blocks, spread over the run.
        assert len(blocks) == max(each[-1] for each in ranks)
        assert [block for block in blocks if block is not None] == list(range(own_blocks))
        assert abs(blocks[: len(blocks) // 2].count(None) - blocks.count(None) / 2) <= 1


def broken_off_and_resumed(pattern, folder):
    """Train to the end; without sending ids ahead; and to a break and on; return the vectors of each, and an error."""
    options = {**QUICK, "progress": False}
    whole = train(divided(pattern), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "prefetch", lambda blocks, *_, **__: blocks)
        waiting = train(divided(pattern), **options)
    point = Path(folder) / "point"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_is_stopped", lambda self, stop: BreakAt(13).after_step(self))
        with pytest.raises(BreakError):
            train(divided(pattern), checkpoint=point, checkpoint_every=6, divide=True, **options)
    resumed = train(divided(pattern), checkpoint=point, resume=True, divide=True, **options)
    output = Path(folder) / "run"
    settings = Settings(**QUICK, divide=True)
    train_into(output, pattern, settings, "bin", quiet=True)
    return [np.array(vectors.matrix) for vectors in (whole, waiting, resumed, Vectors.load(output / "vectors.bin"))]


def test_a_divided_run_has_the_same_bits_in_all_ways(two, pattern, tmp_path):
    ranks = two(broken_off_and_resumed, pattern, str(tmp_path))
    for matrix in [*ranks[0], *ranks[1]]:
        np.testing.assert_array_equal(matrix, ranks[0][0])
    for words in ("is one of 2 processes but there are 1", "divide is False but the checkpoint .* was made with True"):
        quiet = {**QUICK, "progress": False, "divide": "processes" in words}
        with pytest.raises(InvalidValueError, match=words):
            train(pattern, checkpoint=tmp_path / "point", resume=True, **quiet)


def trained_by_the_first(pattern, options):
    settings = Settings(**QUICK, **options)
    trainer = Trainer(Corpus(pattern, settings=settings), settings)
    trainer.num_steps = len(trainer.sampler)
    trainer._block_of = lambda step: None if world() is not None and dist.get_rank() else step
    while trainer.step < trainer.num_steps:
        trainer.train_step()
    return trainer.vectors().matrix.copy()


# Else the eps of AdamW in several processes is larger.
@pytest.mark.parametrize(
    "options",
    [
        {"options": {"eps": 10.0}},
        {"options": {"eps": 10.0}, "memory": "shared"},
        {"model": "cbow", "optimizer": "adagrad"},
        {"options": {"eps": 10.0}, "buckets": 50},
    ],
    ids=str,
)
def test_steps_without_words_change_nothing(two, pattern, options):
    """Also several of them, and the first."""
    alone = trained_by_the_first(pattern, {name: value for name, value in options.items() if name != "memory"})
    for matrix in two(trained_by_the_first, pattern, options):
        np.testing.assert_array_equal(matrix, alone)


def some_steps(pattern, count=6):
    trainer = Trainer(Corpus(pattern, settings=Settings(**QUICK)), Settings(**QUICK))
    for _ in range(count or trainer.num_steps):
        trainer.train_step()
    return trainer.vectors().matrix.copy()


def adaptively_added(parts):
    """Return the sum of gradients (n, dim) of the same rows, as the paper of Adasum has it, row by row and in float64."""
    made = []
    for total, *others in zip(*(part.double() for part in parts), strict=True):
        for other in others:
            if total.any() and other.any():
                along = float(total @ other)
                total = (1 - along / (2 * float(total @ total))) * total + (
                    1 - along / (2 * float(other @ other))
                ) * other
            else:
                total = total + other
        made.append(total)
    return torch.stack(made)


def test_what_three_learn_apart_is_added_adaptively(three, pattern):
    """As in one process that trains three blocks from the same rows; with AdamW's eps and rate of several processes."""
    settings = Settings(**QUICK, lr=30.0, options={"eps": 1000.0})
    trainer = Trainer(Corpus(pattern, settings=settings), settings)
    model, optimizer, sampler = trainer.model, trainer.optimizer, trainer.sampler
    num_blocks = settings.epochs * len(sampler)
    for step in range(6):
        share = step / -(-num_blocks // 3)
        set_lr(optimizer, 30.0, share)
        tables = {model.input: list[torch.Tensor](), model.output: list[torch.Tensor]()}
        rows = [table.weight.detach().clone() for table in tables]
        for number in range(3 * step, 3 * step + 3):
            places = model.prepare(sampler.block(number)).places
            found = [places.bags.rows.ids, places.outputs.ids]
            made = block_gradients(
                *(some[ids] for some, ids in zip(rows, found, strict=True)), places, rate=0.03 * (1 - share)
            )
            for parts_, ids, grad in zip(tables.values(), found, (made.center, made.context), strict=True):
                parts_.append(torch.zeros_like(rows[0]).index_copy_(0, ids, grad))
        for table, grads in tables.items():
            ids = torch.stack([grad.any(1) for grad in grads]).any(0).nonzero()[:, 0]
            table.activate(ids).add_grad(adaptively_added([grad[ids] for grad in grads]).float())
        optimizer.step()
        optimizer.zero_grad()
    expected = trainer.vectors().matrix
    for matrix in three(some_steps, pattern):
        np.testing.assert_allclose(matrix, expected, rtol=1e-4, atol=1e-6)


@on(2)
def test_both_tables_of_a_block_are_asked_together(pattern):
    """Ids ahead, which nobody waits for; then a meeting and rows, a meeting and gradients."""
    trainer = Trainer(divided(pattern), Settings(**QUICK))
    traffic = exchange_of(world()).traffic
    for _ in range(3):
        trainer.train_step()
    before = traffic.calls
    for _ in range(10):
        trainer.train_step()
    assert traffic.calls - before == 50


# --- refused in all processes -------------------------------------------------------------------------------------------


# What is done in each process, and words of what both say.
REFUSED = r"""
divided(f"{folder}/own0.txt") -> InvalidValueError: .*own0.txt' has 1 files but 2 processes are to divide them; split
divided(f"{folder}/{('own', 'none')[rank]}*.txt") -> none.*' does not exist|rank 1 failed where it reads a corpus
divided([f"{folder}/own0.txt", f"{folder}/own{1 - rank}.txt"])
-> DifferenceError: .* reads a corpus: rank 0: 2 files to divide, .*; rank 1: 2 files
divided([f"{folder}/own0.txt", f"{folder}/damaged.txt"]) -> damaged.txt' is no text: byte 4 is NUL|failed where it reads
divided([f"{folder}/own0.txt", f"{folder}/unknown.txt"], max_words=6)
-> InvalidValueError: the part of process 1 has no word of the vocabulary
divided("-") -> divide is for files but the corpus is '-'
Trainer(Corpus(f"{folder}/own0.txt"), Settings()) if rank else divided(f"{folder}/own*.txt")
-> DifferenceError: the processes are out of step: .*rank 1: reads a corpus .*: a corpus of 240 words
Trainer(Corpus(f"{folder}/own{rank}.txt", 1), Settings(dim=4, min_count=1))
-> DifferenceError: .*rank 0: a corpus of 240 words and 6 .*rank 1: a corpus of 246 .* with divide=True
""".replace("\n->", " ->")


def refused(folder):
    """Return the calls whose refusal is not as it should be, and what was said."""
    names = globals() | {"folder": folder, "rank": dist.get_rank()}
    Path(folder, f"own{dist.get_rank()}.txt").write_text("a b c d e f " * (40 + dist.get_rank()))
    dist.barrier()
    lines = [line.split(" -> ") for line in REFUSED.strip().splitlines()]
    found = [(call, words, told(lambda call=call: eval(call, names))) for call, words in lines]
    return {call: said for call, words, said in found if not re.search(words, said)}


def test_what_cannot_be_divided_is_refused_in_all(two, tmp_path):
    (tmp_path / "damaged.txt").write_bytes(b"a b \0")
    (tmp_path / "unknown.txt").write_text("q r s")
    assert two(refused, str(tmp_path)) == [{}, {}]


@on(2)
def test_an_open_file_is_a_part(pattern):
    with open(pattern.replace("*", str(dist.get_rank())), "rb") as file:
        assert divided(file).num_raw_words == 3900


# --- started by a launcher ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_word2vec_joins_what_a_launcher_starts(two, pattern, tmp_path):
    path, run = pattern.replace("*", "0"), tmp_path / "run"
    options = "--dim 8 --epochs 2 --block-words 128 --min-count 2 --sample 0 --shared-negatives 32 --device cpu"
    command = ["-m", "speedtransfer", "word2vec", "train", path, *options.split(), "-o", str(run)]
    printed = end(torchrun("--standalone", *command, processes=2, folder=tmp_path))
    assert printed.count("vectors: ") == 1
    for matrix in two(some_steps, path, None):
        np.testing.assert_array_equal(Vectors.load(run / "vectors.txt").matrix, matrix)
