"""Tables in several processes: what each of them has, what they send one another in a step, and how that is shown."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.text import Text

from speedtransfer.encoding import codec_for
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, format_bytes, suggest
from speedtransfer.nn.sizing import TableSize
from speedtransfer.planning.footprint import Form, size_of
from speedtransfer.planning.workload import Workload
from speedtransfer.ranks import Partition
from speedtransfer.ranks.cost import (
    RowCounts,
    RowForm,
    StepCost,
    expected_counts,
    replicas_step,
    sharded_step,
    shared_step,
)
from speedtransfer.ranks.zipf import expected_distinct_share, expected_imbalance, expected_unique
from speedtransfer.text_table import text_table
from speedtransfer.units import format_seconds

# Of a collective call by gloo, beyond the network: what two processes on two cores took for it (bench/experiments/hosts.py).
CALL_S = 1e-3


class Link(NamedTuple):
    """What connects hosts: bytes per second each way, and seconds that a byte is on its way."""

    name: str
    bytes_per_s: float
    delay_s: float
    source: str

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.bytes_per_s)}/s each way, {format_seconds(self.delay_s)} one way)"


_ETHERNET = "the rate by IEEE 802.3, of which TCP has 1,448 of 1,538 bytes a frame; the delay is assumed"
_KNOWN = (
    Link("10GbE", 1.25e9 * 1448 / 1538, 30e-6, _ETHERNET),
    Link("25GbE", 3.125e9 * 1448 / 1538, 30e-6, _ETHERNET),
    Link("100GbE", 12.5e9 * 1448 / 1538, 30e-6, _ETHERNET),
    Link("IB", 25e9, 10e-6, "HDR InfiniBand, 200 Gbit/s; the delay, of TCP over it, is assumed"),
)
LINKS = {each.name: each for each in _KNOWN}
_GIVEN = re.compile(r"([\d.]+) *([kMGT]?)bit(?:/s)? *, *([\d.]+) *(us|ms|s)")


def link_given(link: Any, label: str = "link") -> Link:
    """Return the link of a name, in any case, or of a rate and a delay such as "10Gbit,0.05ms"; errors call it `label`."""
    if not isinstance(link, str):
        raise InvalidTypeError(
            f"{label} is {link!r} ({type(link).__name__}) but must be text; pass for instance '25GbE'"
        )
    known = {name.lower(): found for name, found in LINKS.items()}
    if link.lower() in known:
        return known[link.lower()]
    try:
        rate, unit, delay, of_second = _GIVEN.fullmatch(link.strip()).groups()  # type: ignore[union-attr]
        bits = float(rate) * 1e3 ** " kMGT".index(unit or " ")
        seconds = float(delay) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[of_second]
    except (AttributeError, ValueError):
        bits = seconds = 0.0
    if not bits:
        raise InvalidValueError(
            f"{label} is {link!r}{suggest(link, LINKS)}; or a rate and a delay such as '10Gbit,0.05ms'"
        )
    return Link(link.strip(), bits / 8, seconds, "given")


# --- what one process has and sends -------------------------------------------------------------------------------------


def one_share(workload: Workload, ranks: int) -> Workload:
    """Return what one of so many processes has of the tables: of a step it updates the rows that any process looks up."""
    tables = []
    for table in workload.tables:
        rows = math.ceil(table.rows / ranks)
        unique = min(expected_distinct_share(table.features, workload.zipf, ranks) * table.unique, rows)
        tables.append(dataclasses.replace(table, rows=rows, features=((rows, table.lookups),), unique=unique))
    return dataclasses.replace(workload, tables=tuple(tables))


def counts_of(workload: Workload, form: Form, ranks: int) -> list[RowCounts]:
    """Return the rows that a mean process asks for and serves, of each table."""
    found = []
    for table in workload.tables:
        share = expected_distinct_share(table.features, workload.zipf, ranks)
        found.append(expected_counts(row_form(size_of(workload, table, form)), table.unique, share, ranks))
    return found


def row_form(size: TableSize, comm_dtype: torch.dtype | None = None) -> RowForm:
    """Return the bytes of a row in the table and on its way; gradients are sent in `comm_dtype`."""
    stored = sum(plane.row_bytes for plane in size.planes if plane.name.split(".")[0] == "weight")
    gradient = codec_for(size.dim, torch.float32, comm_dtype or torch.float32).parts.values()
    sent = sum(part.width * part.dtype.itemsize for part in gradient)
    return RowForm(stored, size.row_bytes - stored, 4 * size.dim if size.exact else stored, sent)


@dataclass(frozen=True)
class Hosts:
    """What so many hosts, a process each, send one another in a step of tables that they share out.

    The workload has whole tables and the lookups of one host. The cost is that of a mean host, and `busiest` are the rows that
    the busiest owner is asked for, over the mean. With ids of all tables in one tensor there are the calls of the cost, else
    those `apart`.
    """

    workload: Workload
    form: Form
    number: int
    link: Link
    cost: StepCost
    busiest: float
    apart: int

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of bytes, of delays and of what the processes do for the calls; they follow each other."""
        return {
            "bytes": self.busiest * self.cost.sent / self.link.bytes_per_s,
            "delays": self.cost.delays * self.link.delay_s,
            "calls": self.cost.calls * CALL_S,
        }

    @property
    def seconds(self) -> float:
        """All of the exchange, none of it hidden."""
        return sum(self.parts.values())

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        kinds = ("control", "ids", "rows", "gradients")
        return {
            "hosts": self.number,
            "link": self.link._asdict(),
            "sent": {kind: getattr(self.cost, kind) for kind in kinds},
            "calls": self.cost.calls,
            "calls_apart": self.apart,
            "delays": self.cost.delays,
            "busiest": self.busiest,
            "seconds": self.parts,
        }

    def by_number(self) -> Iterator[Hosts]:
        """Yield the same for 2 to 1,024 hosts, each with as many lookups."""
        for power in range(1, 11):
            yield shared_by(self.workload, self.form, 2**power, self.link)


def shared_by(workload: Workload, form: Form, number: int, link: Link, together: bool = True) -> Hosts:
    """Return the exchange of a step of tables that so many hosts share out and look up `together`, by parts of one tensor."""
    check_size(number, "hosts", 2)
    counts = counts_of(workload, form, number)
    training = workload.trainer.make is not None
    cost, apart = (sharded_step(counts, number, training=training, together=way) for way in (together, False))
    return Hosts(workload, form, number, link, cost, _busiest(workload, counts, number), apart.calls)


def _busiest(workload: Workload, counts: Sequence[RowCounts], number: int) -> float:
    """Return the load of the busiest owner over the mean, as if it were the same one for all tables."""
    whole = above = 0.0
    for table, count in zip(workload.tables, counts, strict=True):
        sent = count.asked_of_others * (count.form.sent + count.form.gradient)
        unique = [expected_unique(rows, workload.zipf, each) for rows, each in table.features]
        for (rows, each), part in zip(table.features, unique, strict=True):
            whole += sent * part / sum(unique)
            above += sent * part / sum(unique) * expected_imbalance(Partition(rows, number), workload.zipf, each)
    return above / whole


# --- as a table -----------------------------------------------------------------------------------------------------------

_RANKS_NOTE = """
held: weights and state of one process (of a shared table, which a host has once, its share). Bytes are those that one \
process sends, and moves between host memory and its device, in a training step.
Rows of torch.nn.Embedding are in device memory, so that there is no bus; sparse ones are trained by SparseAdam."""


def show_ranks(
    console: Console,
    workload: Workload,
    form: Form,
    ranks: int,
    distinct_share: float | None,
    comm_dtype: torch.dtype | None,
) -> None:
    """Print the cost of each kind of a single table in one process; raises if `distinct_share` cannot be.

    The lookups, and those that are distinct, are those of one process in a step; `distinct_share` are the distinct rows of all
    processes over the sum of those of each, by default by the Zipf law. Gradients are sent in `comm_dtype`.
    """
    (work,), zipf = workload.tables, workload.zipf
    rows, lookups, unique = work.rows, work.lookups, work.unique
    share = expected_distinct_share([(rows, lookups)], zipf, ranks) if distinct_share is None else distinct_share
    if not 1 / ranks <= share <= 1:
        raise InvalidValueError(f"--distinct-share is {share} but must be from 1 / --ranks to 1; pass a share between")
    balance = expected_imbalance(Partition(rows, ranks), zipf, lookups)
    console.print(
        Text(
            f"{rows:,} x {work.dim} in {ranks} processes; each looks up {unique:,.0f} distinct rows a step, {share:.2f} "
            f"of these are distinct over all; the busiest owner has {balance:.2f} times the mean\n"
        )
    )
    size = size_of(workload, work, form)
    of_row = row_form(size, comm_dtype)
    counts, whole, others = expected_counts(of_row, unique, share, ranks), size.total_bytes, (ranks - 1) * unique
    row, dense = 4 * work.dim, 4 * work.dim * rows
    kinds = {
        "sharded": (whole / ranks, sharded_step([counts], ranks)),
        'memory="shared"': (whole / ranks, shared_step([counts], ranks)),
        "ordinary table in DDP": (whole, replicas_step([(of_row, unique, unique, share * unique * ranks)], ranks)),
        # By gloo, computed and not counted: calls for sizes (left out), ids and values of all; a ring all-reduce of all rows.
        "nn.Embedding, sparse, DDP": (3 * dense, StepCost(ids=8 * others, gradients=row * others, calls=3)),
        "nn.Embedding, DDP": (4 * dense, StepCost(gradients=2 * (1 - 1 / ranks) * dense, calls=1)),
    }
    shown = []
    for name, (held, cost) in kinds.items():
        sent = (cost.control, cost.ids, cost.rows, cost.gradients)
        cells = [format_bytes(count) if count else "" for count in (held, *sent, cost.bus_up, cost.bus_down)]
        shown.append([name, *cells[:5], str(cost.calls), *cells[5:]])
    console.print(text_table(("", "held", "control", "ids", "rows", "gradients", "calls", "bus up", "bus down"), shown))
    console.print(Text(_RANKS_NOTE))
