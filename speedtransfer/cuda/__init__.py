"""The only folder that knows CuPy: what CUDA there is, page-locked memory, streams and kernels."""

from speedtransfer.cuda.graphs import (
    WARM_UP,
    capture_number,
    check_not_capturing,
    count_graphs,
    is_capturing,
    num_replays,
)
from speedtransfer.cuda.launch import (
    ARGUMENT_AT,
    KernelArgument,
    argument_memory,
    is_trusted,
    kernel_on,
    kernel_source,
    launch_kernel,
    launch_over,
    load_kernel,
)
from speedtransfer.cuda.memory import mapped_view, pinned_empty, require_mapped, to_cupy
from speedtransfer.cuda.status import CudaStatus, cuda_status, require_cuda, resolve_cuda, resolve_device
from speedtransfer.cuda.streams import (
    StreamOrder,
    current_stream,
    keep_until_done,
    side_stream,
    to_device,
    to_host,
    torch_stream,
    wait_until_filled,
)

__all__ = [
    "ARGUMENT_AT",
    "WARM_UP",
    "CudaStatus",
    "KernelArgument",
    "StreamOrder",
    "argument_memory",
    "capture_number",
    "check_not_capturing",
    "count_graphs",
    "cuda_status",
    "current_stream",
    "is_capturing",
    "is_trusted",
    "keep_until_done",
    "kernel_on",
    "kernel_source",
    "launch_kernel",
    "launch_over",
    "load_kernel",
    "mapped_view",
    "num_replays",
    "pinned_empty",
    "require_cuda",
    "require_mapped",
    "resolve_cuda",
    "resolve_device",
    "side_stream",
    "to_cupy",
    "to_device",
    "to_host",
    "torch_stream",
    "wait_until_filled",
]
