"""What every engine does: move rows between planes and the compute device. It sees tensors and ids only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speedtransfer.errors import RowIndexError


class Engine(Protocol):
    """How rows move.

    The caller has validated everything: ``planes[i]`` is a ``(num_rows, width_i)`` tensor (its rows are contiguous),
    ``index`` is a contiguous 1-D int64 tensor on the compute device or the CPU with every value in ``[0, num_rows)``, and
    ``rows[i]`` is a contiguous ``(len(index), width_i)`` tensor on the compute device.

    Where ``rows[i]`` has the dtype of ``planes[i]`` all bits are kept. Both may also be different ones of float32, float16
    and bfloat16: values are then converted on the way as ``Tensor.to`` does, to the nearest, ties to even, so that the
    narrow form crosses the bus. (Which NaN a NaN becomes is not defined.)

    On a CUDA device the last entries of `index` may be padding: equal to ``num_rows``, gathered as zeros and scattered
    nowhere. So the host need not know how many rows there are.

    Calls of one engine happen in the order in which they are made, whatever the current streams are. It keeps `index` and
    `rows` until it is done with them. Planes live longer than that: `wait` before they go. An engine that goes waits itself.
    """

    name: str
    device: torch.device
    # Whether rows may be named by ids that only the device knows, padded ones among them, without a wait of the host.
    takes_padding: bool

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels can read and write the planes where they are: then it is a `KernelEngine`."""
        ...

    def gather(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        check: bool | Tensor = False,
        unsorted: bool = False,
    ) -> None:
        """Fill ``rows[i][j]`` from ``planes[i][index[j]]``, ordered on the current stream of the compute device.

        With `check`, `index` has not been checked to be in range yet. A value that is not raises
        :class:`~speedtransfer.errors.RowIndexError` for the first one: at once where the host sees the index; where only the
        device does, by the next call of this engine (`wait` included) after the device has reached it, and its row is zero.
        A tensor on the device, (m,) int64, of whose values `index` has the unique ones, padded, is checked in its place.

        With `unsorted`, `index` may be in any order, as far as the caller knows, and an engine may sort it first.
        """
        ...

    def scatter(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        unsorted: bool = False,
        behind: bool = False,
    ) -> None:
        """Write ``rows[i][j]`` to ``planes[i][index[j]]``; `index` holds no value twice.

        A later `gather` of the same engine, on any stream, sees the new rows; an earlier one does not.

        With `behind`, the caller leaves `index` and `rows` unchanged, and an engine may write after it has returned: its later
        calls wait for that, and raise what goes wrong with it until it has been done.
        """
        ...

    def wait(self, writes_only: bool = False) -> None:
        """Block the host until every `gather` and `scatter` so far is done with the planes.

        After it the host may read the planes and write to them; with `writes_only`, which waits for scatters, only read them.
        """
        ...


class CachedRows(NamedTuple):
    """Which rows of a call a cache has: `found` (n,) and, of each plane, the addresses of its slots, as in slots.cuh."""

    found: Tensor
    slots: list[tuple[int, int, int]]


# Queues kernels on the current stream, and returns the tensors that they use beside the planes. None: there is no cache.
Queue = Callable[[CachedRows | None], Sequence[Tensor]]


class KernelEngine(Engine, Protocol):
    """One that lets kernels which it does not know read and write planes, in order with its own calls."""

    def update(self, planes: Sequence[Tensor], ids: Tensor, read: Sequence[bool], queue: Queue) -> None:
        """Let `queue` queue kernels that write the rows `ids` (n,) of `planes`, and read those of which `read` says so."""
        ...


# In the place of an id that is not the one whose row was read ahead; a number that nobody would use for an id.
CHANGED_ID = -4_907_216_538_174_921_303
_left = threading.local()


@contextlib.contextmanager
def faults_left() -> Iterator[None]:
    """Leave a row that an earlier gather did not find to other threads: what this one raises nobody may see."""
    _left.on = True
    try:
        yield
    finally:
        _left.on = False


def leaves_faults() -> bool:
    """Tell whether this thread is in `faults_left`."""
    return getattr(_left, "on", False)


def out_of_range(where: str, value: int, num_rows: int) -> RowIndexError:
    """Return the error for `value`, found at `where` ("index[3]"), of a table of `num_rows` rows."""
    if value == CHANGED_ID:
        return RowIndexError(
            f"{where} was changed between prefetch and the lookup, in a way that torch did not see (.data, another library), "
            "so that the rows read ahead were those of other ids; make a new tensor for each batch"
        )
    have = f"{num_rows} rows (0 to {num_rows - 1})" if num_rows else "no rows"
    rule = "but rows count from 0, negative ones do not exist" if value < 0 else f"but the table has {have}"
    return RowIndexError(f"{where} is {value} {rule}; clamp or filter the index")


def check_apart(engine: Engine, planes: Sequence[Tensor], index: Tensor) -> None:
    """Let `engine` check `index` (n,) by a gather of no columns."""
    nothing = planes[0][:, :0]
    engine.gather([nothing], index, [nothing.new_empty((len(index), 0), device=engine.device)], check=True)


def ascending(index: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return `index` (n,) in ascending order, and the places of its values; a radix sort of 32 bits passes half as often."""
    places = (index.int() if num_rows <= 1 << 31 else index).argsort()
    return index[places], places


def check_host_index(index: Tensor, planes: Sequence[Tensor]) -> None:
    """Raise for the first value of `index`, (n,) int64 on the CPU, that is no row of `planes`, if there are any."""
    array = index.numpy()
    if not planes or not len(array):
        return
    num_rows = planes[0].shape[0]
    if int(array.min()) < 0 or int(array.max()) >= num_rows:
        first = int(((array < 0) | (array >= num_rows)).argmax())
        raise out_of_range(f"index[{first}]", int(array[first]), num_rows)
