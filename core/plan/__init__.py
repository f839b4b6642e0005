"""The element proof, the choice of sources, and the plan of each node; everything is computed, nothing is moved."""
