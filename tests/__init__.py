"""Tests of weightd; folders below need no file like this one (pytest runs in importlib mode)."""
