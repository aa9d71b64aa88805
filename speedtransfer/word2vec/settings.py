"""Settings of a training run: name, default, rule and description of each, in one place.

torch is imported when settings are checked, not before: ``--help`` shows them without it.
"""

# ruff: noqa: RUF009 (what is called are makers of fields)

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from speedtransfer.errors import (
    InvalidTypeError,
    InvalidValueError,
    StorageError,
    check_choice,
    check_number,
    check_path,
    check_size,
    suggest,
)

Check = Callable[[Any, str], Any]  # (value, name) -> the value to keep, or raises
Model = Literal["skipgram", "cbow"]
Kind = Literal["text", "lines", "graph", "adjacency"]
Memory = Literal["auto", "pinned", "pageable", "mmap", "device", "shared"]  # `tables.MEMORIES`, and two more


def _setting(
    panel: str, default: Any, check: Check | None, none: str | None = None, choices: Sequence[str] = ()
) -> Any:
    """Return a field: with its group in ``train --help``, and the default to show there where that is None."""
    return field(default=default, metadata={"panel": panel, "check": check, "none": none, "choices": choices})


def _size(panel: str, default: int | None, minimum: int, none: str | None = None) -> Any:
    return _setting(panel, default, partial(check_size, minimum=minimum), none)


def _number(panel: str, default: float | None, none: str | None = None, **limits: Any) -> Any:
    return _setting(panel, default, partial(check_number, **limits), none)


def _choice(panel: str, default: str, kind: Any) -> Any:
    choices = get_args(kind)
    return _setting(panel, default, partial(check_choice, choices=choices), choices=choices)


def _check_bool(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} is {value!r} but must be True or False")
    return value


def _check_optimizer(value: Any, name: str) -> str:
    from speedtransfer.word2vec.optimizers import find_optimizer

    find_optimizer(value)
    return str(value)


def _check_options(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidTypeError(f"{name} is {value!r} but must be a dict by argument name; pass {{'eps': 1e-8}}")
    return dict(value)


def existing_folder(path: Path) -> Path:
    """Return the folder `path`, or the nearest above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_writable(path: Path, what: str) -> None:
    """Raise `StorageError` unless the folder `path` can be written, or made; nothing is."""
    above = existing_folder(path)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {what} to {str(path)!r}; choose a folder you may write to")


@dataclass(frozen=True)
class Settings:
    """Settings of a training run; checked at once, before anything is read.

    Attributes
    ----------
    dim : int
        Vector dimension.
    optimizer : str
        Name of an optimizer of torch.optim that works row by row, in any case.
    lr : float, optional
        Initial learning rate; decays linearly to 1e-4 of it. By default one that suits the optimizer and the model.
    clip : float, optional
        Maximum L2 norm of a row's gradient in a step; by default unlimited.
    options : mapping, optional
        Further arguments of the optimizer, for instance ``{"momentum": 0.9}``.
    model : {"skipgram", "cbow"}
        What is predicted: the words around a word, or a word from the words around it.
    epochs : int, optional
        Passes over the corpus; by default 5, or up to 50 for a small corpus.
    window : int
        Maximum distance between a word and its context. Skip-gram predicts all words within it, near ones with more weight;
        CBOW draws a distance from 1 to this for each word.
    negative : int
        Negative samples per (word, context) pair.
    min_count : int
        Ignore words that occur fewer times.
    max_words : int, optional
        Keep only the N most frequent words.
    sample : float
        Subsampling threshold for frequent words: 1e-3 for a small corpus, 1e-4 or 1e-5 for a large one, 0 for none.
    buckets : int
        Rows of a hash table for character n-grams, as in fastText; 0: no n-grams.
    min_n : int
        Minimum n-gram length, in characters; the marks at both ends of a word count.
    max_n : int
        Maximum n-gram length.
    kind : {"text", "lines", "graph", "adjacency"}
        What a line of the corpus is: part of one stream of words; a sequence by itself; an edge of a graph, ``u v`` or
        ``u v weight``; a node and its neighbours, ``u v1 v2 ...``. Graphs are sampled by random walks.
    vocabulary : path-like, optional
        Table of words and their counts, to train these in place of counting: .tsv, .txt, .gz, or .parquet (needs pyarrow).
    divide : bool
        Several processes read a part of the corpus each: some of its files, or the open file that each passes.
    phrases : int
        Passes that join frequent pairs of words into one, as in ``new_york``.
    phrase_threshold : float
        Minimum score of a pair to be joined: higher joins fewer.
    walks : int
        Random walks from each node of a graph.
    walk_length : int
        Nodes in a walk.
    p : float
        Return parameter of node2vec: above 1 walks seldom step back.
    q : float
        In-out parameter of node2vec: above 1 walks stay near where they were, below 1 they go far.
    block_words : int, optional
        Words in a step of each process, after subsampling; by default 16,384, or down to 32 for a small corpus.
    shared_negatives : int, optional
        Negative samples drawn for every 512 words of a step, which these share; by default 512, for CBOW 256.
    seed : int
        Random seed; on a CPU the same seed, number of threads and versions give the same bits.
    memory : {"auto", "pinned", "pageable", "mmap", "device", "shared"}
        Where the tables live.
    path : path-like, optional
        Folder for the table files of memory "mmap".
    device : torch.device or str or int, optional
        Compute device; by default a CUDA device if there is one, else the CPU.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        A value of the wrong type, out of range, or an unknown optimizer; an argument that the optimizer does not take.
    """

    dim: int = _size("Model", 128, minimum=1)
    optimizer: str = _setting("Optimizer", "adamw", _check_optimizer)
    lr: float | None = _number("Optimizer", None, "the optimizer's", above=True)
    clip: float | None = _number("Optimizer", None, above=True)
    options: Mapping[str, Any] | None = _setting("Optimizer", None, _check_options)
    model: Model = _choice("Model", "skipgram", Model)
    epochs: int | None = _size("Training", None, minimum=1, none="chosen from the corpus; usually 5")
    window: int = _size("Model", 5, minimum=1)
    negative: int = _size("Model", 5, minimum=1)
    min_count: int = _size("Corpus", 5, minimum=1)
    max_words: int | None = _size("Corpus", None, minimum=2, none="all")
    sample: float = _number("Training", 1e-3, minimum=0.0)
    buckets: int = _size("Model", 0, minimum=0)
    min_n: int = _size("Model", 3, minimum=1)
    max_n: int = _size("Model", 6, minimum=1)
    kind: Kind = _choice("Corpus", "text", Kind)
    vocabulary: str | os.PathLike[str] | None = _setting("Corpus", None, check_path, "counted")
    divide: bool = _setting("Corpus", False, _check_bool)
    phrases: int = _size("Corpus", 0, minimum=0)
    phrase_threshold: float = _number("Corpus", 10.0, above=True)
    walks: int = _size("Corpus", 10, minimum=1)
    walk_length: int = _size("Corpus", 80, minimum=2)
    p: float = _number("Corpus", 1.0, minimum=1e-4, maximum=1e4)  # rejection sampling takes as many draws a step
    q: float = _number("Corpus", 1.0, minimum=1e-4, maximum=1e4)
    block_words: int | None = _size("Training", None, minimum=2, none="chosen from the corpus; usually 16384")
    shared_negatives: int | None = _size("Training", None, minimum=1)
    seed: int = _size("Training", 1, minimum=0)
    memory: Memory = _choice("Memory", "auto", Memory)
    path: str | os.PathLike[str] | None = _setting("Memory", None, partial(check_path, what="a folder"))
    device: Any = _setting("Memory", None, None, "cuda if there is one")

    def __post_init__(self) -> None:
        for name in SETTINGS:
            object.__setattr__(self, name, check_setting(name, getattr(self, name)))
        walked = self.kind in ("graph", "adjacency")
        if self.phrases and walked:
            raise InvalidValueError(
                f"phrases is {self.phrases} but must be 0 for kind={self.kind!r}: nodes are no words"
            )
        if self.divide and (self.phrases or walked):
            what = f"phrases={self.phrases}" if self.phrases else f"kind={self.kind!r}"
            raise InvalidValueError(f"divide is for text but {what} needs all of it in a process; drop one of them")
        unused = {} if walked else dict.fromkeys(("walks", "walk_length", "p", "q"), "kind='graph'")
        unused |= {} if self.buckets else dict.fromkeys(("min_n", "max_n"), "buckets")
        unused |= {} if self.phrases else {"phrase_threshold": "phrases"}
        for name, needed in unused.items():
            if getattr(self, name) != SETTINGS[name].default:
                raise InvalidValueError(
                    f"{name} is {getattr(self, name)} but only {needed} uses it; pass that, or drop {name}"
                )
        if self.memory == "mmap" and self.path is None:
            raise InvalidValueError("memory='mmap' needs path, the folder for the table files; pass path='tables'")
        if self.path is not None and self.memory != "mmap":
            raise InvalidValueError(
                f"path is {str(self.path)!r} but memory={self.memory!r} has no files; drop path or pass memory='mmap'"
            )
        import torch

        from speedtransfer.word2vec.optimizers import make_optimizer
        from speedtransfer.word2vec.subwords import check_ngrams

        check_ngrams(self.buckets, self.min_n, self.max_n)
        weight = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))
        make_optimizer(self.optimizer, [weight], self.first_lr, self.options)

    @property
    def first_lr(self) -> float:
        """The learning rate that training starts from."""
        from speedtransfer.word2vec.optimizers import default_lr

        return default_lr(self.optimizer, self.model) if self.lr is None else self.lr

    @property
    def pool(self) -> int:
        """`shared_negatives`, filled in."""
        from speedtransfer.word2vec.gradients import POOLS

        return POOLS[self.model] if self.shared_negatives is None else self.shared_negatives

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON can hold them, the learning rate filled in."""
        values = {name: getattr(self, name) for name in SETTINGS}
        filled = {"lr": self.first_lr, "shared_negatives": self.pool, "options": dict(self.options or {})}
        filled |= {name: values[name] and os.fspath(values[name]) for name in ("path", "vocabulary")}
        return {**values, **filled, "device": None if self.device is None else str(self.device)}


SETTINGS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Settings)}


def check_setting(name: str, value: Any) -> Any:
    """Return the `value` of the setting `name` as it is kept, or raise what :class:`Settings` raises for it by itself."""
    check: Check | None = SETTINGS[name].metadata["check"]
    if check is None or (value is None and SETTINGS[name].default is None):
        return value
    return check(value, name)


# What gensim's Word2Vec calls settings that are here too.
_OF_GENSIM = {"vector_size": "dim", "sg": "model", "alpha": "lr", "max_final_vocab": "max_words"}


def settings_of(names: Collection[str], given: Mapping[str, Any], **more: Any) -> Settings:
    """Return the settings `given` to what takes `names`, and `more`; raise InvalidTypeError for one not in `names`."""
    for name in given:
        if name not in names:
            here = f"; gensim's {name!r} is {_OF_GENSIM[name]!r} here" if name in _OF_GENSIM else suggest(name, names)
            raise InvalidTypeError(f"got an unexpected keyword argument {name!r}{here}")
    return Settings(**given, **more)
