"""Let optimizers train tables: in a step they find a parameter of active rows, and the state of these rows."""

from speedtransfer.optim.handle import Handle, find_handle, handles_over
from speedtransfer.optim.hooks import install
from speedtransfer.optim.probe import PlaneSpec, probe_optimizer
from speedtransfer.optim.shard_handle import ShardHandle
from speedtransfer.optim.shared import SharedHandle
from speedtransfer.optim.vocabulary_handle import VocabularyHandle
from speedtransfer.optim.vocabulary_shard_handle import VocabularyShardHandle
from speedtransfer.rows import Rows

__all__ = [
    "Handle",
    "PlaneSpec",
    "Rows",
    "ShardHandle",
    "SharedHandle",
    "VocabularyHandle",
    "VocabularyShardHandle",
    "find_handle",
    "handles_over",
    "install",
    "probe_optimizer",
]
