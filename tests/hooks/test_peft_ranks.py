"""Adapters, facts and replicas under FSDP2, on four real ranks, against PEFT's merge of the whole model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hooks.peft_ranks import CASES, LATE_S, LIMIT_S, WORLD

Found = list[dict[str, list[str]]]

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.timeout(2 * LIMIT_S + 20)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run all cases once."""
    folder = tmp_path_factory.mktemp("peft")
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.peft_ranks", str(folder)]
    with (folder / "log").open("w") as log:
        parent = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = parent.wait(2 * LIMIT_S)
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
                parent.wait(5)
    assert code == 0, (folder / "log").read_text()[-4000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("case", list(CASES))
def test_what_is_published_is_what_peft_merges(found: Found, case: str) -> None:
    assert [rank[case] for rank in found] == [[]] * WORLD


def test_ranks_that_use_different_adapters_all_refuse(found: Found) -> None:
    for rank in found:
        assert "E_LORA: " in rank["different adapters"][0]
        assert "no trainer rank holds" in rank["different adapters"][0]
        assert "all are to use the same adapters" in rank["different adapters"][0]


def test_replicas_that_disagree_are_refused_on_every_rank(found: Found) -> None:
    for rank in found:
        missing, text, *names = rank["replicas"]

        assert missing == "False"
        assert text.startswith("E_REPLICAS: replicas disagree: head, box [2, 3] from [0, 0]\n")
        assert "trainer ranks 0 and 1 hold different bytes" in text
        assert names == ["head", "own"]


def test_replicas_of_a_part_are_compared_with_their_twins_only(found: Found) -> None:
    for rank in found:
        text = rank["equal boxes of some"][0]

        assert text.startswith("E_REPLICAS: replicas disagree: weight, box [4, 3] from [4, 0]\n")
        assert "trainer ranks 1 and 3 hold different bytes" in text


def test_stages_that_hold_a_tied_weight_under_two_names_are_compared(found: Found) -> None:
    for rank in found:
        text = rank["tied stages"][0]

        assert "box [2, 3] from [0, 0]\n" in text
        assert "trainer ranks 0 and 1 hold different bytes" in text


def test_frozen_shards_are_copied_once_and_watched(found: Found) -> None:
    for rank in found:
        once, text = rank["frozen shards"]

        assert once == "True"
        assert text.startswith("E_FROZEN: emb.weight is declared frozen and was written 1 times")


def test_tie_that_sharding_breaks_is_never_picked_from(found: Found) -> None:
    """Ranks 1 and 2 hold no element of both; one rank that refuses is enough for the version to fail."""
    for rank, told in enumerate(found):
        last = "E_TIE" if rank in (0, 3) else "nothing was raised"

        assert ["()", "emb.weight", "head.weight", last] == told["broken tie"]


def test_rank_that_is_late_ends_the_exchange_within_its_limit(found: Found) -> None:
    for rank in (0, 2, 3):
        text, seconds, again, reduced = found[rank]["late rank"]

        assert text.startswith("E_EXCHANGE: lora: the exchange among 4 trainer ranks failed after ")
        assert f"trainer rank {rank}\n" in text
        assert float(seconds) < LATE_S + 4
        assert "failed after 0.0 s (collect_s 5.0): one before it failed (" in again
        assert reduced == "16"


def test_late_rank_itself_is_told_and_the_trainers_own_collectives_are_in_step(found: Found) -> None:
    text, reduced = found[1]["late rank"]

    assert text.startswith("E_EXCHANGE: lora: the exchange among 4 trainer ranks failed after ")
    assert reduced == "16"
