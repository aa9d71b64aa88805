"""The function :func:`speedtransfer.plan`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidValueError, check_number, check_size
from speedtransfer.nn.options import Idle
from speedtransfer.planning.configurations import MEASURED, Option, best_option, code_for, make_options, smallest_option
from speedtransfer.planning.estimate import Estimate, disk_bytes, estimate_step, served_share
from speedtransfer.planning.footprint import (
    MMAP,
    PAGEABLE,
    PINNED,
    SPARSE,
    Form,
    bytes_of,
    dense_bytes,
    forms_for,
    moved,
    sparse_way,
)
from speedtransfer.planning.hosts import Link, link_given, one_share, shared_by
from speedtransfer.planning.machine import Machine, machine_given, with_memory
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.plan_result import CacheSize, Plan
from speedtransfer.planning.this_machine import this_machine
from speedtransfer.planning.timed_trial import time_tables, time_torch
from speedtransfer.planning.workload import Workload, make_workload
from speedtransfer.progress import LateBar

_BANDWIDTHS = ("host", "device", "link")
_CACHED = (0.001, 0.01, 0.05, 0.1, 0.25)  # shares of the rows
Size = tuple[int, int]


def plan(
    model: nn.Module | Size | Sequence[Size] | Mapping[str, Size],
    optimizer: Any = "AdamW",
    batch: int = 1,
    lookups: float | Mapping[str, float] = 1,
    *,
    zipf: float = 1.05,
    unique: float | Mapping[str, float] | None = None,
    machine: str | Machine | None = None,
    host_memory: str | float | None = None,
    disk: str | float | None = None,
    idle: Idle = "auto",
    storage_dtype: torch.dtype | str | None = None,
    state_dtype: torch.dtype | str | None = None,
    scale_block: int | None = None,
    dense_ms: float = 0.0,
    hosts: int | None = None,
    link: str | None = None,
    measure: bool = True,
    progress: bool | None = None,
) -> Plan:
    """Tell whether tables fit, where, how long a step takes there, and what to use.

    Nothing of their size is allocated. On this machine the time of a step is measured: with the very modules, forms and
    optimizer, after every row has been trained once, with tables that are cut to fewer rows where they take more than 256 MB
    together, on ids that are drawn as they are given. On another machine it is estimated from its figures. Bytes are those of
    a few rows that are really made.

    Parameters
    ----------
    model : nn.Module, (int, int), sequence of (int, int), or mapping of str to (int, int)
        A model, of which every ``nn.Embedding``, ``nn.EmbeddingBag`` and table of this package is planned, those that share a
        weight once; modules on the meta device will do. Or sizes, ``(rows, dim)``.
    optimizer : type, str, Optimizer, callable or None
        Of torch or any package: a class, "AdamW", "SGD(momentum=0.9)", one that was made, or what makes one of a list of
        parameters. None: the tables are frozen, and a step is a lookup.
    batch : int
        Samples of a step.
    lookups : float or mapping of str to float
        Ids of a sample, for every table or by name; a table that is not named has one.
    zipf : float
        Exponent of the distribution of ids, 0: uniform.
    unique : float or mapping of str to float, optional
        Distinct rows of a step where they are known; by default those expected of `zipf`.
    machine : str or Machine, optional
        A name ("h200"), the path of a YAML file, or a machine; by default this one.
    host_memory, disk : str or float, optional
        Bytes that there are, such as "512GB", in place of those of the machine.
    idle : {"auto", "exact", "lazy"}
        As in :class:`speedtransfer.Embedding`.
    storage_dtype, state_dtype : torch.dtype or str, optional
        Plan these forms of rows and state alone; by default several.
    scale_block : int, optional
        Columns that share a scale of float8 rows.
    dense_ms : float
        Milliseconds of a step of the rest of the model, which are added.
    hosts : int, optional
        Plan one of so many hosts, a process each, which share the rows of all tables out (``process_group=``). Lookups and
        samples are those of one host.
    link : str, optional
        With `hosts`: what connects them, "10GbE", "25GbE", "100GbE" or "IB", or a rate and a delay one way, "10Gbit,0.05ms".
    measure : bool
        False: times are estimated here as for any other machine, from bandwidths that are measured in about a second each.
    progress : bool, optional
        Show a bar if measuring takes more than a second; by default on a terminal.

    Returns
    -------
    Plan
        ``print`` shows it; `best` is the configuration to use.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        Something given breaks a rule; nothing has been measured then.
    OptimizerError
        The optimizer cannot train rows on their own, or ``idle="exact"`` has no rule for it.
    StorageError
        The file of a machine cannot be read.
    """
    dense_ms = check_number(dense_ms, "dense_ms")
    workload = make_workload(model, optimizer_given(optimizer), batch, lookups, zipf, unique, idle)
    forms = forms_for(workload, storage_dtype, state_dtype, scale_block)
    shared = hosts_given(hosts, link)
    return plan_workload(workload, forms, machine, host_memory, disk, dense_ms / 1e3, measure, shared, progress)


def hosts_given(hosts: int | None, link: str | None, dashes: str = "") -> tuple[int, Link] | None:
    """Return the hosts and their link, None where there is one host; options have `dashes` in errors."""
    if (hosts is None) != (link is None):
        one, other = ("hosts", "link") if link is None else ("link", "hosts")
        raise InvalidValueError(
            f"{dashes}{one} is given without {dashes}{other}; pass both, for instance 16 hosts and the link 25GbE"
        )
    return None if hosts is None else (check_size(hosts, f"{dashes}hosts", 2), link_given(link, f"{dashes}link"))


def plan_workload(
    workload: Workload,
    forms: Sequence[Form],
    machine: str | Machine | None,
    host_memory: str | float | None,
    disk: str | float | None,
    dense_s: float,
    measure: bool,
    shared: tuple[int, Link] | None = None,
    progress: bool | None = None,
) -> Plan:
    """Return the plan of a workload in some forms, `shared` out by so many hosts; else as :func:`plan`."""
    whole, workload = workload, workload if shared is None else one_share(workload, shared[0])
    # An optimizer that cannot train rows raises here, before anything is measured.
    held = {form: bytes_of(workload, form) for form in forms}
    here = machine is None
    own = this_machine(rates=() if measure else _BANDWIDTHS) if here else machine_given(machine)
    target = with_memory(own, host_memory, disk)
    options = make_options(workload, forms, target, dense_s)
    if shared is not None:
        # Modules of torch are in each host as a whole.
        options = [
            replace(option, code=code_for(whole, option.form, option.memory, shared=True))
            for option in options
            if option.is_table
        ]
    if here and measure:
        target = _with_disk_rate(target, workload, options)
        options = _measured(options, workload, target, progress)
    else:
        options = [replace(each, estimate=estimate_step(workload, each.form, each.memory, target)) for each in options]
    best, smallest = best_option(options), smallest_option(options)
    cache = _caches(workload, options, best, target) if shared is None else ()
    hosts = None if shared is None else shared_by(whole, (best or options[0]).form, *shared)
    return Plan(workload, target, here, held, tuple(options), best, smallest, cache, dense_bytes(workload), hosts)


def _with_disk_rate(machine: Machine, workload: Workload, options: Sequence[Option]) -> Machine:
    """Return this machine with the rate of its disk, measured if files would not be in the page cache."""
    forms = [option.form for option in options if option.fits and option.memory == MMAP]
    reads = any(disk_bytes(workload, form, machine) for form in forms)
    rate = this_machine(_folder(), rates=("disk",)).disk_bytes_per_s if reads else None
    if rate is None:
        return machine
    return replace(machine, disk_bytes_per_s=rate, sources={**machine.sources, "disk_bytes_per_s": MEASURED})


def _measured(options: Sequence[Option], workload: Workload, machine: Machine, progress: bool | None) -> list[Option]:
    """Return options with the times of those that fit; of files only where they are needed, or rows are float32."""
    device = resolve_device(None) if machine.device is not None else torch.device("cpu")
    fitting = [option for option in options if option.fits]
    only_files = all(option.memory == MMAP for option in fitting)
    wanted = [one for one in fitting if one.memory != MMAP or only_files or one.form == options[0].form]
    found = list(options)
    with LateBar("measuring", len(wanted), progress) as bar:
        for number, option in enumerate(wanted):
            bar.show(number, f"measuring {option.memory}, {option.form}")
            # It is measured in the page cache: what the disk adds is known where its rate is.
            step = estimate_step(workload, option.form, MMAP, machine) if option.memory == MMAP else None
            trial = Estimate(measured_s=_trial(option, workload, device), disk_s=0.0 if step is None else step.disk_s)
            found[found.index(option)] = replace(option, estimate=trial)
    return found


def _trial(option: Option, workload: Workload, device: torch.device) -> float:
    if option.is_table:
        return time_tables(workload, option.form, option.memory, device, _folder())
    sparse = sparse_way(workload) if option.memory == SPARSE else None
    return time_torch(workload, workload.trainer.make if sparse is None else sparse.make, sparse is not None, device)


def _folder() -> Path:
    """Return where files of a trial go: the working directory, or where temporary ones go if that cannot be written."""
    here = Path.cwd()
    return here if os.access(here, os.W_OK) else Path(tempfile.gettempdir())


def _caches(
    workload: Workload, options: Sequence[Option], best: Option | None, machine: Machine
) -> tuple[CacheSize, ...]:
    """Return caches of several sizes, up to what fits on the device."""
    on_gpu = machine.device is not None
    of_host = [option for option in options if option.memory in ((PINNED, PAGEABLE, MMAP) if on_gpu else (MMAP,))]
    chosen = best if best in of_host else next((option for option in of_host if option.fits), of_host[0])
    # On the CPU it is of use for files alone.
    if not on_gpu and chosen is not best:
        return ()
    rows = sum(table.rows for table in workload.tables)
    total, need = bytes_of(workload, chosen.form).total, chosen.need
    room = (machine.device_bytes or 0) - need.device if on_gpu else (machine.host_bytes or 0) - need.host
    largest = max(0.0, room / total)
    shares = [share for share in _CACHED if share <= largest and share * rows >= 1]
    if _CACHED[-1] > largest > 0 and largest * rows >= 1:
        shares.append(largest)
    step = moved(workload, chosen.form)
    return tuple(
        CacheSize(int(share * rows), int(share * total), served, (1 - served) * step.up, (1 - served) * step.down)
        for share, served in zip(shares, served_share(workload, shares), strict=True)
    )
