"""Megatron-style layouts by declaration: which parameter is cut how, and which checkpoint tensors it is made of."""

from weightd.trainer_hooks.adapters.megatron.declaration import Megatron
from weightd.trainer_hooks.adapters.megatron.experts import Experts
from weightd.trainer_hooks.adapters.megatron.rules import Rule
from weightd.trainer_hooks.adapters.megatron.splits import Column, GateUp, GroupedQKV, Row, Skip, Vocabulary, Whole

__all__ = ["Column", "Experts", "GateUp", "GroupedQKV", "Megatron", "Row", "Rule", "Skip", "Vocabulary", "Whole"]
