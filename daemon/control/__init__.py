"""ZeroMQ on anyio: the router for hooks, the links to other daemons, and who may speak on them."""
