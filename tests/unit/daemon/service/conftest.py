"""A folder in which unix sockets have room."""

from tests.integration.conftest import folder

__all__ = ["folder"]
