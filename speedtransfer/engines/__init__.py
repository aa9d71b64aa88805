"""How rows move between the planes of a table and the compute device."""

from speedtransfer.engines.auto import AutoEngine, engine_names, make_engine
from speedtransfer.engines.base import Engine
from speedtransfer.engines.host import HostEngine
from speedtransfer.engines.mapped import MappedEngine
from speedtransfer.engines.reference import ReferenceEngine
from speedtransfer.engines.staged import StagedEngine

__all__ = [
    "AutoEngine",
    "Engine",
    "HostEngine",
    "MappedEngine",
    "ReferenceEngine",
    "StagedEngine",
    "engine_names",
    "make_engine",
]
