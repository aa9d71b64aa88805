"""What a plan is made for: tables, the rows of them that a step looks up, and the optimizer that trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_choice, check_number, check_size, suggest
from speedtransfer.nn.feature import Feature
from speedtransfer.nn.multi import MultiEmbedding
from speedtransfer.nn.multi_bag import MultiEmbeddingBag
from speedtransfer.nn.options import IDLE
from speedtransfer.nn.table_module import TableModule
from speedtransfer.planning.optimizer_name import Trainer
from speedtransfer.ranks.zipf import expected_unique

# Rows and columns at most: more are a slip. A few rows are really made, so that columns are fewer.
MAX_SIZE, MAX_DIM = 1 << 48, 1 << 20
EMBEDDING, BAG, MULTI = "Embedding", "EmbeddingBag", ("MultiEmbedding", "MultiEmbeddingBag")


@dataclass(frozen=True)
class Load:
    """One table and its part in a step.

    It is called as in ``model.named_modules()``, or as given; of a model `names` are all modules that share it, else there are
    none. `features` are the rows, and the lookups of a step, of each feature in it; they add up to `rows`. `unique` are the
    distinct rows that a step is expected to look up, `bag` the lookups that an "EmbeddingBag" adds up. `is_table`: the module
    has a table already, so that ``replace_embeddings`` leaves it alone. One that is not `trained` has no state. Bags of maxima
    have no sparse gradients (`takes_sparse`), nor, as a whole, modules of several features.
    """

    name: str
    rows: int
    dim: int
    features: tuple[tuple[int, int], ...]
    unique: float
    kind: str = EMBEDDING
    bag: int = 1
    is_table: bool = False
    names: tuple[str, ...] = ()
    trained: bool = True
    takes_sparse: bool = True

    @property
    def lookups(self) -> int:
        """Lookups of a step."""
        return sum(count for _, count in self.features)


@dataclass(frozen=True)
class Workload:
    """Tables that are trained together.

    `batch` are the samples of a step, `zipf` is the exponent of the distribution of ids (0: uniform), and `dense_bytes` are
    those of all other parameters of the model that are trained, `frozen_bytes` of those that are not.
    """

    tables: tuple[Load, ...]
    batch: int
    zipf: float
    trainer: Trainer
    idle: str = "auto"
    dense_bytes: int = 0
    frozen_bytes: int = 0

    @property
    def lookups(self) -> int:
        """Lookups of a step in all tables."""
        return sum(table.lookups for table in self.tables)

    @property
    def unique(self) -> float:
        """Distinct rows of a step in all tables, expected."""
        return sum(table.unique for table in self.tables)


def make_workload(
    given: Any, trainer: Trainer, batch: Any, lookups: Any, zipf: Any, unique: Any, idle: str
) -> Workload:
    """Check and complete what :func:`speedtransfer.plan` is given, which documents it."""
    check_choice(idle, "idle", IDLE)
    batch = check_size(batch, "batch", 1)
    exponent = check_number(zipf, "zipf", 0.0)
    found, others = _of_model(given) if isinstance(given, nn.Module) else (_of_sizes(given), (0, 0))
    names = [table.name for table in found]
    per_sample = dict.fromkeys(names, 1.0) | _by_name(lookups, names, "lookups", 1.0)
    if unique is not None and len(names) > 1 and not isinstance(unique, Mapping):
        raise InvalidValueError(f"unique is {unique!r} for {len(names)} tables; pass a dict with a number for each")
    told = {} if unique is None else _by_name(unique, names, "unique", 0.0)
    tables = []
    for table in found:
        features = tuple((rows, round(batch * per_sample[table.name])) for rows, _ in table.features)
        rows, count = table.rows, sum(number for _, number in features)
        check_size(count, "lookups of a step", 1)
        distinct = told.get(table.name)
        if distinct is None:
            distinct = sum(expected_unique(rows, exponent, number) for rows, number in features)
        elif not 0 < distinct <= min(count, rows):
            raise InvalidValueError(
                f"unique is {distinct} but must be above 0 and at most the lookups and the rows of {table.name!r}, "
                f"{min(count, rows)}; pass a number between"
            )
        bag = round(per_sample[table.name]) if table.kind == BAG else 1
        tables.append(replace(table, features=features, unique=distinct, bag=bag))
    return Workload(tuple(tables), batch, exponent, trainer, idle, *others)


def _by_name(given: Any, names: Sequence[str], label: str, minimum: float) -> dict[str, float]:
    """Return the numbers that are given by name, or a number for all."""
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
    for name in by_name:
        if name not in names:
            raise InvalidValueError(f"{label} names a table {name!r}, which is not there{suggest(str(name), names)}")
    return {name: check_number(value, label, minimum) for name, value in by_name.items()}


def _of_sizes(given: Any) -> list[Load]:
    """Return tables of ``(rows, dim)``, of a sequence of these, or of a mapping of names to these; without lookups yet."""
    pairs: dict[str, Any] = {"table": given}
    if isinstance(given, Mapping):
        pairs = {str(name): size for name, size in given.items()}
    elif isinstance(given, Sequence) and (len(given) != 2 or any(isinstance(part, Sequence) for part in given)):
        pairs = {f"table{number}": size for number, size in enumerate(given)}
    if not pairs:
        raise InvalidValueError("sizes are empty; pass at least one (rows, dim)")
    found = []
    for name, size in pairs.items():
        if not isinstance(size, Sequence) or isinstance(size, str | bytes) or len(size) != 2:
            raise InvalidTypeError(
                f"sizes are {given!r} but must be (rows, dim), a list of these or a dict of name to these; or pass a model"
            )
        rows, dim = _size(size[0], f"rows of {name!r}", MAX_SIZE), _size(size[1], f"dim of {name!r}", MAX_DIM)
        found.append(Load(name, rows, dim, ((rows, 0),), 0.0))
    return found


def _size(value: Any, name: str, most: int) -> int:
    """Return a number of rows or columns; a float such as 1e9 is one."""
    if isinstance(value, float):
        if not value.is_integer():
            raise InvalidValueError(f"{name} is {value} but must be a whole number; pass for instance 1e9")
        value = int(value)
    if isinstance(value, int) and value > most:
        raise InvalidValueError(
            f"{name} is {value} but must be at most 2**{most.bit_length() - 1}; pass a smaller number"
        )
    return check_size(value, name, 1)


def _of_model(model: nn.Module) -> tuple[list[Load], tuple[int, int]]:
    """Return the embeddings of a model, those that share a weight once, and the bytes of others: trained ones, and frozen."""
    found: dict[int, Load] = {}
    weights: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag | MultiEmbedding) or isinstance(module, Feature):
            continue
        weight = module._parameters.get("weight")
        key = id(module) if weight is None else id(weight)
        weights.add(key)
        name = name or type(module).__name__
        if key in found:
            found[key] = replace(found[key], names=(*found[key].names, name))
            continue
        if weight is not None and weight.dtype != torch.float32:
            raise InvalidTypeError(
                f"the weight of {name!r} is {weight.dtype}, but plans are of rows in float32; pass its (rows, dim), and "
                "storage_dtype and state_dtype for others"
            )
        trained = weight is None or weight.requires_grad
        kind = BAG if isinstance(module, nn.EmbeddingBag) else EMBEDDING
        if isinstance(module, MultiEmbedding):
            kind = MULTI[isinstance(module, MultiEmbeddingBag)]
        rows = [each.num_embeddings for each in module.values()] if isinstance(module, MultiEmbedding) else []
        features = tuple((size, 0) for size in rows or [module.num_embeddings] if size)
        if features:
            size, is_table = sum(rows for rows, _ in features), isinstance(module, TableModule)
            sparse = getattr(module, "mode", "") != "max" and kind not in MULTI
            found[key] = Load(
                name, size, module.embedding_dim, features, 0.0, kind, 1, is_table, (name,), trained, sparse
            )
    if not found:
        raise InvalidValueError(
            f"the model, a {type(model).__name__}, has no nn.Embedding, nn.EmbeddingBag or table of this package; pass sizes "
            "such as (rows, dim)"
        )
    others = [param for param in model.parameters() if id(param) not in weights]
    trained_bytes, frozen_bytes = (
        sum(param.nbytes for param in others if param.requires_grad is trains) for trains in (True, False)
    )
    return list(found.values()), (trained_bytes, frozen_bytes)


def dtype_name(dtype: torch.dtype | str | None) -> str:
    """Return a dtype without its package, or what stands for one; "float32" for None, as values are stored without a codec."""
    return str(torch.float32 if dtype is None else dtype).removeprefix("torch.")
