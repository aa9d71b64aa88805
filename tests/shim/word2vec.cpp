// The kernels of word2vec.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cluster_shim.h"

#include "word2vec.cu"

// Bytes of shared memory that a block of the next launches may use.
extern "C" void set_engine(unsigned int bytes) { shared_bytes = bytes; }

KERNEL_CLUSTERS(plan_spans, 1)
KERNEL_CLUSTERS(link_spans, 1)
KERNEL_CLUSTERS(train_spans, static_cast<unsigned int>(static_cast<const Train*>(argument)->blocks))
KERNEL_CLUSTERS(add_moves, 1)
