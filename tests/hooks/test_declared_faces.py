"""Models and declarations that a hook cannot describe, as their owner meets them: before anything is connected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weightd.core.errors import WeightdError, flatten
from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.receiver import Receiver
from weightd.trainer_hooks.publisher import Publisher


def publisher(source: object) -> Publisher:
    return Publisher(source, run="r", rank=0, world=1, engines={"E0": 1})  # type: ignore[arg-type]


def receiver(params: dict[str, torch.Tensor], layout: Declaration | None = None) -> Receiver:
    return Receiver(params, run="r", engine="E0", k=0, size=1, layout=layout)


def not_declared() -> object:
    declared = Declaration("float32")
    declared.replicated("v", (3,))
    return receiver({"w": torch.zeros(3)}, declared).describe()


def wrong_cut() -> object:
    declared = Declaration("float32")
    declared.column("w", (18, 3), (5, 5, 5), 0)
    return declared


FACES: dict[str, Callable[[], object]] = {
    "E_WORLD": lambda: Publisher({"w": torch.zeros(3)}, run="r"),
    "E_PIECES": lambda: Publisher.from_shards([("w", (4,), (0,), (3,), torch.zeros(2))], run="r", rank=0, world=1),
    "E_NAMES": lambda: publisher([("w", torch.zeros(2)), ("w", torch.zeros(2))]).describe(),
    "E_PLACEMENT": lambda: publisher({"w": torch.zeros(2, device="meta")}).describe(),
    "E_TARGET": lambda: receiver({"w": torch.zeros(2, device="meta")}).describe(),
    "E_DECLARATION": not_declared,
    "E_LAYOUT_CUT": wrong_cut,
}


@pytest.mark.parametrize("code", FACES)
def test_what_cannot_be_described(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(WeightdError) as raised:
        FACES[code]()

    assert code in [e.code for e in flatten([raised.value])]
