"""How values are stored: codecs, rounding and the passes that encode and decode rows."""
