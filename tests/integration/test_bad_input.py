"""What is wrong is refused by code, on the side that caused it and on those that wait; a corrected retry works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, Rank, all_answer, all_do, attach_all, attached

pytestmark = pytest.mark.processes

ATTACH_S = 3.0
ENGINES = {"E0": 2}


@pytest.fixture(scope="module")
def cluster(module_folder: Path) -> Iterator[Cluster]:
    """Every test has a run of its own; none may disturb the next."""
    with Cluster(module_folder, attach_s=ATTACH_S) as started:
        yield started


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def trainers_of(cluster: Cluster, run: str, world: int = 2, **of_rank_1: Any) -> list[Rank]:
    """Start two trainer ranks; what is given is said by rank 1 alone."""
    return [
        cluster.trainer(0, 2, "a", run=run, engines=ENGINES),
        cluster.trainer(1, world, "b", run=run, **of_rank_1),
    ]


def engines_of(cluster: Cluster, run: str, size: int = 2, slot: str | None = None) -> list[Rank]:
    """Start an engine of two ranks; rank 1 believes that they are ``size``, and is on ``slot``."""
    return [cluster.engine("E0", 0, 2, "a", run=run), cluster.engine("E0", 1, size, "b", run=run, slot=slot)]


def assert_delivers(trainers: list[Rank], engines: list[Rank], version: int) -> None:
    all_do(trainers, "publish", version=version)
    assert all_do(engines, "receive", version=version) == [version] * len(engines)
    assert all_do(engines, "differing", contents=version) == [[]] * len(engines)
    all_do(trainers, "wait", version=version)


def attach_all_again(cluster: Cluster, run: str) -> tuple[list[Rank], list[Rank]]:
    """Do it right after a refusal: nothing of the first try may stand in the way."""
    trainers, engines = trainers_of(cluster, run), engines_of(cluster, run)
    attached(trainers, engines)
    return trainers, engines


# ------------------------------------------------------------ at attach


def test_wrong_world(cluster: Cluster, run: str) -> None:
    trainers, engines = trainers_of(cluster, run, world=3), engines_of(cluster, run)
    wrong, *waiting = attach_all([trainers[1], trainers[0], *engines])

    assert wrong.codes == ["E_RANK_UNKNOWN"]
    assert "3" in wrong.text
    for answer in waiting:
        assert answer.codes == ["E_RANK_MISSING"], answer.text
        assert answer.fields("E_RANK_MISSING")["missing_ranks"] == [1]

    assert_delivers(*attach_all_again(cluster, run), 1)


def test_wrong_engine_size(cluster: Cluster, run: str) -> None:
    trainers, engines = trainers_of(cluster, run), engines_of(cluster, run, size=3)
    wrong, *waiting = attach_all([engines[1], engines[0], *trainers])

    assert wrong.codes == ["E_RANK_UNKNOWN"]
    assert [answer.codes for answer in waiting] == [["E_RANK_MISSING"]] * 3

    assert_delivers(*attach_all_again(cluster, run), 1)


def test_unknown_engine(cluster: Cluster, run: str) -> None:
    """A stranger is refused by itself, and the run goes on without it."""
    trainers, engines = trainers_of(cluster, run), engines_of(cluster, run)
    attached(trainers, engines)
    stranger = cluster.engine("E7", 0, 2, "b", run=run)

    assert stranger.fails("attach").codes == ["E_RANK_UNKNOWN"]
    assert_delivers(trainers, engines, 1)


def test_an_engine_on_a_trainers_slot(cluster: Cluster, run: str) -> None:
    """Known only once both have attached: slots are measured.  The mode of the run is disaggregated."""
    trainers, engines = trainers_of(cluster, run, slot="gpu-0"), engines_of(cluster, run, slot="gpu-0")
    answers = attach_all([*trainers, *engines])

    for answer in answers:
        assert answer.codes == ["E_MIXED"], answer.text
        assert answer.fields("E_MIXED")["engine"] == "E0"

    assert_delivers(*attach_all_again(cluster, run), 1)


def test_duplicate_trainer_rank(cluster: Cluster, run: str) -> None:
    trainers, engines = trainers_of(cluster, run), engines_of(cluster, run)
    attached(trainers, engines)
    second = cluster.again(trainers[1])

    answer = second.fails("attach")

    assert answer.codes == ["E_RANK_DUP"]
    assert str(second.pid) in answer.text
    assert str(trainers[1].pid) in answer.text
    assert_delivers(trainers, engines, 1)


@pytest.mark.parametrize(
    "spoil, code, names",
    [
        ({"rename": {"norm.weight": "norm.scale"}}, "E_NAME", ("norm.weight", "norm.scale")),
        ({"skip": ("mlp.up_proj.weight",)}, "E_ELEM_UNCOVERED", ("mlp.up_proj.weight",)),
        ({"dtype": {"norm.weight": "float32"}}, None, ("norm.weight", "float32", "bfloat16")),
        ({"wider": ("mlp.gate_proj.weight",)}, None, ("mlp.gate_proj.weight", "18", "19")),
    ],
    ids=["name", "missing-half", "dtype", "shape"],
)
def test_trainer_and_engine_disagree(
    cluster: Cluster, run: str, spoil: dict[str, Any], code: str | None, names: tuple[str, ...]
) -> None:
    """One trainer rank says something else: every rank of the run gets the report, and none is left behind."""
    trainers, engines = trainers_of(cluster, run, **spoil), engines_of(cluster, run)
    answers = attach_all([*trainers, *engines])

    for answer in answers:
        assert answer.error is not None
        assert answer.error["code"] == "E_REFUSED", answer.text
        assert code is None or code in answer.codes, answer.text
        for name in names:
            assert name in answer.text
    assert len({answer.text for answer in answers}) == 1

    assert_delivers(*attach_all_again(cluster, run), 1)


def test_a_whole_tensor_that_no_trainer_has(cluster: Cluster, run: str) -> None:
    trainers = [
        cluster.trainer(0, 2, "a", run=run, engines=ENGINES, skip=("norm.weight",)),
        cluster.trainer(1, 2, "b", run=run, skip=("norm.weight",)),
    ]
    answers = attach_all([*trainers, *engines_of(cluster, run)])

    for answer in answers:
        assert "E_NAME" in answer.codes
        assert "norm.weight" in answer.text
    assert_delivers(*attach_all_again(cluster, run), 1)


def test_a_tensor_that_no_engine_takes(cluster: Cluster, run: str) -> None:
    rename = {"few.weight": "many.weight"}
    trainers = [
        cluster.trainer(0, 2, "a", run=run, engines=ENGINES, rename=rename),
        cluster.trainer(1, 2, "b", run=run, rename=rename),
    ]
    answers = attach_all([*trainers, *engines_of(cluster, run)])

    for answer in answers:
        assert "E_NAME" in answer.codes
        assert "few.weight" in answer.text
        assert "many.weight" in answer.text


def test_no_daemon(tmp_path: Path, cluster: Cluster) -> None:
    nowhere = tmp_path / "control.sock"
    trainer = cluster.trainer(0, 1, engines={"E0": 1}, socket=nowhere, attach_s=1.0)
    engine = cluster.engine("E0", 0, 1, socket=nowhere, attach_s=1.0)

    for answer in attach_all([trainer, engine], 5.0):
        assert answer.codes == ["E_NO_DAEMON"]
        assert str(nowhere) in answer.text


# ------------------------------------------------------------ at publish


def test_a_version_that_does_not_grow(cluster: Cluster, run: str) -> None:
    trainers, engines = attach_all_again(cluster, run)
    assert_delivers(trainers, engines, 5)

    for version in (5, 4):
        for answer in all_answer(trainers, "publish", version=version):
            assert answer.codes == ["E_VERSION"]
            assert answer.fields("E_VERSION")["next_version"] == 6
    assert all_do(engines, "version") == [5, 5]
    assert all_do(engines, "differing", contents=5) == [[]] * 2

    assert_delivers(trainers, engines, 6)


def test_old_weights_go_under_a_new_number(cluster: Cluster, run: str) -> None:
    trainers, engines = attach_all_again(cluster, run)
    assert_delivers(trainers, engines, 1)
    assert_delivers(trainers, engines, 2)

    all_do(trainers, "publish", version=3, contents=1)
    assert all_do(engines, "receive") == [3, 3]
    assert all_do(engines, "differing", contents=1) == [[]] * 2


def test_ranks_that_publish_different_versions(cluster: Cluster, run: str) -> None:
    trainers, engines = attach_all_again(cluster, run)
    assert_delivers(trainers, engines, 1)

    trainers[0].ask("publish", version=2)
    trainers[1].ask("publish", version=3)
    answer = trainers[0].fails("wait", version=2)
    assert "E_VERSION_SKEW" in answer.codes
    assert all_do(engines, "version") == [1, 1]
    assert all_do(engines, "differing", contents=1) == [[]] * 2


def test_rank_that_is_refused_and_goes_on_is_in_step_again(cluster: Cluster, run: str) -> None:
    """Rank 0 is refused what the others publish as version 2; what all publish next is of one step."""
    trainers, engines = attach_all_again(cluster, run)
    assert_delivers(trainers, engines, 1)

    assert "E_TIE" in trainers[0].fails("publish_untied", contents=2).codes
    assert all_do(trainers[1:], "publish", contents=2) == [2] * len(trainers[1:])
    assert trainers[0].ask("publish", contents=3) == 3
    for rank in trainers[1:]:
        assert "E_VERSION_SKEW" in rank.fails("wait", version=2).codes
    assert all_do(trainers[1:], "publish", contents=3) == [3] * len(trainers[1:])
    assert all_do(engines, "receive") == [3, 3]
    assert all_do(engines, "differing", contents=3) == [[]] * 2
