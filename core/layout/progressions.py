"""Common members of arithmetic progressions, exactly and for whole columns at once.

Along one dimension a piece is the progression ``start + step * i``.  Two of
them meet in a progression again, whose step is the least common multiple of
both (Chinese remainder theorem).  Nearly every step is 1, so those rows take a
path of two comparisons.

Every intermediate stays inside int64 for starts below 2**40 and steps below
2**31, which is what ``checks`` admits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from weightd.core.layout.columns import Int64


def meet(
    start_a: Int64, extent_a: Int64, step_a: Int64, start_b: Int64, extent_b: Int64, step_b: Int64
) -> tuple[Int64, Int64, Int64]:
    """Return start, extent and step of the common members; extent 0 where there is none.

    Args:
        start_a: First members, any shape; all six arrays have the same.
        extent_a: Numbers of members, at least 1.
        step_a: Distances of neighbours, at least 1; 1 where there is one member (``boxes.tidy``).
        start_b: As ``start_a``, of the other side.
        extent_b: As ``extent_a``, of the other side.
        step_b: As ``step_a``, of the other side.

    Returns:
        Three arrays; step is 1 where the extent is at most 1.

    >>> a = np.array
    >>> [x.tolist() for x in meet(a([1]), a([5]), a([2]), a([0]), a([4]), a([3]))]  # 1,3,5,7,9 and 0,3,6,9
    [[3], [2], [6]]
    """
    start = np.maximum(start_a, start_b)
    last = np.minimum(start_a + (extent_a - 1) * step_a, start_b + (extent_b - 1) * step_b)
    step: Int64 = np.ones_like(start)
    stepped = (step_a != 1) | (step_b != 1)
    if stepped.any():
        first, common = _first_common(start_a[stepped], step_a[stepped], start_b[stepped], step_b[stepped])
        start[stepped] = np.where(first < 0, last[stepped] + 1, first)
        step[stepped] = common
    extent = np.maximum((last - start) // step + 1, 0)
    return start, extent, np.where(extent > 1, step, 1)


def _first_common(start_a: Int64, step_a: Int64, start_b: Int64, step_b: Int64) -> tuple[Int64, Int64]:
    """Return the first common member of two endless progressions (-1: none) and their common step."""
    divisor = np.gcd(step_a, step_b)
    apart = start_b - start_a
    modulus = step_b // divisor
    # start_a + t * step_a = start_b (mod step_b), solved for the smallest t >= 0
    t = (apart // divisor % modulus) * _inverse(step_a // divisor % modulus, modulus) % modulus
    first = start_a + t * step_a
    common = step_a // divisor * step_b
    late = np.maximum(start_a, start_b) - first
    first = first + np.maximum(-(-late // common), 0) * common
    return np.where(apart % divisor == 0, first, -1), common


def _inverse(value: Int64, modulus: Int64) -> Int64:
    """Return x with value * x = 1 (mod modulus), by Euclid's algorithm on whole columns."""
    r_old, r = value, modulus
    x_old, x = np.ones_like(value), np.zeros_like(value)
    while r.any():
        going = r != 0
        quotient = np.where(going, r_old // np.where(going, r, 1), 0)
        r_old, r = np.where(going, r, r_old), np.where(going, r_old - quotient * r, 0)
        x_old, x = np.where(going, x, x_old), np.where(going, x_old - quotient * x, x)
    return x_old % modulus
