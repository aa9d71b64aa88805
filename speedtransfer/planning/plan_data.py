"""A plan as plain data, for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from speedtransfer.planning.findings import Findings


def as_data(plan: Findings) -> dict[str, Any]:
    """Return a plan as dicts, lists, strings and numbers."""
    work = plan.workload
    machine = dataclasses.asdict(plan.machine)
    machine["sources"] = dict(plan.machine.sources)
    return {
        "tables": [
            {
                "name": table.name,
                "rows": table.rows,
                "dim": table.dim,
                "lookups": table.lookups,
                "unique": table.unique,
                "kind": table.kind,
            }
            for table in work.tables
        ],
        "batch": work.batch,
        "zipf": work.zipf,
        "optimizer": work.trainer.name,
        "idle": work.idle,
        "dense_bytes": plan.dense_bytes,
        "machine": machine,
        "this_machine": plan.here,
        "bytes": [
            {
                "storage_dtype": form.storage,
                "state_dtype": form.state,
                "total": count.total,
                **dataclasses.asdict(count),
            }
            for form, count in plan.bytes.items()
        ],
        "options": [option.data() for option in plan.options],
        "best": None if plan.best is None else plan.best.data(),
        "smallest": None if plan.smallest is None else plan.smallest.data(),
        "cache": [dataclasses.asdict(size) for size in plan.cache],
    }
