"""How values are stored: codecs, stochastic rounding, and the passes that encode and decode rows."""

from speedtransfer.encoding.choice import STATE_DTYPES, STORAGE_DTYPES, check_dtypes, codec_for, codec_named
from speedtransfer.encoding.codecs import SCALE, Codec, Part
from speedtransfer.encoding.convert import decode_rows, encode_rows
from speedtransfer.encoding.float8 import BlocksFloat8, codec_of_planes
from speedtransfer.encoding.rounding import Keys, write_key

__all__ = [
    "SCALE",
    "STATE_DTYPES",
    "STORAGE_DTYPES",
    "BlocksFloat8",
    "Codec",
    "Keys",
    "Part",
    "check_dtypes",
    "codec_for",
    "codec_named",
    "codec_of_planes",
    "decode_rows",
    "encode_rows",
    "write_key",
]
