"""The life of a version: the machines of a node and of the leader, what they hear and what they want done."""
