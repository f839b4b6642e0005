"""Which line of the loader is running."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_NOT_LOADERS = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (__file__, torch.__file__))


def loader_line() -> str:
    """Return file and line of the innermost frame that is neither torch's nor of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = os.path.abspath(frame.f_code.co_filename)
        if not path.startswith(_NOT_LOADERS):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
