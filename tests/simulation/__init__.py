"""Whole runs on real machines under a virtual clock, with whatever can go wrong."""
