"""Folders for daemons of tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightd.daemon.local_nodes import short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder in which unix sockets have room, however long the test's name is."""
    made = short_folder("wd-")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def module_folder() -> Iterator[Path]:
    """Return such a folder for a whole module."""
    made = short_folder("wd-")
    yield made
    shutil.rmtree(made)
