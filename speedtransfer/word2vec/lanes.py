"""Vectors of `WIDTH` numbers for numba, which has none, and sums and products of rows by them, as wide as some together.

Left to itself the compiler keeps no sums in registers over two loops, and adds the ends of rows number by number. A vector
that is wider than the processor's takes several of those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from speedtransfer.jit import compile_function

WIDTH = 16  # a cache line of float32
# Sums in any order, which is what lets them run in vectors; infinities and NaN stay what they are.
_MATH = {"reassoc", "contract", "arcp", "nsz"}

_Code = Callable[[Any, Any, Any, Any], Any]
# Of IEEE 754: bits of the fraction, and what is added to the exponent; and terms of exp's series that such numbers need.
_FRACTION_BIAS_AND_TERMS = {32: (23, 127, 7), 64: (52, 1023, 13)}


class Lanes(types.Type):
    """The type, for numba, of a vector of `WIDTH` numbers of `dtype`."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, data_models: Any, lanes: Lanes) -> None:
        super().__init__(data_models, lanes, ir.VectorType(data_models.lookup(lanes.dtype).get_value_type(), WIDTH))


def _address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the address of the vector that begins at array, row and column, the first three arguments."""
    array_type, *index_types = signature.args[:3]
    array = context.make_array(array_type)(context, builder, args[0])
    row, column = (
        context.cast(builder, value, kind, types.intp) for value, kind in zip(args[1:3], index_types, strict=True)
    )
    columns = cgutils.unpack_tuple(builder, array.shape)[1]
    first = builder.gep(array.data, [builder.add(builder.mul(row, columns), column)])
    return builder.bitcast(first, ir.VectorType(context.get_data_type(array_type.dtype), WIDTH).as_pointer())


@intrinsic
def load(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, _Code]:
    """Return the vector of ``array[row, column:]``, array being contiguous; nothing is checked."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, signature, args), align=array.dtype.bitwidth // 8)

    return Lanes(array.dtype)(array, row, column), code


@intrinsic
def store(typing: Any, array: Any, row: Any, column: Any, lanes: Any) -> tuple[Any, _Code]:
    """Set the numbers that `load` would return."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[3], _address(context, builder, signature, args), align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, row, column, lanes), code


@intrinsic
def fill(typing: Any, number: Any) -> tuple[Any, _Code]:
    """Return a vector of `number`, `WIDTH` times."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        unset = ir.Constant(ir.VectorType(args[0].type, WIDTH), ir.Undefined)
        first = builder.insert_element(unset, args[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, unset, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH))

    return Lanes(number)(number), code


def _call(builder: Any, name: str, dtype: Any, result: Any, args: Any, **how: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{WIDTH}f{dtype.bitwidth}")
    return builder.call(function, args, **how)


@intrinsic
def mul_add(typing: Any, a: Any, b: Any, c: Any) -> tuple[Any, _Code]:
    """Return a * b + c, rounded once where the processor can."""
    return a(a, b, c), lambda context, builder, signature, args: _call(builder, "fmuladd", a.dtype, args[0].type, args)


@intrinsic
def add(typing: Any, a: Any, b: Any) -> tuple[Any, _Code]:
    """Return a + b."""
    return a(a, b), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def total(typing: Any, a: Any) -> tuple[Any, _Code]:
    """Return the sum of the numbers of `a`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = args[0].type.element
        zero = ir.Constant(number, 0.0)
        return _call(builder, "vector.reduce.fadd", a.dtype, number, [zero, *args], fastmath=("reassoc",))

    return a.dtype(a), code


@intrinsic
def sigmoid(typing: Any, scores: Any, heights: Any) -> tuple[Any, _Code]:
    """Return ``heights / (1 + exp(-scores))`` of vectors, within some roundings; scores count as 80 beyond that."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, bits = args[0].type, scores.dtype.bitwidth
        fraction, bias, last = _FRACTION_BIAS_AND_TERMS[bits]

        def constant(number: float, kind: Any = vector) -> Any:
            return ir.Constant(kind, [number] * WIDTH)

        def multiply_add(a: Any, b: Any, c: Any) -> Any:
            return _call(builder, "fmuladd", scores.dtype, vector, [a, b, c])

        x = builder.fneg(args[0])
        for sign, bound in (("<", constant(-80.0)), (">", constant(80.0))):  # NaN stays NaN
            x = builder.select(builder.fcmp_ordered(sign, x, bound), bound, x)
        # exp(x) is 2**n exp(r), n whole and r within half of log(2), whose first part has few bits, for an exact product.
        n = _call(builder, "rint", scores.dtype, vector, [multiply_add(x, constant(1 / math.log(2)), constant(0.0))])
        r = multiply_add(n, constant(2.1219444005469058e-4), multiply_add(n, constant(-0.693359375), x))
        series = constant(1 / math.factorial(last))
        for k in range(last - 1, -1, -1):
            series = multiply_add(series, r, constant(1 / math.factorial(k)))
        whole = ir.VectorType(ir.IntType(bits), WIDTH)
        exponent = builder.shl(builder.add(builder.fptosi(n, whole), constant(bias, whole)), constant(fraction, whole))
        power = builder.bitcast(exponent, vector)
        return builder.fdiv(args[1], multiply_add(series, power, constant(1.0)))

    return scores(scores, heights), code


# --- rows --------------------------------------------------------------------------------------------------------------


compile_loops = partial(compile_function, fastmath=_MATH)
# As a part of whatever calls it: to pass an array costs more than to add some rows.
compile_inlined = partial(compile_loops, forceinline=True)


def zero_rows(count: int, columns: int, dtype: Any) -> np.ndarray:
    """Return zeros of shape (count, columns rounded up to whole vectors); each row begins where a line of the cache does."""
    columns = -(-columns // WIDTH) * WIDTH
    numbers = np.zeros(count * columns + WIDTH, dtype=dtype)
    first = -(numbers.ctypes.data // numbers.itemsize) % WIDTH
    return numbers[first : first + count * columns].reshape(count, columns)


@compile_loops
def set_way(starts: np.ndarray, ends: np.ndarray, rate: Any, way: np.ndarray) -> None:
    """Set `way` (n, dim) to the way from `ends` back to `starts`, divided by `rate`."""
    for n in range(len(way)):
        for d in range(way.shape[1]):
            way[n, d] = (starts[n, d] - ends[n, d]) / rate


@compile_inlined
def copy_row(into: np.ndarray, n: int, rows: np.ndarray, m: int) -> None:
    """Set row `n` of `into` to row `m` of `rows`."""
    for d in range(0, into.shape[1], WIDTH):
        store(into, n, d, load(rows, m, d))


@compile_inlined
def add_row(into: np.ndarray, n: int, rows: np.ndarray, m: int) -> None:
    """Add row `m` of `rows` to row `n` of `into`."""
    for d in range(0, into.shape[1], WIDTH):
        store(into, n, d, add(load(into, n, d), load(rows, m, d)))


@compile_inlined
def mean_row(into: np.ndarray, n: int, rows: np.ndarray, chosen: np.ndarray, first: int, last: int) -> None:
    """Set row `n` of `into` to the mean of the rows that `chosen` has from `first` to before `last`, one at least."""
    copy_row(into, n, rows, chosen[first])
    if last > first + 1:
        for j in range(first + 1, last):
            add_row(into, n, rows, chosen[j])
        for d in range(into.shape[1]):
            into[n, d] /= last - first


@compile_inlined
def score(rows: np.ndarray, n: int, others: np.ndarray, m: int) -> Any:
    """Return the dot product of two rows."""
    sums = fill(rows.dtype.type(0))
    for d in range(0, rows.shape[1], WIDTH):
        sums = mul_add(load(rows, n, d), load(others, m, d), sums)
    return total(sums)


@compile_inlined
def weighted_sum(
    into: np.ndarray, n: int, weights: np.ndarray, rows: np.ndarray, chosen: np.ndarray, first: int, last: int
) -> None:  # fmt: skip
    """Set row `n` of `into` to the sum of ``weights[0, j] * rows[chosen[j]]``, j from `first` to `last`."""
    for d in range(0, into.shape[1], WIDTH):
        sums = fill(into.dtype.type(0))
        for j in range(first, last):
            sums = mul_add(fill(weights[0, j]), load(rows, chosen[j], d), sums)
        store(into, n, d, sums)


@compile_inlined
def add_products(into: np.ndarray, anew: bool, weights: np.ndarray, rows: np.ndarray, count: int) -> None:
    """Add to `into` (k, dim), k a multiple of 4, or where `anew` set it to, the product of `weights` (k, `count`) and `rows`.

    `rows` are (`count`, dim); of weights and rows there may be more than `count`.
    """
    zero = fill(rows.dtype.type(0))
    for d in range(0, into.shape[1], WIDTH):
        for k in range(0, len(into), 4):
            if anew:
                s0 = s1 = s2 = s3 = zero
            else:
                s0, s1, s2, s3 = load(into, k, d), load(into, k + 1, d), load(into, k + 2, d), load(into, k + 3, d)
            for n in range(count):
                numbers = load(rows, n, d)
                s0 = mul_add(fill(weights[k, n]), numbers, s0)
                s1 = mul_add(fill(weights[k + 1, n]), numbers, s1)
                s2 = mul_add(fill(weights[k + 2, n]), numbers, s2)
                s3 = mul_add(fill(weights[k + 3, n]), numbers, s3)
            store(into, k, d, s0)
            store(into, k + 1, d, s1)
            store(into, k + 2, d, s2)
            store(into, k + 3, d, s3)
