"""Exact texts of the errors of a trainer's hook, and that they survive a trip as data."""

import pytest

from tests.golden_text import check_error_is_whole, check_golden
from weightd.core.errors import WeightdError
from weightd.trainer_hooks import faults

ERRORS: dict[str, WeightdError] = {
    "E_PLACEMENT.partial": faults.UnsupportedPlacement(
        "layers.3.mlp.weight", "placement Partial(sum) on mesh dimension 1", ("Shard", "Replicate")
    ),
    "E_PIECES.placements": faults.PiecesDoNotAddUp("layers.3.mlp.weight", (7, 6), (1, 6), (0, 6), 6, 0),
    "E_NAMES.wrapped": faults.NamesCollide("w", ("w", "_orig_mod.w")),
    "E_HOLDINGS.dtype": faults.HoldingsChanged("norm.weight", "(7,) torch.float32 on cpu", "(7,) torch.int8 on cpu"),
    "E_STEP": faults.NotBetweenSteps(7, "1 of 2 micro-batches of the next step are taken", "publish behind it"),
    "E_LIVE": faults.LiveMemoryRefused("layers.3.mlp.weight and 2 more in one memory", "other processes share it"),
    "E_LIVE_WRITTEN": faults.LiveMemoryWritten("layers.3.mlp.weight", 8),
    "E_LIVE_READ": faults.LiveMemoryRead(3, 8, 30.1, 30.0, "E0[1] to apply, 41 of 600 s"),
    "E_LIVE_READ.nothing": faults.LiveMemoryRead(3, 8, 30.1, 30.0),
    "E_FROZEN": faults.FrozenChanged("visual.proj.weight", "was written 2 times"),
    "E_TIE": faults.TieBroken("head.weight", "emb.weight", "(5, 3) bfloat16", "(5, 3) bfloat16", 4, 15),
    "E_TIE.shape": faults.TieBroken("head.weight", "emb.weight", "(5, 3) bfloat16", "(6, 3) bfloat16", 0, 0),
    "E_REPLICAS": faults.ReplicasDisagree("layers.3.norm.weight", (0,), (7,), (1, 3)),
    "E_EXCHANGE": faults.ExchangeFailed("check_replicas", 2, 8, 60.2, 60.0, "Operation timed out!"),
    "E_NOTHING": faults.NothingToPublish("not_synced matches all 2 names on this rank", ("a.weight", "b.weight")),
    "E_LORA_CHOICE": faults.LoraUndecided("layers.0.q_proj", 14, ("merged", "adapter", "Adapter(name)")),
    "E_LORA": faults.LoraUnsupported("layers.0.q_proj", "DoRA of adapter default", ("LoRA of Linear and Embedding",)),
    "E_WORLD.all": faults.WorldUnknown(("arguments rank=None world=None", "torch.distributed is not initialised")),
    "E_NOT_ATTACHED": faults.NotAttached("publish()", "not attached, or closed"),
    "E_SLOT": faults.SlotNotFree(
        3, 9, ("slot 0 holds v7/00ff.1", "slot 1 holds v8/00ff.1"), 900.4, 900.0, "E0[1] to pause, 41 of 600 s"
    ),
    "E_SLOT.nothing": faults.SlotNotFree(0, 1, ("slot 0 holds v7/00ff.1",), 2.0, 2.5),
    "E_WAIT": faults.VersionNotDecided(9, "committed", "fetching", "node b: 3 of 7 MiB", 20.1, 20.0),
    "E_OUTCOME.two": faults.OutcomeUnknown(4, 6),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_text_of_each_error(name: str) -> None:
    error = ERRORS[name]

    assert name.split(".")[0] == error.code
    check_golden(f"errors/{name}", str(error))
    check_error_is_whole(error)


def test_every_class_has_a_text() -> None:
    classes = {c for c in vars(faults).values() if isinstance(c, type) and issubclass(c, faults.TrainerHookError)}

    assert {type(e) for e in ERRORS.values()} == classes - {faults.TrainerHookError}
