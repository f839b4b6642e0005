"""Tests with real daemons, real trainer ranks and real engine ranks, each a process."""
