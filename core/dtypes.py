"""Element types by name, with their size and the numpy type that carries their bytes.

Names are those of safetensors' readers and of torch (``torch.bfloat16`` without the prefix).  A dtype
travels as this text and never as an object.  numpy has no bfloat16 or float8:
their bytes are carried by unsigned integers of the same size, which is all
that a copy needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: Text on the wire and in layouts.
        nbytes: Size of one element in bytes.
        carrier: numpy dtype of the same size that moves the element's bytes unchanged.
    """

    name: str
    nbytes: int
    carrier: np.dtype[np.generic]


def _dtype(name: str, carrier: str) -> DType:
    carried: np.dtype[np.generic] = np.dtype(carrier)
    return DType(name, carried.itemsize, carried)


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _dtype("bool", "u1"),
        _dtype("uint8", "u1"),
        _dtype("int8", "i1"),
        _dtype("int16", "i2"),
        _dtype("uint16", "u2"),
        _dtype("int32", "i4"),
        _dtype("uint32", "u4"),
        _dtype("int64", "i8"),
        _dtype("uint64", "u8"),
        _dtype("float16", "u2"),
        _dtype("bfloat16", "u2"),
        _dtype("float32", "u4"),
        _dtype("float64", "u8"),
        _dtype("complex64", "u8"),
        _dtype("float8_e4m3fn", "u1"),
        _dtype("float8_e5m2", "u1"),
        _dtype("float8_e4m3fnuz", "u1"),
        _dtype("float8_e5m2fnuz", "u1"),
        _dtype("float8_e8m0fnu", "u1"),
    )
}


def dtype_named(name: str) -> DType:
    """Return the element type called ``name``.

    Raises:
        KeyError: The name is none of ``DTYPES``; callers turn it into their own error.

    >>> dtype_named("bfloat16").nbytes
    2
    """
    return DTYPES[name]
