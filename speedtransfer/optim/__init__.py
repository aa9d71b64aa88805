"""Let optimizers train tables: in a step they find a parameter of active rows, and the state of these rows."""

from speedtransfer.optim.features import Features, UsedFeatures, check_alike
from speedtransfer.optim.handle import Handle, find_handle, handles_over
from speedtransfer.optim.probe import PlaneSpec, probe_optimizer
from speedtransfer.optim.shard_handle import ShardHandle
from speedtransfer.optim.shared import SharedHandle
from speedtransfer.optim.vocabulary_handle import VocabularyHandle
from speedtransfer.optim.vocabulary_shard_handle import VocabularyShardHandle
from speedtransfer.rows import Rows

__all__ = [
    "Features",
    "Handle",
    "PlaneSpec",
    "Rows",
    "ShardHandle",
    "SharedHandle",
    "UsedFeatures",
    "VocabularyHandle",
    "VocabularyShardHandle",
    "check_alike",
    "find_handle",
    "handles_over",
    "probe_optimizer",
]
