"""Arguments and files that are refused, in one line, before anything is written."""

import gzip
import io
import lzma
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from refusals import check_refused, refusals

from speedtransfer import word2vec
from speedtransfer.word2vec import Corpus, Vectors, Vocabulary
from speedtransfer.word2vec.commands import read_config
from speedtransfer.word2vec.places import Places
from speedtransfer.word2vec.plot import plot

CALLS = r"""
Settings(model="skip-gram") -> InvalidValueError: model is 'skip-gram', not one of its values; did you mean 'skipgram'
Settings(memory="mmap") -> InvalidValueError: memory='mmap' needs path, the folder for the table files
Settings(memory="mmap", path="a\0b") -> InvalidValueError: path is .*not a path
Settings(path="tables") -> InvalidValueError: path is 'tables' but memory='auto' has no files
Settings(dim=0) -> InvalidValueError: dim is 0 but must be at least 1
Settings(buckets=(1 << 32) + 1) -> InvalidValueError: buckets is 4294967297 but the hash has 32 bits; pass at most
Settings(min_n=7, buckets=9) -> InvalidValueError: max_n is 6 but min_n is 7; pass a max_n of at least 7
Settings(lr=0) -> InvalidValueError: lr is 0 but must be above 0
Settings(p=0) -> InvalidValueError: p is 0 but must be at least 0.0001 and at most 10000
Settings(phrases=1, kind="graph") -> InvalidValueError: phrases is 1 but must be 0 for kind='graph': nodes are no words
Settings(phrases=1, divide=True) -> InvalidValueError: divide is for text but phrases=1 needs all of it in a process
Settings(kind="lines", q=2) -> InvalidValueError: q is 2.* but only kind='graph' uses it; pass that, or drop q
Settings(max_n=4) -> InvalidValueError: max_n is 4 but only buckets uses it
Settings(phrase_threshold=1) -> InvalidValueError: phrase_threshold is 1.* but only phrases uses it
Settings(kind="graph", divide=True) -> InvalidValueError: divide is for text but kind='graph' needs all of it
Settings(divide=2) -> InvalidTypeError: divide is 2 but must be True or False
Settings(seed=1 << 63) -> InvalidValueError: must be below 2\*\*63
Settings(lr=10**400) -> InvalidValueError: lr is 1000.* but must be finite
Settings(optimizer="adamv") -> InvalidValueError: optimizer 'adamv' is not in torch.optim; did you mean 'adam'
Settings(optimizer="Adafactor") -> InvalidValueError: optimizer 'Adafactor' does not train row by row; choose from
Settings(options=[1]) -> InvalidTypeError: options is \[1\] but must be a dict by argument name
Settings(options={"lr": 1}) -> InvalidValueError: options holds lr=1, which is a setting of its own; pass it as lr
Settings(options={"epss": 1}) -> InvalidValueError: AdamW has no option 'epss'; did you mean 'eps'
Settings(options={"fused": True, "foreach": True}) -> InvalidValueError: AdamW does not take .*cannot be `True`
Settings(optimizer="sgd", options={"nesterov": "no"}) -> InvalidValueError: option nesterov of SGD is the text 'no'
train("not read", evaluate_every=-3) -> InvalidValueError: evaluate_every is -3 but must be above 0
train("not read", vector_size=100) -> TypeError: argument 'vector_size'; gensim's 'vector_size' is 'dim' here
train("not read", epoch=3) -> TypeError: 'epoch'.*did you mean 'epochs'
train("not read", checkpoint=3) -> InvalidTypeError: checkpoint is 3 \(int\) but must be the path
train("not read", resume=True) -> InvalidValueError: need a checkpoint, the folder; pass checkpoint
train("not read", checkpoint="x", checkpoint_every=0) -> InvalidValueError: checkpoint_every is 0 but must be at least 1
train("not read", evaluate=3) -> InvalidTypeError: evaluate is 3 but must be a path or a list of them
train("not read", evaluate="set", evaluate_every="1") -> InvalidTypeError: evaluate_every is '1' .str. but must be a number
Corpus(Unread(), min_count=0) -> InvalidValueError: min_count is 0 but must be at least 1
Corpus(Unread(), window=3) -> InvalidTypeError: unexpected keyword argument 'window'
Corpus(3) -> InvalidTypeError: corpus is a int but must be a path
Corpus("") -> InvalidValueError: corpus is '' but must be a path
Corpus("-") -> StorageError: corpus is '-' but the standard input is closed
Corpus("the text itself " * 500) -> StorageError: ^'the text.{190,200}' does not exist; pass a text file
Corpus(["-", "here/file"]) -> InvalidValueError: corpus is '-', standard input, beside other files
Corpus("nowhere") -> StorageError: 'nowhere' does not exist; pass a text file
Corpus("here") -> InvalidValueError: holds no \.txt, \.gz, \.xz, \.parquet file
Corpus(io.StringIO("text")) -> InvalidTypeError: gives str but a corpus is bytes
Vocabulary("ab", [1, 1]) -> InvalidTypeError: words is 'ab' .* must be a list of words
Vocabulary(["a", "b", "a"], [1, 1, 1]) -> InvalidValueError: word 'a' is there twice
Vocabulary(["a", "b"], [1]) -> InvalidValueError: counts have shape \(1,\) but there are 2 words
Vocabulary(["a", "b", "c"], [1, -2, 3]) -> InvalidValueError: the count of 'b' is -2 but must be at least 0
Vocabulary(["a", "b"], [1.5, 2.5]) -> InvalidTypeError: counts hold .* but are whole numbers
Sampler(np.array([0, 1], "i4"), Vocabulary(["a", "b"], [0, 0])) -> InvalidValueError: the counts of the vocabulary are all 0
Sampler(np.empty(0, "i4"), words) -> InvalidValueError: the corpus has no word of the vocabulary
Sampler(np.zeros(9, "i4"), words, Settings(shared_negatives=10**12))
-> HostMemoryError: shared_negatives=1000000000000 asks for .* a step but this machine has
Places.find(Block(*[torch.arange(3)] * 4, window=1), 3, 1)
-> InvalidValueError: a context reaches 2 words but window is 1; pass window=2, or 0
in_memory("abc").prepare(Block(*[torch.tensor([5, 0])] * 4)) -> RowIndexError: 5.*3
in_memory("abc").deposit_gradients(Block(*[torch.tensor([5, 0])] * 4)) -> RowIndexError: 5.*3
model([]) -> InvalidValueError: vocabulary is 0 but must be at least 1
model("abc", path="here/file/tables") -> StorageError: cannot make folder
Word2Vec("abc", Settings(device="cpu")).ngram_vectors() -> InvalidValueError: buckets is 0, so this model has no n-grams
NgramVectors([[1.0, 2.0]])[["a"]] -> InvalidTypeError: \['a'\] is no word; pass a str
NgramVectors([[1.0, 2.0]])["a\ud800"] -> InvalidValueError: word '<a\\ud800>' cannot be written as UTF-8
NgramVectors(np.zeros((3, 2), "f4"), 4, 5)["a"] -> InvalidValueError: 'a' has no n-grams of 4 to 5 characters
NgramVectors(np.zeros((3, 2), "f4")).save("n.txt") -> InvalidValueError: has the suffix '\.txt' but must end in \.safetensors
Vectors(["a", "b"], np.zeros((3, 2), "f4")) -> InvalidValueError: there are 2 words; pass one row a word
Vectors(["a"], np.zeros((1, 2), "i8")) -> InvalidTypeError: matrix holds int64 but vectors are floating-point
Vectors(["a", 3], np.eye(2)) -> InvalidTypeError: words\[1\] is 3 \(int\) but words are strings
Vectors.load(None) -> InvalidTypeError: ^path is .* but must be the path of a file; pass one$
vectors.most_similar("a", 0) -> InvalidValueError: topn is 0 but must be at least 1
vectors.most_similar() -> InvalidValueError: no words to start from
vectors.most_similar(np.ones(3)) -> InvalidValueError: a vector has shape \(3,\) but these have dim 2; pass shape \(2,\)
vectors.most_similar(3) -> InvalidTypeError: 3 .* is neither word nor vector
vectors[7] -> InvalidTypeError: 7 is no word; pass a str or a list of them
vectors.doesnt_match("a") -> InvalidTypeError: words is 'a' .* must be a list of words
vectors.n_similarity([], ["a"]) -> InvalidValueError: first is empty; pass at least one word
evaluate("vectors.bin", "set") -> InvalidTypeError: vectors is a str but must be Vectors; pass
plot(vectors, "words.jpg") -> InvalidValueError: ends in '.jpg' but the picture is a PNG
plot(Vectors([], np.zeros((0, 3))), "words.png") -> InvalidValueError: there are no words to draw
"""
# What files hold. A text of 2,000,000 letters is a word that does not end.
FILES = r"""
read_config("bad.toml") -> StorageError: cannot read 'bad.toml' \(No such file
read_config(file("bad.toml", "dims = 3")) -> InvalidValueError: config 'bad.toml' has 'dims', not a setting; did you mean 'dim'
read_config(file("bad.toml", "lr = nan")) -> InvalidValueError: config 'bad.toml': lr is nan but must be finite
read_config(file("bad.toml", "dim =\nlr = 1")) -> InvalidValueError: config 'bad.toml' is no TOML: .*line 1
read_config(file("s.json", "[" * 100_000)) -> InvalidValueError: 's.json' is no JSON with an object "settings": nested
read_config(file("s.json", "[]")) -> InvalidValueError: is no JSON with an object "settings": .*pass TOML, or the settings.json
Corpus(file("cut.gz", gzip.compress(b"word " * 10_000)[:-20])) -> StorageError: 'cut.gz' is damaged, or not packed as its name
Corpus(file("cut.xz", lzma.compress(b"word " * 10_000)[:-20])) -> StorageError: 'cut.xz' is damaged, or not packed as its name
Corpus(file("foreign.gz", "not packed at all")) -> StorageError: 'foreign.gz' is damaged, or not packed as its name says
read("") -> InvalidValueError: 'the given file' holds no words; pass a corpus with text in it
read("a a a a a a b b c") -> InvalidValueError: min_count=5 leaves 1 of 3 distinct words .* pass min_count=2 or less
read(b"some text\0more") -> InvalidValueError: is no text: byte 9 is NUL
read(b"cut short \xe6\x9d") -> InvalidValueError: is no UTF-8 text: unexpected end of data at byte 10
read(b"some \xe6\x9d\xb1 \xff") -> InvalidValueError: no UTF-8 text: invalid start byte at byte 9
read("x" * 2_000_000) -> InvalidValueError: holds a word of over 1048576 bytes
read("a b\n\nc\n", kind="graph") -> InvalidValueError: line 3 of .* has 1 fields, 'c', but an edge is 'node node' or .*; fix it
read("a b 1\na b c d\n", kind="graph") -> InvalidValueError: line 2 of .* 4 fields, 'a b c d', .* pass kind='adjacency'
read("a b c\n", kind="graph") -> InvalidValueError: line 1 of .* has the weight 'c' but a weight is a finite number above 0
read("# x\na b 0\n", kind="graph") -> InvalidValueError: line 2 of .* has the weight '0' but a weight is a finite number
read("a\nb\n", kind="adjacency") -> InvalidValueError: holds no edges
Vocabulary.load("no") -> StorageError: cannot read .*No such file
Vocabulary.load(file("vocab.txt", "the 3\nno count\n")) -> StorageError: line 2 .* word 'no' and the count 'count' but .*fix
Vocabulary.load(file("vocab.txt", "the 99999999999999999999\n")) -> StorageError: line 1 of .* but must be a word and a count
Vocabulary.load(file("vocab.txt", b"\xff\xfe 3\n")) -> StorageError: is not a whole file of words
read("a b", vocabulary=file("c.tsv", "")) -> StorageError: 'c.tsv' is empty; pass a table of words and counts
read("a b", vocabulary=file("c.tsv", f"a\t{1 << 62}\nb\t{1 << 62}\n")) -> StorageError: counts 9,223,372,036,854,775,808 words
read("a b", vocabulary=file("c.tsv", "a\t1\nb\t2\na\t3\n")) -> StorageError: line 3 of 'c.tsv' has the word 'a' again; add up
read("a b", vocabulary=file("c.tsv", "a\t1\nb\t0\n")) -> StorageError: line 2 of 'c.tsv' counts 'b' 0 times; leave it out
read("a b", vocabulary=file("c.tsv", "a\t-3\n")) -> StorageError: line 1 of 'c.tsv' is the word 'a' and the count '-3' but
read("a b", vocabulary=file("c.tsv", "new york\t3\n")) -> StorageError: line 1 .* the word 'new york' and the count 3 but
read("a b", vocabulary=file("c.tsv", "a\t3\nb\t9\n")) -> InvalidValueError: min_count=5 leaves 1 of 2 .* pass min_count=3 or
load_set("no") -> StorageError: cannot read .*check the path
load_set(file("s", b"a b 1\n\xff\xfe\n")) -> StorageError: can't decode byte 0xff
load_set(file("s", "")) -> StorageError: holds no lines to evaluate with
load_set(file("s", "a b 1\n\na b\n")) -> StorageError: line 3 .* is 'a b' but must be 'word word score', .*; fix it, or
load_set(file("s", "a\tb\t1\na\t\t2\n")) -> StorageError: line 2 of
load_set(file("s", "a b c d\n")) -> StorageError: line 1 of .* but must be ': section', as the first line of an analogy set is
load_set(file("s", ": one\na b c d\na b c\n")) -> StorageError: line 3 of .* is 'a b c' but must be four words or ': section'
load_set(file("s", ": one\n" + "x" * 500)) -> StorageError: line 2 of .* is 'x{60}' but must be
evaluate(vectors, file("s", "q r 1\nr s 2\n")) -> InvalidValueError: set 's' has 0 pairs .*; unknown are 'q', 'r', 's'; pass
evaluate(vectors, file("s", "a b 1\na a 1\n")) -> InvalidValueError: the scores of the 2 known pairs of set 's' are all 1
evaluate(vectors, file("s", "a a 1\nb b 2\n")) -> InvalidValueError: the cosines of the 2 known pairs of set 's' are all 1
evaluate(vectors, file("s", ": x\nq r s t\nu v a b\n")) -> InvalidValueError: has 0 questions .* unknown are 'q', .* and 1 more
Vectors.load("no.bin") -> StorageError: cannot read .*No such file
Vectors.load("no.safetensors") -> StorageError: cannot read .*No such file
Vectors.load(file("v.txt", "")) -> StorageError: line 1 of .* is no word2vec header
Vectors.load(file("v.txt", "1 99999999999999999999\n")) -> StorageError: promises vectors of 99999999999999999999 numbers
Vectors.load(file("v.txt", "2 2\na 1 2\nb 1\n      ")) -> StorageError: line 3 of .* \(1 numbers, not 2\)
Vectors.load(file("v.txt", b"2 2\na 1 2\n\xff\xfe 1 2\n")) -> StorageError: line 3 of .*can't decode
Vectors.load(file("v.txt", "2 2\na 1 2.000000000\n")) -> StorageError: promises 2 words in its first line but holds only 1
Vectors.load(file("v.txt", "1 2\na 1 2\nb 1 2\n")) -> StorageError: promises 1 words in its first line but holds more
Vectors.load(file("v.txt", "99999999999 100\na 1 2\n")) -> StorageError: is truncated: it has .* but its header promises
Vectors.load(file("v.txt", "2 1\na 1\na 2\n")) -> StorageError: holds no word vectors \(word 'a' is there twice\)
Vectors.load(file("v.bin", b"2 2\na 12345678b ")) -> StorageError: it has 16 bytes but its header promises at least 24
Vectors.load(file("v.bin", b"2 2\na 12345678\nlong_word 1234")) -> StorageError: ends or is damaged at word 2 of 2, byte 14
Vectors.load(file("v.safetensors", "rubbish that is long enough")) -> StorageError: is no \.safetensors file or is truncated
Vectors.load(stored(word_ends=np.array([2, 1]))) -> StorageError: no rising positions
Vectors.load(stored(word_ends=np.array([1, 9]))) -> StorageError: the words take 2 bytes but end elsewhere
Vectors.load(stored(other=np.array([1, 9]))) -> StorageError: is not a file of word vectors
Vectors.load(stored(word_ends=np.array([2]))) -> StorageError: holds 1 words but 2 vectors
Vectors.load(stored(word_ends=np.array([1, 2]), counts=np.array([1]))) -> StorageError: counts have shape
Vectors.load(stored(word_ends=np.array([1, 2]), vectors=np.zeros((2, 2), "i4"))) -> StorageError: matrix holds int32
named("").save("v.txt") -> InvalidValueError: is empty or holds white space.*save to \.safetensors
named("New York").save("v.glove") -> InvalidValueError: is empty or holds white space.*save to \.safetensors
named("a\nb").save("v.bin") -> InvalidValueError: is empty or holds white space.*save to \.safetensors
named("x\ud800").save("v.bin") -> InvalidValueError: word 'x\\ud800' cannot be written as UTF-8
named("x\ud800").save("v.safetensors") -> InvalidValueError: word 'x\\ud800' cannot be written as UTF-8
Vectors([], np.zeros((0, 3))).save("v.glove") -> InvalidValueError: without a header, needs a word .*; save to \.txt
Vectors(["a", "b"], [[1.0], [2]]).save("v.glove") -> InvalidValueError: without a header, needs a word and a dim of 2
named("b").save("no/v.txt") -> StorageError: cannot write
NgramVectors.load("no.safetensors") -> StorageError: cannot read
NgramVectors.load(stored()) -> InvalidValueError: has no tensor 'ngrams'
NgramVectors.load(stored(ngrams=np.zeros((3, 2), "f4"))) -> StorageError: is not a file that says min_n and max_n
"""


class Unread:
    def read(self, size):
        pytest.fail("read in spite of a bad argument")


def model(vocabulary, dim=5, **settings):
    memory = {"path": "tables", "memory": "mmap", "device": "cpu", **settings}
    return word2vec.Word2Vec(vocabulary, word2vec.Settings(dim=dim, **memory))


def in_memory(vocabulary):
    return word2vec.Word2Vec(vocabulary, word2vec.Settings(dim=5, device="cpu"))


def read(data, **settings):
    return Corpus(io.BytesIO(data if isinstance(data, bytes) else data.encode()), **settings)


def file(name, data):
    Path(name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return name


def stored(**tensors):
    vectors = {"vectors": np.zeros((2, 2), "f4"), "words": np.frombuffer(b"ab", "u1")}
    safetensors.numpy.save_file({**vectors, **tensors}, "v.safetensors")
    return "v.safetensors"


def named(word):
    return Vectors(["a", word], np.eye(2, dtype=np.float32))


NAMES = {
    **{name: getattr(word2vec, name) for name in word2vec.__all__}, "np": np, "torch": torch, "io": io, "plot": plot,
    "Places": Places, "Unread": Unread, "model": model, "read": read, "file": file,
    "stored": stored, "named": named, "read_config": read_config, "gzip": gzip, "lzma": lzma, "in_memory": in_memory,
}  # fmt: skip


@pytest.mark.parametrize("refusal", refusals(CALLS + FILES.strip()), ids=str)
def test_refused(refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_text("x")
    (tmp_path / "set").write_text("a b 1\n")
    vectors = Vectors(["a", "b"], np.eye(2, dtype=np.float32))
    check_refused(refusal, vectors=vectors, words=Vocabulary(["a", "b"], [1, 1]), **NAMES)
    left = {path.name for path in tmp_path.rglob("*")} - {"file", "here", "set"}
    assert len(left) == refusal.call.count("file(") + refusal.call.count("stored("), "nothing else is written"
