"""Moves new model weights from trainer ranks into rollout engines, node by node, and proves coverage first."""
