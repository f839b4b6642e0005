"""Live memory: parameters that are themselves the shared memory, so that a publish copies nothing and a step waits."""
