"""What a training step of tables of several processes sends and moves: bytes and calls.

Bytes sent are those that one process sends to others, without the headers of the network, as :class:`Traffic` counts them;
given the counted numbers of rows they are exact. What `DistributedDataParallel` sends for the dense part comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Numbers of 8 bytes in the first message of a meeting, two of which name it; the others are what is told.
_MESSAGE, _NAMES = 8, 2
_ID_BYTES = 8
# What a connection of TCP sends before an answer: ten segments (RFC 6928) in frames of 1,500 bytes.
_AT_ONCE = 10 * 1448


@dataclass(frozen=True)
class RowForm:
    """Bytes of a row: its weights in the table and on their way from an owner, its state, its gradient on the way back.

    Owners send rows as they are stored, but decoded where they change rows before they send them (``idle="exact"``).
    """

    stored: int
    state: int
    sent: int
    gradient: int


@dataclass(frozen=True)
class RowCounts:
    """Rows of one lookup, from the view of one process: distinct ones that it looks up, and those of them that others own.

    And what it serves: distinct rows that it owns and that any process looks up, and rows that others ask it for, where a row
    that two of them ask for counts twice.
    """

    form: RowForm
    asked: float
    asked_of_others: float
    served: float
    served_to_others: float


def expected_counts(form: RowForm, unique: float, distinct_share: float, ranks: int) -> RowCounts:
    """Return the counts of a mean process if rows are spread evenly over `ranks` owners.

    `unique` distinct rows are looked up by each; those of all are the `distinct_share` of their sum.
    """
    away = unique * (1 - 1 / ranks)
    return RowCounts(form, unique, away, distinct_share * unique, away)


@dataclass(frozen=True)
class StepCost:
    """What one process sends to others in a step, as in :class:`Traffic`, and moves between host memory and its device.

    Calls are collective, and wait for one another: by gloo for so many `delays` of the network, one way. The bus is that of
    rows and state, in bytes read from host memory, and written to it: memory traffic, with the tables on the CPU.
    """

    control: float = 0.0
    ids: float = 0.0
    rows: float = 0.0
    gradients: float = 0.0
    calls: int = 0
    bus_up: float = 0.0
    bus_down: float = 0.0
    delays: int = field(default=0, compare=False)

    @property
    def sent(self) -> float:
        """Bytes sent, of all kinds."""
        return self.control + self.ids + self.rows + self.gradients


Call = tuple[str, float]  # what a collective call sends, as in StepCost, and the bytes of it to all others


def sharded_step(
    lookups: Sequence[RowCounts], ranks: int, *, training: bool = True, together: bool = False
) -> StepCost:
    """Return the cost of a step of tables made with ``process_group=...``.

    Each lookup is a meeting of the processes, a message of ids and one of rows, or all `together` are, where their ids are
    parts of one tensor; the end of backward is a meeting and a message of gradients for all tables. Left out: the first step
    (one meeting more for each table), and steps without any gradient. Without `training` it is a step of evaluation.
    """
    calls: list[Call] = []
    for asked in [lookups] if together else [[each] for each in lookups]:
        ids = sum(_ID_BYTES * each.asked_of_others for each in asked)
        rows = sum(each.form.sent * each.served_to_others for each in asked)
        calls += [*_meeting(1 + len(asked), ranks), ("ids", ids), ("rows", rows)]
    if training and lookups:
        gradients = sum(each.form.gradient * each.asked_of_others for each in lookups)
        calls += [*_meeting(len(lookups), ranks), ("gradients", gradients)]
    up = sum((each.form.stored + training * each.form.state) * each.served for each in lookups)
    down = sum((each.form.stored + each.form.state) * each.served for each in lookups) if training else 0.0
    return _cost(calls, ranks, up, down)


def _cost(calls: Sequence[Call], ranks: int, bus_up: float, bus_down: float) -> StepCost:
    sent = dict.fromkeys((kind for kind, _ in calls), 0.0)
    for kind, count in calls:
        sent[kind] += count
    # Of each message the receiver says that it is ready, and then the sender sends it. What TCP does not send at once follows
    # as answers come: about a delay more. Messages to several processes are on their way at the same time.
    delays = sum(2 + (count > _AT_ONCE * (ranks - 1)) for _, count in calls)
    return StepCost(**sent, calls=len(calls), bus_up=bus_up, bus_down=bus_down, delays=delays)


def _meeting(numbers: int, ranks: int) -> list[Call]:
    """Return the calls of a meeting at which each process tells each other so many numbers."""
    more = max(0, numbers - (_MESSAGE - _NAMES))
    return [("control", (ranks - 1) * 8 * count) for count in (_MESSAGE, more) if count]


def shared_step(tables: Sequence[RowCounts], ranks: int) -> StepCost:
    """Return the cost of a step of tables made with ``memory="shared"``, which all processes of a host read by themselves.

    A lookup sends nothing. At the end of backward the processes meet twice (who has a gradient, and how many rows of whom),
    send ids and gradients of all tables in a message each, and meet for each table before and after the step. The owner reads
    the rows that it updates again; with ``idle="exact"`` a lookup reads their state too, which is left out.

    The counts of each table are of all its lookups together.
    """
    if not tables:
        return StepCost()
    ids = sum(_ID_BYTES * each.asked_of_others for each in tables)
    gradients = sum(each.form.gradient * each.asked_of_others for each in tables)
    meetings = _meeting(len(tables), ranks) * 2 + _meeting(1, ranks) * 2 * len(tables)
    changed = sum((each.form.stored + each.form.state) * each.served for each in tables)
    read = sum(each.form.stored * each.asked for each in tables)
    return _cost([*meetings, ("ids", ids), ("gradients", gradients)], ranks, read + changed, changed)


def replicas_step(tables: Sequence[tuple[RowForm, float, float, float]], ranks: int) -> StepCost:
    """Return the cost of a step of ordinary tables under `DistributedDataParallel`: every process has all rows.

    The processes meet at the end of backward; then all get ids and gradients of each table from all, in messages padded to the
    longest. Rows need no network, but each process updates all rows that any of them has looked up.

    Of each table it takes the form of a row, and distinct rows: those that this process looks up, those of the process that
    looks up most, and those that any does.
    """
    calls, up, down = _meeting(len(tables), ranks), 0.0, 0.0
    for form, asked, largest, distinct in tables:
        longest = (ranks - 1) * largest
        calls += [("ids", _ID_BYTES * longest), ("gradients", form.gradient * longest)]
        changed = (form.stored + form.state) * distinct
        up, down = up + form.stored * asked + changed, down + changed
    return _cost(calls, ranks, up, down)
