"""SpeedTorch's names over tables and engines: ``import speedtransfer.speedtorch as SpeedTorch``, and old code runs.

Its classes differ in the memory that their rows live in. Rows come to the GPU; where there is none they stay on the CPU, which
one warning tells. Of a row that an index names several times each place gets a copy, and the last one stays when they are put
back. ``.npy`` files of cupy.save and files of torch.save are read.

New code needs none of this: :class:`speedtransfer.Embedding` moves its rows and their state by itself.
"""

import torch

from speedtransfer.speedtorch.data import ArrayMatrices, Gadgets, MappedGadgets, Matrices
from speedtransfer.speedtorch.memories import ARRAY_DOC, AnyDevice, CudaOrPinned, MemoryMapped, Pinned, view_of
from speedtransfer.speedtorch.models import Models
from speedtransfer.speedtorch.optimizers import Optimizers

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

# Each class is a role (a variable, the state of an optimizer, data) in a memory. It takes the arguments of its role, and then
# those of its line with their defaults.

# --- shown as arrays: on the GPU, page-locked, or in a file mapped into memory -------------------------------------------


class ModelFactory(Models, CudaOrPinned, datatype="float32", CPUPinn=False):
    """Switches the rows of a model's variable between all of them and those of a batch.

    Parameters
    ----------
    model_variable : nn.Module
        With a `weight`, such as ``nn.Embedding``; its number of rows does not matter.
    total_classes, embed_dimension : int
        All rows, and the values of one.
    datatype : str or dtype
    CPUPinn : bool
        Keep all rows in page-locked memory and not on the GPU.
    """


class OptimizerFactory(Optimizers, CudaOrPinned, dtype="float32", CPUPinn=False):
    """Switches the state that an optimizer keeps for a variable between that of all rows and that of a batch's.

    Parameters
    ----------
    given_optimizer : torch.optim.Optimizer
        Any that updates row by row; SparseAdam with ``sparse=True`` in the model, all others without.
    total_classes, embed_dimension : int
    model : nn.Module
    variable_name : str
        Name of the module or parameter within `model`: "u_embeddings" or "u_embeddings.weight".
    dtype : str or dtype
        Of the state that is as wide as the weights.
    CPUPinn : bool
        Keep the state in page-locked memory and not on the GPU.

    Attributes
    ----------
    optVarList : list of str
        What the optimizer keeps for a row.
    """

    CUPYcorpi = view_of("getCupyVar", ARRAY_DOC)


class COM(ArrayMatrices, CudaOrPinned, datatype="uint32", CPUPinn=False):
    """A square matrix of co-occurrences, read and written as a data gadget.

    Parameters
    ----------
    total_classes : int
        Its rows and columns.
    datatype : str or dtype
    CPUPinn : bool
        Keep it in page-locked memory and not on the GPU.
    """

    CUPYCom = view_of("getCupyVar", ARRAY_DOC)


class DataGadget(Gadgets, CudaOrPinned, CPUPinn=False):
    """Data of which any part is quickly on the compute device.

    Parameters
    ----------
    fileName : path-like or array
        A ``.npy`` file, or a tensor, NumPy or CuPy array, of any number of dimensions, which is copied.
    CPUPinn : bool
        Keep the data in page-locked memory and not on the GPU.
    """


class ModelFactoryMM(Models, MemoryMapped, diskname="variable", datatype="float32", CPUPinn=False):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` whose rows live in a file without a name, which goes with it.

    The file is in the folder of the path `diskname`. `CPUPinn` is ignored: the rows pass through page-locked memory anyway.
    """


class OptimizerFactoryMM(Optimizers, MemoryMapped, dtype="float32", CPUPinn=False):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` whose state lives in files of the working directory.

    The files have no name, and go with it. `CPUPinn` is ignored.
    """


class COMMM(ArrayMatrices, MemoryMapped, diskname="COM", datatype="uint32", CPUPinn=False):
    """A :class:`~speedtransfer.speedtorch.COM` that lives in a file, as the rows of a :class:`ModelFactoryMM` do."""


class DataGadgetMM(MappedGadgets, MemoryMapped, CPUPinn=False):
    """A :class:`~speedtransfer.speedtorch.DataGadget` over the file itself, which insertData writes to.

    It is a ``.npy`` file in C order. `CPUPinn` is ignored.
    """


# --- shown as tensors: on the GPU, page-locked, or on any device --------------------------------------------------------


class GPUPytorchModelFactory(Models, AnyDevice, datatype=torch.float):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` on the GPU, with tensors for arrays."""


class GPUPytorchOptimizerFactory(Optimizers, AnyDevice, dtype=torch.float):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` on the GPU, with tensors for arrays."""


class GPUPytorchCOM(Matrices, AnyDevice, datatype=torch.int32):
    """A :class:`~speedtransfer.speedtorch.COM` on the GPU, with a tensor for an array."""


class CPUPytorchModelFactory(Models, Pinned, datatype=torch.float):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` in page-locked memory, with tensors for arrays."""


class CPUPytorchOptimizerFactory(Optimizers, Pinned, dtype=torch.float):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` in page-locked memory, with tensors for arrays."""


class CPUPytorchCOM(Matrices, Pinned, datatype=torch.int32):
    """A :class:`~speedtransfer.speedtorch.COM` in page-locked memory, with a tensor for an array."""


class PytorchModelFactory(Models, AnyDevice, datatype=torch.float, deviceType="cuda", pinType=False):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` on the GPU or on the CPU, with tensors for arrays.

    `deviceType` ("cuda" or "cpu") is where all rows are. With "cpu" those of a batch come to where the variable is when the
    rows are initialised, and with `pinType` they are in page-locked memory.
    """


class PytorchOptimizerFactory(Optimizers, AnyDevice, dtype=torch.float, deviceType="cuda", pinType=False):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` on the GPU or on the CPU, with tensors for arrays."""


class PytorchCOM(Matrices, AnyDevice, datatype=torch.int32, deviceType="cuda", pinType=False):
    """A :class:`~speedtransfer.speedtorch.COM` on the GPU or on the CPU, with a tensor for an array."""
