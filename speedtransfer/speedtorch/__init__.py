"""SpeedTorch's names over tables and engines: ``import speedtransfer.speedtorch as SpeedTorch``, and old code runs.

Its classes differ in the memory that their rows live in. Rows come to the GPU; where there is none they stay on the CPU, which
one warning tells. Of a row that an index names several times each place gets a copy, and the last one stays when they are put
back. ``.npy`` files of cupy.save and files of torch.save are read.

New code needs none of this: :class:`speedtransfer.Embedding` moves its rows and their state by itself.
"""

from typing import NoReturn

from speedtransfer.speedtorch.classes import (
    COM,
    COMMM,
    CPUPytorchCOM,
    CPUPytorchModelFactory,
    CPUPytorchOptimizerFactory,
    DataGadget,
    DataGadgetMM,
    GPUPytorchCOM,
    GPUPytorchModelFactory,
    GPUPytorchOptimizerFactory,
    ModelFactory,
    ModelFactoryMM,
    OptimizerFactory,
    OptimizerFactoryMM,
    PytorchCOM,
    PytorchModelFactory,
    PytorchOptimizerFactory,
)

__all__ = [
    "COM",
    "COMMM",
    "CPUPytorchCOM",
    "CPUPytorchModelFactory",
    "CPUPytorchOptimizerFactory",
    "DataGadget",
    "DataGadgetMM",
    "GPUPytorchCOM",
    "GPUPytorchModelFactory",
    "GPUPytorchOptimizerFactory",
    "ModelFactory",
    "ModelFactoryMM",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PytorchCOM",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
]

_ALLOCATORS = ("PMemory", "PMemoryMM", "my_pinned_allocator", "my_pinned_allocatorMM")


def __getattr__(name: str) -> NoReturn:
    if name in _ALLOCATORS:
        raise AttributeError(
            f"{name} changed how all of CuPy allocates and is gone; pass CPUPinn=True to a class instead"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
