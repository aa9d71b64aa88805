"""Let optimizers train tables: in a step they find a parameter of active rows, and the state of these rows."""

from speedtransfer.optim.features import Features, UsedFeatures, check_alike
from speedtransfer.optim.handle import Handle, find_handle, handles_over
from speedtransfer.optim.probe import PlaneSpec, probe_optimizer
from speedtransfer.optim.sharded import Sharded
from speedtransfer.optim.shared import SharedOwners
from speedtransfer.optim.vocabulary_ids import VocabularyIds
from speedtransfer.rows import Rows

__all__ = [
    "Features",
    "Handle",
    "PlaneSpec",
    "Rows",
    "Sharded",
    "SharedOwners",
    "UsedFeatures",
    "VocabularyIds",
    "check_alike",
    "find_handle",
    "handles_over",
    "probe_optimizer",
]
