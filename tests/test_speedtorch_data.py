"""SpeedTorch's data gadgets and matrices of co-occurrences: any index, beside what NumPy does."""

import numpy as np
import pytest
import torch
from refusals import check_refused, refusals
from test_speedtorch import _in_a_folder_of_its_own, pytestmark  # noqa: F401 - for all tests here

import speedtransfer.speedtorch as SpeedTorch
from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError

GADGETS = {
    "device": lambda path: SpeedTorch.DataGadget(path),
    "pinned": lambda path: SpeedTorch.DataGadget(path, CPUPinn=True),
    "mmap": lambda path: SpeedTorch.DataGadgetMM(path),
}


def opened(array, kind="device"):
    np.save("data.npy", array)
    gadget = GADGETS[kind]("data.npy")
    gadget.gadgetInit()
    return gadget


class Foreign:
    """An array of another library, as CuPy's: with a dtype, and no NumPy array."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype

    def __array__(self, dtype=None, copy=None):
        return self.array


ROWS = [
    -1, np.int64(2), [0, 5, 5], np.array([[5], [-6]]), torch.tensor([1, 0], dtype=torch.int32), slice(1, 5),
    slice(None, None, -2), [], Foreign(np.array([4, -1])),
]  # fmt: skip
PARTS = [
    (slice(0, 3), slice(1, None)), (slice(None, None, -1), slice(None, None, -2)), (np.int64(2), slice(None)),
    (0, None, 1), (slice(1, -1, 2), -1), (slice(5, 1), slice(1, 1)), (-1, Ellipsis), (), ([0, 1, 1], [2, 0, 0]),
    (torch.tensor([[0], [5]]), np.array([1, 2])), (slice(2, 4), [0, 0]), np.array([True, False] * 3),
    Foreign(np.array([True, True] + [False] * 4)), [True, False, False, False, False, True], Ellipsis,
]  # fmt: skip


def numpys(index):
    if isinstance(index, tuple):
        return tuple(numpys(part) for part in index)
    if isinstance(index, list) and not index:
        return np.zeros(0, dtype=np.int64)
    return np.asarray(index) if isinstance(index, torch.Tensor | Foreign) else index


@pytest.mark.parametrize(
    ("kind", "shape"), [("device", (6, 3)), ("pinned", (6, 3, 2)), ("mmap", (6, 3)), ("mmap", (6,))]
)
def test_any_index_is_numpys(kind, shape):
    array = np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape)
    gadget = opened(array, kind)
    indexes = ROWS + (PARTS if len(shape) > 1 else [part for part in PARTS if not isinstance(part, tuple)])
    for index in indexes:
        expected = array[numpys(index)]
        found = gadget.getData(index)
        assert isinstance(found, torch.Tensor)
        assert np.array_equal(found.numpy(), expected), index
        values = np.random.default_rng(0).normal(size=np.shape(expected)).astype(np.float32)
        array[numpys(index)] = values  # the last one of a repeated place stays here, too
        gadget.insertData(torch.from_numpy(values), index)
        assert np.array_equal(gadget.getNumpyVersion(), array), index


def test_what_is_given_and_what_is_read_are_copies_and_the_corpus_is_none():
    for source in (np.ones((3, 2), dtype=np.float32), torch.ones(3, 2), [[1.0, 1.0]] * 3):
        gadget = SpeedTorch.DataGadget(source)
        gadget.gadgetInit()
        gadget.insertData(torch.zeros(2), 1)
        assert gadget.getNumpyVersion().tolist() == [[1, 1], [0, 0], [1, 1]]
        assert float(torch.as_tensor(source).detach().sum()) == 6
    gadget = opened(np.zeros((4, 2), dtype=np.float32))
    gadget.getData([1]).fill_(7)
    assert not gadget.CUPYcorpus.any()
    gadget.CUPYcorpus[2] = 7
    assert gadget.getData(2).tolist() == [7, 7]
    # From one place of the table to another, as rows and as parts of them.
    gadget.insertData(gadget.getTorchVar()[2:4], slice(1, 3))
    assert gadget.getNumpyVersion()[:, 0].tolist() == [0, 7, 0, 0]
    gadget.insertData(gadget.getTorchVar()[:3, :], (slice(1, 4), slice(None)))
    assert gadget.getNumpyVersion()[:, 0].tolist() == [0, 0, 7, 0]
    assert gadget.getCupyVar() is not gadget.getNumpyVersion()


@pytest.mark.parametrize("kind", GADGETS)
def test_bad_calls_write_nothing(kind):
    gadget = opened(np.zeros((6, 3), dtype=np.float32), kind)
    ones = torch.ones
    for data, index, error in (
        (ones(2, 3), [0, 6], RowIndexError),
        (ones(3), -7, RowIndexError),
        (ones(1), (0, 3), RowIndexError),
        (ones(5), np.array([True] * 5), RowIndexError),
        (ones(3), [0.0], InvalidTypeError),
        (ones(2, 3), [0], InvalidValueError),
        (ones(3, dtype=torch.complex64), 0, InvalidTypeError),
        ([torch.empty((), device="meta")] * 3, 0, InvalidTypeError),  # no more NumPy's than one on CUDA
        (ones(3), torch.tensor([0, 1, 0, 0, 0, 1], dtype=torch.uint8), InvalidTypeError),
        ("text", 0, InvalidTypeError),
        ([[1.0], [2.0, 3.0]], 0, InvalidTypeError),
    ):
        with pytest.raises(error) as caught:
            gadget.insertData(data, index)
        assert "\n" not in str(caught.value)
        assert not gadget.CUPYmemmap.any() if kind == "mmap" else not gadget.CUPYcorpus.any()


GADGETS_THAT_CANNOT_BE = """
DataGadget("data.npy").getData(0) -> InvalidValueError: DataGadget has no rows yet; call gadgetInit\\(\\) first
DataGadget("nowhere.npy").gadgetInit() -> StorageError: check the path
DataGadget(np.zeros(())).gadgetInit() -> InvalidValueError: a single number
DataGadget(np.zeros(3, dtype=complex)).gadgetInit() -> InvalidTypeError: complex
DataGadget(None).gadgetInit() -> InvalidTypeError: fileName
DataGadgetMM(np.zeros((2, 2))).gadgetInit() -> InvalidTypeError: use DataGadget
setattr(mapped, "CUPYmemmap", np.zeros((2, 2))) -> InvalidTypeError: takes no array but a .npy file; pass fileName or load
DataGadgetMM("order.npy").gadgetInit() -> InvalidValueError: Fortran
"""


def test_gadgets_that_cannot_be():
    np.save("order.npy", np.asfortranarray(np.zeros((3, 2))))
    for refusal in refusals(GADGETS_THAT_CANNOT_BE):
        check_refused(refusal, **vars(SpeedTorch), np=np, mapped=opened(np.zeros((2, 2)), "mmap"))


@pytest.mark.parametrize(
    ("dtype", "value", "given", "fits"),
    [
        ("int8", 128, torch.int64, False),
        ("uint32", 2**32 - 1, torch.int64, True),
        ("int64", 2**63, torch.uint64, False),
        ("uint64", 2**63 - 1, torch.int64, True),
        ("uint64", -1, torch.int32, False),
        ("bool", 2, torch.int32, False),
    ],
)
def test_integers_are_taken_where_they_fit(dtype, value, given, fits):
    gadget = opened(np.zeros((2, 1), dtype=dtype))
    if fits:
        gadget.insertData(torch.tensor([value], dtype=given), 0)
        assert gadget.getNumpyVersion()[0, 0] == np.array(value).astype(dtype)
    else:
        with pytest.raises(InvalidValueError, match=f"has the value {value} but the rows hold torch.{dtype}; clamp it"):
            gadget.insertData(torch.tensor([value], dtype=given), 0)


@pytest.mark.parametrize("shape", [(6, 3), (6,)], ids=str)
def test_saving_to_the_mapped_file_leaves_it_mapped(shape):
    gadget = opened(np.zeros(shape, dtype=np.float32), "mmap")
    gadget.insertData(2.0, slice(None))
    gadget.saveCupy("data")
    assert (np.load("data.npy") == 2).all()
    gadget.saveCupy("other.npy")
    gadget.insertData(3.0, slice(None))
    assert (np.load("data.npy") == 3).all()
    assert (np.load("other.npy") == 2).all()


MATRICES = {
    "COM": ({"datatype": "uint32"}, "CUPYCom", "uint32"),
    "COMMM": ({}, "CUPYmemmap", "uint32"),
    "GPUPytorchCOM": ({}, "pytorchGPUVar", "int32"),
    "CPUPytorchCOM": ({}, "pytorchCPUVar", "int32"),
    "PytorchCOM": ({"deviceType": "cpu"}, "pytorchGPUVar", "int32"),
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name, tmp_path):
    options, attribute, dtype = MATRICES[name]
    matrix = getattr(SpeedTorch, name)(5, **options)
    with pytest.raises(InvalidValueError, match=r"call comInit\(\) first"):
        matrix.getData((0, 0))
    matrix.comInit()
    rows, columns = np.array([0, 4, 0]), np.array([1, 2, 1])
    expected = np.zeros((5, 5), dtype=dtype)
    expected[rows, columns] = [3, 4, 5]
    matrix.insertData(np.array([3, 4, 5], dtype=dtype), (rows, columns))
    assert np.array_equal(matrix.getNumpyVersion(), expected)
    assert np.array_equal(np.asarray(getattr(matrix, attribute)), expected)
    assert np.array_equal(matrix.getData((slice(0, 2), slice(1, 4))).numpy(), expected[0:2, 1:4])
    matrix.saveCupy("matrix.npy")
    matrix.comInit()
    assert not matrix.getNumpyVersion().any()
    matrix.loadCupy("matrix.npy")
    assert np.array_equal(matrix.getNumpyVersion(), expected)
    with pytest.raises(InvalidValueError, match=r"has shape \(4, 4\) but must be \(5, 5\)"):
        matrix._set(np.zeros((4, 4), dtype=dtype))
    assert [path.name for path in tmp_path.iterdir()] == ["matrix.npy"]
