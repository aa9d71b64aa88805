"""How values are stored: codecs, stochastic rounding, and the passes that encode and decode rows."""

from speedtransfer.encoding.choice import (
    STATE_DTYPES,
    STORAGE_DTYPES,
    StorageDtype,
    check_dtypes,
    codec_for,
    codec_named,
    dtype_of,
    value_bytes,
)
from speedtransfer.encoding.codecs import LOW, SCALE, Codec, Part
from speedtransfer.encoding.convert import decode_rows, encode_rows
from speedtransfer.encoding.float8 import BlocksFloat8, codec_of_planes
from speedtransfer.encoding.rounding import Keys, write_key
from speedtransfer.encoding.split24 import SPLIT24, Split24

__all__ = [
    "LOW",
    "SCALE",
    "SPLIT24",
    "STATE_DTYPES",
    "STORAGE_DTYPES",
    "BlocksFloat8",
    "Codec",
    "Keys",
    "Part",
    "Split24",
    "StorageDtype",
    "check_dtypes",
    "codec_for",
    "codec_named",
    "codec_of_planes",
    "decode_rows",
    "dtype_of",
    "encode_rows",
    "value_bytes",
    "write_key",
]
