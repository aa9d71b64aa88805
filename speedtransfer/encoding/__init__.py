"""How values are stored: codecs, stochastic rounding, and the passes that encode and decode rows."""

from speedtransfer.encoding.codecs import Codec, Part, check_dtypes, codec_for, codec_named
from speedtransfer.encoding.convert import decode_rows, encode_rows
from speedtransfer.encoding.rounding import Keys, write_key

__all__ = [
    "Codec",
    "Keys",
    "Part",
    "check_dtypes",
    "codec_for",
    "codec_named",
    "decode_rows",
    "encode_rows",
    "write_key",
]
