"""The sizes of the demo: a model, the engine that serves it, and where the ranks of both are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

NODES = ("a", "b")
TRAINER_NODES = ("a", "a", "b", "b")
"""Node of every trainer rank."""

ENGINE_NODES = ("a", "a", "b", "b")
"""Node of every engine rank: tensor parallelism that spans nodes."""

ENGINE = "E0"
VERSIONS = 3
LEFT_OUT = 3
"""The engine rank that is missing in the second run."""

# Nothing divides by four ranks: not the hidden size, the MLP, the heads of keys and values, or the vocabulary.
MODEL: dict[str, Any] = {
    "vocab_size": 3001,
    "hidden_size": 294,
    "intermediate_size": 18 * 43,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 26,
    "tie_word_embeddings": False,
}

ENGINE_CUT: dict[str, Any] = {
    "size": 4,
    "layers": MODEL["num_hidden_layers"],
    "hidden_size": MODEL["hidden_size"],
    "head_dim": MODEL["head_dim"],
    "heads": [4, 4, 2, 2],
    "kv_heads": [2, 2, 1, 1],
    "intermediate": [5 * 43, 5 * 43, 4 * 43, 4 * 43],
    "vocab_size": MODEL["vocab_size"],
    "vocab_rows": 752,  # 3001 rows padded to 47 blocks of 64
}

ENGINES_DECLARED = {ENGINE: len(ENGINE_NODES)}
"""The roster, as trainer rank 0 declares it."""


def write_sizes(folder: Path) -> None:
    """Write the sizes of model and engine as the files that the ranks read."""
    for name, value in (("config", MODEL), ("engine", ENGINE_CUT)):
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(value))
