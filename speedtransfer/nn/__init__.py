"""The modules a model uses in place of those of ``torch.nn``, and their active rows."""

from speedtransfer.nn.active import ActiveRows
from speedtransfer.nn.bag import EmbeddingBag
from speedtransfer.nn.drawn_rows import DrawnRows
from speedtransfer.nn.embedding import Embedding, check_pretrained
from speedtransfer.nn.export import to_dense
from speedtransfer.nn.loader import PrefetchLoader, StatefulPrefetchLoader, prefetch
from speedtransfer.nn.multi import MultiEmbedding
from speedtransfer.nn.multi_bag import MultiEmbeddingBag
from speedtransfer.nn.options import TableOptions, refuse_vocabulary, takes_options
from speedtransfer.nn.processes import clip_grad_norm_, full_state_dict, table_parameters
from speedtransfer.nn.replace import replace_embeddings
from speedtransfer.nn.sharded_table import ShardedTable
from speedtransfer.nn.table_summary import Summary, TableSummary, summary
from speedtransfer.nn.ticket import Ticket
from speedtransfer.nn.tracing import in_transform

__all__ = [
    "ActiveRows",
    "DrawnRows",
    "Embedding",
    "EmbeddingBag",
    "MultiEmbedding",
    "MultiEmbeddingBag",
    "PrefetchLoader",
    "ShardedTable",
    "StatefulPrefetchLoader",
    "Summary",
    "TableOptions",
    "TableSummary",
    "Ticket",
    "check_pretrained",
    "clip_grad_norm_",
    "full_state_dict",
    "in_transform",
    "prefetch",
    "refuse_vocabulary",
    "replace_embeddings",
    "summary",
    "table_parameters",
    "takes_options",
    "to_dense",
]
