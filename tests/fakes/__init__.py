"""Small stand-ins that speak the real messages over real sockets."""
