"""Arguments that word2vec refuses, before it reads or writes anything."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from refusals import Refusal, check_refused, refusals

from speedtransfer import word2vec
from speedtransfer.word2vec import Corpus, Vectors, Vocabulary
from speedtransfer.word2vec.places import Places
from speedtransfer.word2vec.plot import plot
from speedtransfer.word2vec.subwords import Subwords

CALLS = r"""
Settings(model="skip-gram") -> InvalidValueError: model is 'skip-gram', not one of its values; did you mean 'skipgram'
Settings(model=1) -> InvalidTypeError: model is 1 but must be a string; choose from skipgram, cbow
Settings(kind="grahp") -> InvalidValueError: kind is 'grahp', not one of its values; did you mean 'graph'
Settings(kind="what") -> InvalidValueError: choose from 'text', 'lines', 'graph', 'adjacency'
Settings(memory="pined") -> InvalidValueError: memory is 'pined', not one of its values; did you mean 'pinned'
Settings(memory="mmap") -> InvalidValueError: memory='mmap' needs path, the folder for the table files
Settings(memory="mmap", path="a\0b") -> InvalidValueError: path is .*not a path
Settings(memory="mmap", path="") -> InvalidValueError: path is '', not a path
Settings(path="tables") -> InvalidValueError: path is 'tables' but memory='auto' has no files
Settings(path=3) -> InvalidTypeError: path is 3 .* must be the path of a folder
Settings(dim=0) -> InvalidValueError: dim is 0 but must be at least 1
Settings(dim=1.5) -> InvalidTypeError: dim is 1.5 .* must be an integer
Settings(negative=0) -> InvalidValueError: negative is 0 but must be at least 1
Settings(window=0) -> InvalidValueError: window is 0 but must be at least 1
Settings(min_count=0) -> InvalidValueError: min_count is 0 but must be at least 1
Settings(max_words=1) -> InvalidValueError: max_words is 1 but must be at least 2
Settings(block_words=1) -> InvalidValueError: block_words is 1 but must be at least 2
Settings(shared_negatives=0) -> InvalidValueError: shared_negatives is 0 but must be at least 1
Settings(buckets=-1) -> InvalidValueError: buckets is -1 but must be at least 0
Settings(min_n=0) -> InvalidValueError: min_n is 0 but must be at least 1
Settings(min_n=7) -> InvalidValueError: min_n is 7 but must be at most max_n, 6; pass a smaller min_n or a larger
Settings(p=0) -> InvalidValueError: p is 0 but must be above 0; the default is 1
Settings(q=-1.0) -> InvalidValueError: q is -1.0 but must be above 0
Settings(q=20_000) -> InvalidValueError: q is 20000 but must be from 0.0001 to 10000; the default is 1
Settings(q=1e-300) -> InvalidValueError: q is 1e-300 but must be from 0.0001 to 10000
Settings(q=float("inf")) -> InvalidValueError: q is inf but must be finite
Settings(q="1") -> InvalidTypeError: q is '1' \(str\) but must be a number
Settings(walks=0) -> InvalidValueError: walks is 0 but must be at least 1
Settings(walk_length=1) -> InvalidValueError: walk_length is 1 but must be at least 2
Settings(phrases=-1) -> InvalidValueError: phrases is -1 but must be at least 0
Settings(phrases=1, kind="graph") -> InvalidValueError: phrases is 1 but must be 0 for kind='graph': nodes are no words
Settings(phrase_threshold=0) -> InvalidValueError: phrase_threshold is 0 but must be above 0; the default is 10
Settings(seed=-1) -> InvalidValueError: seed is -1 but must be at least 0
Settings(seed=1 << 63) -> InvalidValueError: must be below 2\*\*63
Settings(clip=0) -> InvalidValueError: clip is 0 but must be above 0
Settings(lr=10**400) -> InvalidValueError: lr is 1000.* but must be finite
Settings(lr=True) -> InvalidTypeError: lr is True \(bool\) but must be a number
Settings(optimizer="adamv") -> InvalidValueError: optimizer 'adamv' is not in torch.optim; did you mean 'adam'
Settings(optimizer="optimizer") -> InvalidValueError: optimizer 'optimizer' is not in torch.optim
Settings(optimizer=3) -> InvalidTypeError: optimizer is 3 but must be the name of one of torch.optim
Settings(options=[1]) -> InvalidTypeError: options is \[1\] but must be a dict by argument name
Settings(options={"lr": 1}) -> InvalidValueError: options holds lr=1, which is a setting of its own; pass it as lr
Settings(options={"betas": (0.9,)}) -> InvalidValueError: take betas=.0.9,.: it must be 2 numbers; pass .* betas=.0.9, 0.999.
Settings(options={"betas": {}}) -> InvalidValueError: AdamW does not take .*betas
Settings(options={"epss": 1}) -> InvalidValueError: AdamW has no option 'epss'; did you mean 'eps'
Settings(options={"momentun": 1}) -> InvalidValueError: AdamW has no option 'momentun'; choose from 'amsgrad', 'be
Settings(options={"fused": True, "foreach": True}) -> InvalidValueError: AdamW does not take .*cannot be `True`
train("not read", epoch=3) -> TypeError: 'epoch'.*did you mean 'epochs'
train("not read", vector_size=100) -> InvalidTypeError: argument 'vector_size'; gensim's 'vector_size' is 'dim' here
train("not read", optimizer="nadamax") -> InvalidValueError: not in torch.optim
train("not read", checkpoint=3) -> InvalidTypeError: checkpoint is 3 \(int\) but must be the path
train("not read", resume=True) -> InvalidValueError: resume was given but no checkpoint
train("not read", checkpoint_every=3) -> InvalidValueError: checkpoint_every was given but no checkpoint
train("not read", checkpoint="x", checkpoint_every=0) -> InvalidValueError: checkpoint_every is 0 but must be at least 1
train("not read", checkpoint="x", checkpoint_every=1.5) -> InvalidTypeError: checkpoint_every is 1.5
train("not read", tensorboard=3) -> InvalidTypeError: tensorboard is 3 \(int\) but must be the path
train("not read", tensorboard="\0") -> InvalidValueError: tensorboard is .*not a path
train("not read", evaluate=3) -> InvalidTypeError: evaluate is 3 but must be a path or a list of them
train("not read", evaluate=None) -> InvalidTypeError: evaluate is None but must be a path or a list of them
train("not read", evaluate=[3]) -> InvalidTypeError: evaluate is 3 \(int\) but must be the path
train("not read", evaluate=["\0"]) -> InvalidValueError: evaluate is .*not a path
train("not read", evaluate="set", evaluate_every=0) -> InvalidValueError: evaluate_every is 0 but must be above 0
train("not read", evaluate="set", evaluate_every="1") -> InvalidTypeError: evaluate_every is '1' but must be a number
train("not read", evaluate="set", evaluate_every=10**400) -> InvalidValueError: evaluate_every is 1000.* above 0
Corpus(Unread(), min_count=0) -> InvalidValueError: min_count is 0 but must be at least 1
Corpus(Unread(), windows=3) -> TypeError: unexpected keyword argument 'windows'
Corpus(Unread(), window=3) -> InvalidTypeError: unexpected keyword argument 'window'
Corpus(3) -> InvalidTypeError: corpus is a int but must be a path
Corpus("") -> InvalidValueError: corpus is '' but must be a path
Corpus("-") -> StorageError: corpus is '-' but the standard input is closed
Corpus("nowhere") -> StorageError: 'nowhere' does not exist; pass a text file
Corpus("here") -> InvalidValueError: holds no \.txt, \.gz, \.xz file
Corpus(io.StringIO("text")) -> InvalidTypeError: gives str but a corpus is bytes
corpus_of([0, 3]) -> InvalidValueError: ids\[1\] is 3 but must be from 0 to 2
corpus_of([0, 1, 1, 1, 1, 1, 1, 1, -1]) -> InvalidValueError: ids\[8\] is -1 but
corpus_of([]) -> InvalidValueError: ids is empty
corpus_of([[0], [1]]) -> InvalidTypeError: ids is int32 \(2, 1\) but must be a 1-D int32 array
corpus_of(np.array([0, 1])) -> InvalidTypeError: ids is int64 \(2,\) but must be a 1-D int32 array
corpus_of((0, 1)) -> InvalidTypeError: ids is tuple but must
corpus_of([0, 1], [0, 2]) -> InvalidValueError: starts must rise from 0 to below 2
corpus_of([0, 1], [1]) -> InvalidValueError: starts must rise
corpus_of([0, 1], [0, 0]) -> InvalidValueError: starts must rise
corpus_of([0, 1], []) -> InvalidValueError: starts must rise
corpus_of([0, 1], (0,)) -> InvalidTypeError: starts is tuple but must be a 1-D int64 array
Vocabulary("ab", [1, 1]) -> InvalidTypeError: words is 'ab' .* must be a list of words
Vocabulary(2, [1, 1]) -> InvalidTypeError: words is 2 .* must be a list of words
Vocabulary(["a", "b", "a"], [1, 1, 1]) -> InvalidValueError: word 'a' is there twice
Vocabulary(["a", "b"], [1]) -> InvalidValueError: counts have shape \(1,\) but there are 2 words
Vocabulary(["a", "b", "c"], [1, -2, 3]) -> InvalidValueError: the count of 'b' is -2 but must be at least 0
Vocabulary(["a", "b"], ["1", "2"]) -> InvalidTypeError: counts hold .* but are whole numbers
Vocabulary(["a", "b"], [1.5, 2.5]) -> InvalidTypeError: counts hold .* but are whole numbers
Vocabulary.from_counts({"a": 1, "b": 1}, min_count=0) -> InvalidValueError: min_count is 0 but must be at least 1
Vocabulary.from_counts({"a": 1, "b": 1}, 1, max_words=1) -> InvalidValueError: max_words is 1 but must be at least 2
Vocabulary.from_counts({}) -> InvalidValueError: holds no words but a model needs at least 2
Vocabulary.load(3) -> InvalidTypeError: path is a int but must be the path of a file
words.save(3) -> InvalidTypeError: path is a int but must be the path of a file
words.keep_probability(-1.0) -> InvalidValueError: sample is .* but must be at least 0
words.keep_probability(float("nan")) -> InvalidValueError: sample is .* but must be finite
words.keep_probability("1e-3") -> InvalidTypeError: sample is '1e-3' \(str\) but must be a number
Sampler(np.zeros(9, "i4"), words, window=0) -> InvalidValueError: window is 0 but must be at least 1
Sampler(np.array([0, 1], "i4"), Vocabulary(["a", "b"], [0, 0])) -> InvalidValueError: the counts of the vocabulary are all 0
Sampler(np.empty(0, "i4"), words) -> InvalidValueError: the corpus has no word of the vocabulary
Sampler(np.zeros(9, "i4"), words, shared_negatives=10**12)
-> HostMemoryError: shared_negatives=1000000000000 asks for .* a step but this machine has
Places.find(Block(*[torch.arange(3)] * 4, 3, window=1), 3, 1)
-> InvalidValueError: a context reaches 2 words but window is 1; pass window=2, or 0
model(0) -> InvalidValueError: vocabulary is 0 but must be at least 1
model(20, buckets=10) -> InvalidTypeError: vocabulary is 20 but n-grams \(buckets=10\) need the words
model(["a", "a"]) -> InvalidValueError: word 'a' is there twice
model(20, dim=0) -> InvalidValueError: dim is 0 but must be at least 1
model(20, path="here/file/tables") -> StorageError: cannot make folder
Word2Vec(20, 5, device="cpu").ngram_vectors() -> InvalidValueError: buckets is 0, so this model has no n-grams
Subwords(["word"], 0, 3, 6) -> InvalidValueError: buckets is 0 but must be at least 1
Subwords(["word"], (1 << 32) + 1, 3, 6) -> InvalidValueError: buckets is 4294967297 but the hash has 32 bits; pass at most
Subwords(["word"], 10, 0, 6) -> InvalidValueError: min_n is 0 but must be at least 1
Subwords(["word"], 10, 4, 3) -> InvalidValueError: max_n is 3 but min_n is 4; pass a max_n of at least 4
Subwords(["word"], 1.5, 3, 6) -> InvalidTypeError: buckets is 1.5 \(float\) but must be an integer
Subwords(["word"], 10, 3, "6") -> InvalidTypeError: max_n is '6'
NgramVectors(np.zeros((3, 2), "f4"), 4, 5)["a"] -> InvalidValueError: 'a' has no n-grams of 4 to 5 characters
NgramVectors(np.zeros(3, "f4")) -> InvalidValueError: matrix has shape \(3,\) but must be \(buckets, dim\)
NgramVectors(np.zeros((3, 2), "f4"), max_n=2) -> InvalidValueError: max_n is 2 but min_n is 3
NgramVectors(np.zeros((3, 2), "f4"), min_n=2.5) -> InvalidTypeError: min_n is 2\.5
NgramVectors(np.zeros((3, 2), "f4")).save("n.txt") -> InvalidValueError: ends in '\.txt' but n-gram vectors are \.safetensors
NgramVectors.load(3) -> InvalidTypeError: path is a int but must be the path of a file
Vectors(["a", "b"], np.zeros((3, 2), "f4")) -> InvalidValueError: there are 2 words; pass one row a word
Vectors(["a", "b"], np.zeros(2, "f4")) -> InvalidValueError: matrix has shape \(2,\)
Vectors(["a"], np.zeros((1, 2), "i8")) -> InvalidTypeError: matrix holds int64 but vectors are floating-point
Vectors(["a", "a"], np.eye(2)) -> InvalidValueError: word 'a' is there twice
Vectors(["a", "b"], np.eye(2), [3]) -> InvalidValueError: counts have shape \(1,\) but there are 2 words
Vectors(["a", "b"], np.eye(2), [1.5, 2]) -> InvalidTypeError: counts hold float64
Vectors(["a", 3], np.eye(2)) -> InvalidTypeError: words\[1\] is 3 \(int\) but words are strings
Vectors([["a"], "b"], np.eye(2)) -> InvalidTypeError: words\[0\] is \['a'\]
Vectors("ab", np.eye(2)) -> InvalidTypeError: words is 'ab' \(str\) but must be a list of words
Vectors(2, np.eye(2)) -> InvalidTypeError: words is 2 \(int\)
Vectors.load(None) -> InvalidTypeError: ^path is .* but must be the path of a file; pass one$
Vectors.load("set") -> InvalidValueError: 'set' .* but vectors are .txt, .vec, .bin, .safetensors
Vectors.load("no") -> StorageError: 'no' does not exist; pass a file of vectors, or the folder of a run
vectors.save(["x.txt"]) -> InvalidTypeError: ^path is .* but must be the path of a file; pass one$
vectors.save("v.xyz") -> InvalidValueError: ends in '.xyz' but vectors are .txt, .vec, .bin, .safetensors
vectors.most_similar("a", 0) -> InvalidValueError: topn is 0 but must be at least 1
vectors.most_similar() -> InvalidValueError: no words to start from
vectors.most_similar(np.ones(3)) -> InvalidValueError: a vector has shape \(3,\) but these have dim 2; pass shape \(2,\)
vectors.most_similar(3) -> InvalidTypeError: 3 .* is neither word nor vector
vectors.most_similar([1.0, 2.0]) -> InvalidTypeError: 1.0 .* is neither word nor vector
vectors.most_similar([["a"]]) -> InvalidTypeError: \['a'\] .* is neither word nor vector
vectors[7] -> InvalidTypeError: 7 is no word; pass a str or a list of them
vectors[[["a"]]] -> InvalidTypeError: \['a'\] is no word
vectors.rank(["a"], "b") -> InvalidTypeError: \['a'\] is no word
vectors.doesnt_match([]) -> InvalidValueError: is empty; pass at least one word
vectors.doesnt_match("a") -> InvalidTypeError: is 'a' but must be several words; pass a list of str
vectors.doesnt_match(["a", 3]) -> InvalidTypeError: 3 is no word; pass a str or a list of them
vectors.n_similarity([], ["a"]) -> InvalidValueError: first is empty; pass at least one word
vectors.n_similarity(["a"], "b") -> InvalidTypeError: second is 'b' but must be several words; pass a list of str
load_set(3) -> InvalidTypeError: path is a int but must be the path of a file
evaluate("vectors.bin", "set") -> InvalidTypeError: vectors is a str but must be Vectors; pass
evaluate(vectors, "set", 0) -> InvalidValueError: restrict_vocab is 0 but must be at least 1
evaluate(vectors, "set", 1.5) -> InvalidTypeError: restrict_vocab is 1\.5
plot(vectors, "words.jpg") -> InvalidValueError: ends in '.jpg' but the picture is a PNG
plot(vectors, "words.png", num_words=0) -> InvalidValueError: num_words is 0 but must be at least 1
plot(Vectors([], np.zeros((0, 3))), "words.png") -> InvalidValueError: there are no words to draw
plot(vectors, "no/words.png") -> StorageError: cannot write
"""


class Unread:
    def read(self, size):
        pytest.fail("read in spite of a bad argument")


def model(vocabulary, dim=5, **settings):
    memory = {"path": "tables", "memory": "mmap", "device": "cpu", **settings}
    return word2vec.Word2Vec(vocabulary, dim, **memory)


def corpus_of(ids, starts=None):
    """Lists stand for arrays of the right kind."""
    ids = np.array(ids, np.int32) if isinstance(ids, list) else ids
    starts = np.array(starts, np.int64) if isinstance(starts, list) else starts
    return Corpus.from_ids(ids, Vocabulary(["a", "b", "c"], [1, 1, 1]), starts)


NAMES = {
    **{name: getattr(word2vec, name) for name in word2vec.__all__}, "np": np, "torch": torch, "io": io, "plot": plot,
    "Subwords": Subwords, "Places": Places, "Unread": Unread, "model": model, "corpus_of": corpus_of,
}  # fmt: skip


@pytest.mark.parametrize("refusal", refusals(CALLS), ids=str)
def test_refused(refusal: Refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr("speedtransfer.word2vec.corpus.CHUNK_IDS", 7)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_text("x")
    (tmp_path / "set").write_text("a b 1\n")
    vectors = Vectors(["a", "b"], np.eye(2, dtype=np.float32))
    check_refused(refusal, vectors=vectors, words=Vocabulary(["a", "b"], [1, 1]), **NAMES)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "here", "set"]
