"""What is trained: the sizes of the model and of its tables, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


class SettingsError(ValueError):
    """Settings that make no sense."""


def _number(default: Any, about: str, least: float = 1) -> Any:
    return field(default=default, metadata={"help": about, "least": least})


@dataclass(frozen=True)
class Settings:
    """All of them; the flags of run.py have the same names."""

    steps: int = _number(200, "training steps")
    batch: int = _number(16, "windows of a batch")
    context: int = _number(64, "tokens of a window", 2)
    vocabulary: int = _number(8192, "words, the most frequent ones", 3)
    width: int = _number(128, "values of a hidden state", 2)
    layers: int = _number(4, "blocks of the model")
    attention_heads: int = _number(4, "attention heads of a block")
    orders: tuple[int, ...] = field(
        default=(2, 3), metadata={"help": "words of the n-grams that have tables", "least": 2}
    )
    heads: int = _number(16, "rows that a token looks up, of all orders together")
    rows: int = _number(50_000, "rows of a head", 16)
    dim: int = _number(16, "values of a row")
    lr: float = _number(1e-3, "learning rate", 0)
    table_lr: float = _number(5e-3, "learning rate of the tables", 0)
    weight_decay: float = _number(0.01, "of AdamW, for tables too", 0)
    seed: int = _number(0, "of everything drawn", 0)
    dtype: str = field(default="float32", metadata={"help": "float32 or float64", "choices": ("float32", "float64")})

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata.get("least")
            for number in value if isinstance(value, tuple) else () if least is None else (value,):
                # Not `number < least`, which NaN would pass.
                if not number >= least:
                    raise SettingsError(f"{flag_of(one.name)} is {number} but must be at least {least}")
        if self.dtype not in ("float32", "float64"):
            raise SettingsError(f"--dtype is {self.dtype!r} but must be float32 or float64")
        if not self.orders or sorted(set(self.orders)) != list(self.orders):
            raise SettingsError(f"--orders are {self.orders} but must be ascending numbers, such as 2 3")
        for name, whole, part in (
            ("--heads", self.heads, len(self.orders)),
            ("--width", self.width, self.attention_heads),
        ):
            if whole % part:
                of = "the number of --orders" if name == "--heads" else "--attention-heads"
                raise SettingsError(f"{name} is {whole} but must be a multiple of {of}, {part}")

    @property
    def tokens_of_step(self) -> int:
        """Tokens that a step trains on."""
        return self.batch * self.context


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"
