"""Bytes and memory inside one host: sealed pools, descriptors, a hook's control socket, copies; no event loop."""
