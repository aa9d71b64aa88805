"""What a training run is asked to do: names, defaults and rules of every setting, in one place."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.word2vec.optimizers import default_lr, find_optimizer

_MINIMUM = {
    "dim": 1,
    "epochs": 1,
    "window": 1,
    "negative": 1,
    "min_count": 1,
    "block_words": 2,
    "shared_negatives": 1,
    "seed": 0,
}


@dataclass(frozen=True)
class Settings:
    """Settings of a training run; wrong ones raise at once, before anything is read.

    Attributes
    ----------
    dim : int
        Numbers in a vector.
    optimizer : str
        Any optimizer of torch.optim that works row by row; case does not matter.
    lr : float, optional
        First learning rate, falling linearly to 1e-4 of it; None: the default of the optimizer (`optimizers.DEFAULT_LR`).
    options : dict
        Further arguments of the optimizer, for instance ``{"momentum": 0.9}``.
    epochs : int
        Passes over the corpus.
    window : int
        Largest window to each side; the window of a word is drawn evenly from 1 to this.
    negative : int
        Negatives a pair.
    min_count : int
        Words that occur less often are left out.
    max_words : int, optional
        Keep only this many of the most frequent words.
    sample : float
        Threshold of subsampling frequent words: 1e-3 for a small corpus, 1e-4 or 1e-5 for a large one, 0 for none.
    block_words : int
        Words a step, after subsampling.
    shared_negatives : int
        Negatives drawn a step, shared by its words and weighted to stand for `negative` a pair.
    seed : int
        Of first weights and every draw; on a CPU the same seed, threads and versions give the same bits.
    memory : {"auto", "pinned", "pageable", "mmap", "device"}
        Where the rows live.
    path : path-like, optional
        Folder for the table files of memory "mmap".
    device : torch.device or str, optional
        Compute device; None: a CUDA device if there is one, else the CPU.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        A value of the wrong type, out of range, or an unknown optimizer.
    """

    dim: int = 128
    optimizer: str = "adamw"
    lr: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 5
    window: int = 5
    negative: int = 5
    min_count: int = 5
    max_words: int | None = None
    sample: float = 1e-3
    block_words: int = 2048
    shared_negatives: int = 64
    seed: int = 1
    memory: str = "auto"
    path: str | os.PathLike[str] | None = None
    device: Any = None

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            check_size(getattr(self, name), name, minimum)
        if self.max_words is not None:
            check_size(self.max_words, "max_words", 2)
        if self.seed >= 1 << 63:
            raise InvalidValueError(f"seed is {self.seed} but must be below 2**63; pass a smaller seed")
        _check_number(self.sample, "sample")
        if self.sample < 0:
            raise InvalidValueError(f"sample is {self.sample} but must be at least 0; pass 1e-3, or 0 for none")
        if self.lr is not None:
            _check_number(self.lr, "lr")
            if self.lr <= 0:
                raise InvalidValueError(f"lr is {self.lr} but must be above 0; drop lr for the optimizer's default")
        find_optimizer(self.optimizer)

    @property
    def first_lr(self) -> float:
        """The learning rate that training starts from."""
        return default_lr(self.optimizer) if self.lr is None else self.lr

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON can hold them, the learning rate filled in."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["lr"] = self.first_lr
        values["path"] = None if self.path is None else os.fspath(self.path)
        values["device"] = None if self.device is None else str(self.device)
        return values


def _check_number(value: object, name: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidTypeError(f"{name} is {value!r} ({type(value).__name__}) but must be a number; pass float({name})")
    if not math.isfinite(value):
        raise InvalidValueError(f"{name} is {value} but must be finite; pass an ordinary number")
