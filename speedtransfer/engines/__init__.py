"""How rows move between the planes of a table and the compute device."""

from speedtransfer.engines.base import Engine
from speedtransfer.engines.mapped import MappedEngine
from speedtransfer.engines.reference import ReferenceEngine
from speedtransfer.engines.staged import StagedEngine

__all__ = ["Engine", "MappedEngine", "ReferenceEngine", "StagedEngine"]
