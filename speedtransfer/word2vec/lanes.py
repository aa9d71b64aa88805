"""Vectors of `WIDTH` numbers for numba, which has none: what a processor loads, adds and multiplies at once.

Left to itself the compiler keeps no sums in registers over two loops, and adds the ends of rows number by number. A vector
that is wider than the processor's takes several of those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

WIDTH = 16  # a cache line of float32

_Code = Callable[[Any, Any, Any, Any], Any]
_FRACTION_AND_BIAS = {
    32: (23, 127),
    64: (52, 1023),
}  # of IEEE 754: bits of the fraction, and what is added to the exponent


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

    return Lanes(number)(number), lambda context, builder, signature, args: _fill(builder, args[0])


@intrinsic
def fill_like(typing: Any, a: Any, number: Any) -> tuple[Any, _Code]:
    """Return a vector like `a` of `number`, `WIDTH` times."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fill(builder, context.cast(builder, args[1], number, a.dtype))

    return a(a, number), code


def _fill(builder: Any, number: Any) -> Any:
    unset = ir.Constant(ir.VectorType(number.type, WIDTH), ir.Undefined)
    first = builder.insert_element(unset, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, unset, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH))


@intrinsic
def bits_of(typing: Any, a: Any) -> tuple[Any, _Code]:
    """Return how many bits a number of `a` has."""
    return types.intp(a), lambda context, builder, signature, args: context.get_constant(types.intp, a.dtype.bitwidth)


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
def negative(typing: Any, a: Any) -> tuple[Any, _Code]:
    """Return -a."""
    return a(a), lambda context, builder, signature, args: builder.fneg(*args)


@intrinsic
def divide(typing: Any, a: Any, b: Any) -> tuple[Any, _Code]:
    """Return a / b."""
    return a(a, b), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def rint(typing: Any, a: Any) -> tuple[Any, _Code]:
    """Return the nearest whole numbers."""
    return a(a), lambda context, builder, signature, args: _call(builder, "rint", a.dtype, args[0].type, args)


@intrinsic
def clip(typing: Any, a: Any, low: Any, high: Any) -> tuple[Any, _Code]:
    """Return `a` held between the vectors `low` and `high`; NaN stays NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, least, most = args
        value = builder.select(builder.fcmp_ordered("<", value, least), least, value)
        return builder.select(builder.fcmp_ordered(">", value, most), most, value)

    return a(a, low, high), code


@intrinsic
def power_of_two(typing: Any, a: Any) -> tuple[Any, _Code]:
    """Return 2 to the power of `a`, whole numbers that a normal exponent can be."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fraction, bias = _FRACTION_AND_BIAS[a.dtype.bitwidth]
        whole = ir.VectorType(ir.IntType(a.dtype.bitwidth), WIDTH)
        exponent = builder.add(builder.fptosi(args[0], whole), ir.Constant(whole, [bias] * WIDTH))
        return builder.bitcast(builder.shl(exponent, ir.Constant(whole, [fraction] * WIDTH)), args[0].type)

    return a(a), code


@intrinsic
def total(typing: Any, a: Any) -> tuple[Any, _Code]:
    """Return the sum of the numbers of `a`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = args[0].type.element
        zero = ir.Constant(number, 0.0)
        return _call(builder, "vector.reduce.fadd", a.dtype, number, [zero, *args], fastmath=("reassoc",))

    return a.dtype(a), code
