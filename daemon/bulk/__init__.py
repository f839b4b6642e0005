"""Bytes between nodes: what a sender serves, what a receiver lands, and the transports in between."""
