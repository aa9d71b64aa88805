"""Lists and helpers that tests of several modules share."""

import contextlib
import copy
import io
import itertools
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from speedtransfer.dtypes import SAFETENSORS_NAMES
from speedtransfer.errors import SpeedtransferError

FLOAT_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INTEGER_DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOAT8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
TABLE_DTYPES = FLOAT_DTYPES + FLOAT8_DTYPES + INTEGER_DTYPES
NO_NUMPY_DTYPES = [torch.bfloat16, *FLOAT8_DTYPES]
NPY_DTYPES = [dtype for dtype in TABLE_DTYPES if dtype not in NO_NUMPY_DTYPES]


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def numbers(shape, dtype, seed=0):
    """Return a CPU tensor of numbers that `dtype` holds; negative ones too where it has them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(max(info.min, -(2**40)), min(info.max, 2**40), shape, generator=generator).to(dtype)


def bits(tensor):
    """Return the bytes of a tensor or array, (..., bytes of a row): equal bits, not only equal values."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu()
        # That of no rows may have strides of 0, and contiguous() leaves it so.
        tensor = tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)
        return (tensor if tensor.dim() else tensor.view(1)).view(torch.uint8).numpy()
    return np.ascontiguousarray(tensor).view(np.uint8)


def assert_same_bits(actual, expected):
    assert tuple(actual.shape) == tuple(expected.shape)
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(bits(actual), bits(expected))


def same_values(actual, expected):
    """Compare bit by bit, except that every NaN is as good as another: a conversion may choose."""
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if expected.is_floating_point() and expected.itemsize > 1:  # codes of 8 bits are compared as such
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = (values.masked_fill(values.isnan(), 0) for values in (actual, expected))
    assert_same_bits(actual, expected)


def saved(value, weights_only=False):
    """Return what ``torch.load`` makes of what ``torch.save`` has written of a value."""
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


# Ways to copy a module or a tensor.
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value)), "torch.save": saved}


class Doubled(torch.nn.Embedding):
    """A subclass with code of its own, as Gemma's."""

    def forward(self, input):
        return super().forward(input) * 2


def one_line(error):
    """Return the message of a `pytest.raises` result: one line, the value and rule, then a remedy after a semicolon."""
    message = str(error.value)
    assert message, "the message is empty"
    assert "\n" not in message, f"not one line: {message!r}"
    assert "; " in message, f"no remedy: {message!r}"
    return message


@contextlib.contextmanager
def refused(error, words=""):
    """As `pytest.raises`, for one of our errors, whose message is `one_line`."""
    with pytest.raises(error, match=words) as caught:
        yield caught
    assert isinstance(caught.value, SpeedtransferError)
    one_line(caught)


def raising(error):
    """Return a function that raises, whatever its arguments."""

    def fail(*args, **kwargs):
        raise error

    return fail


def elsewhere(use):
    """Return what `use` does in another thread, while this one waits."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(use).result(60)


def concurrently(use, each):
    """Call `use` with each of some arguments, in threads of their own at the same time."""
    each = list(each)
    with ThreadPoolExecutor(len(each)) as pool:
        list(pool.map(use, each))


def take_step(optimizer, loss):
    """Make a step of an optimizer for a loss, and clear the gradients."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def midway(optimizer, use):
    """Make a step of an Adam, call `use` in the middle of it, and return what that returned; steps that it makes are whole."""
    seen, begin = [], torch.optim.Adam._init_group

    def begun(self, *args):
        found = begin(self, *args)
        if self is optimizer and not seen:
            seen.append(None)
            seen.append(use())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam, "_init_group", begun)
        optimizer.step()
    return seen[1]


# --- tables as others publish them: written by hand, split over files whose headers are of any length -----------------


def write_file(path, tensors, pad=0):
    """Write a safetensors file of `tensors` by name, whose header ends `pad` bytes after a multiple of 8."""
    header, content = {}, b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        offsets = [len(content), len(content) + len(data)]
        header[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        content += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def cuts_of(num_rows, parts):
    """Return where each of some parts of rows ends, among them parts without rows and of one row."""
    ends = sorted({min(1, num_rows), num_rows // 3, num_rows // 3 + 1, *range(0, num_rows, max(num_rows // parts, 1))})
    return [0, 0, *[end for end in ends if end <= num_rows], num_rows]


def write_parts(folder, values, parts=4, key="shard_{}.weight", pads=(0,), beside=()):
    """Write the rows of `values` to several files, and return (file, key) pairs."""
    cuts, pairs = cuts_of(len(values), parts), []
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        name, path = key.format(number), Path(folder, f"part-{number:03d}.safetensors")
        tensors = dict(beside) | {name: values[start:stop]}
        write_file(path, tensors, pads[number % len(pads)])
        pairs.append((path, name))
    return pairs
