"""Which calls run the kernels of each source, for tests/gpu/test_all_kernels.py."""

# What compares the kernels of a source with torch before they are trusted: small calls of each.
CHECKS = {
    "catch_up.cu": ("speedtransfer.idle.missed:_check_kernel", "speedtransfer.idle.replay:_check_kernel"),
    "codecs.cu": ("speedtransfer.encoding.cuda_codecs:_check",),
    "ids.cu": ("speedtransfer.vocabulary.device_map:_are_right",),
    "step.cu": ("speedtransfer.optim.fused_step:_check",),
    "sums.cu": ("speedtransfer.tables.padded:_check_sums",),
    "unique.cu": ("speedtransfer.tables.padded:_check_unique",),
    "word2vec.cu": ("speedtransfer.word2vec.gradients:_check_kernel",),
}
MOVING = ("convert.cu", "rows.cu")  # tests of their own
