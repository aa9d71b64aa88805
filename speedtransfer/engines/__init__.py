"""How rows move between the planes of a table and the compute device."""

from speedtransfer.engines.auto import AutoEngine, calibrate_device, engine_names, make_engine
from speedtransfer.engines.base import (
    CHANGED_ID,
    CachedRows,
    Engine,
    KernelEngine,
    check_apart,
    faults_left,
    out_of_range,
)
from speedtransfer.engines.cache_policy import CachePolicy, LfuPolicy, StaticPolicy, auto_capacity, hottest_rows
from speedtransfer.engines.cached import CachedEngine
from speedtransfer.engines.calibration import DIRECTIONS, Direction
from speedtransfer.engines.host import HostEngine, gather_rows, scatter_rows
from speedtransfer.engines.mapped import MappedEngine
from speedtransfer.engines.reference import SELECTED, ReferenceEngine
from speedtransfer.engines.staged import StagedEngine

__all__ = [
    "CHANGED_ID",
    "DIRECTIONS",
    "SELECTED",
    "AutoEngine",
    "CachePolicy",
    "CachedEngine",
    "CachedRows",
    "Direction",
    "Engine",
    "HostEngine",
    "KernelEngine",
    "LfuPolicy",
    "MappedEngine",
    "ReferenceEngine",
    "StagedEngine",
    "StaticPolicy",
    "auto_capacity",
    "calibrate_device",
    "check_apart",
    "engine_names",
    "faults_left",
    "gather_rows",
    "hottest_rows",
    "make_engine",
    "out_of_range",
    "scatter_rows",
]
