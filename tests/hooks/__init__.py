"""Tests of the hooks against the frameworks they describe, each rank a process."""
