"""Which rank this is, and which roster it declares."""

import inspect
import json
from pathlib import Path

import pytest

from tests.golden_text import check_golden
from weightd.core.errors import ConfigError
from weightd.core.roster.topology import EngineDecl, Roster
from weightd.core.units import TrainerRank
from weightd.trainer_hooks.faults import WorldUnknown
from weightd.trainer_hooks.identity import Identity, declare_roster, identify
from weightd.trainer_hooks.publisher import Publisher, PublisherOptions

RANK_0 = Identity(TrainerRank(0), 2)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_arguments_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")

    assert identify(1, 4) == (1, 4)
    assert identify() == (5, 6)


def test_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(WorldUnknown) as caught:
        identify(rank=1)

    check_golden("errors/E_WORLD", str(caught.value))


@pytest.mark.parametrize("rank, world", [(4, 4), (-1, 4), (0, 0)])
def test_rank_outside_of_its_world(rank: int, world: int) -> None:
    with pytest.raises(WorldUnknown):
        identify(rank, world)


def test_argument_that_contradicts_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(WorldUnknown):
        identify(rank=4)


def test_roster_is_declared_by_rank_0_alone() -> None:
    assert declare_roster({"E0": 2}, Identity(TrainerRank(1), 2), (), None) is None
    assert declare_roster(None, RANK_0, (), None) is None
    assert declare_roster({"E0": 2}, RANK_0, (1,), "mixed") == Roster(2, (EngineDecl("E0", 2),), (1,), "mixed")
    assert declare_roster([EngineDecl("E0", 2)], RANK_0, (), None) == Roster(2, (EngineDecl("E0", 2),))


def test_roster_file(tmp_path: Path) -> None:
    table = {"nodes": {"a": [0, 1, 2]}, "trainer_slots": [0, 1], "engines": [{"id": "E0", "slots": [2]}]}
    path = tmp_path / "roster.json"
    path.write_text(json.dumps(table))
    found = declare_roster(path, RANK_0, (), None)

    assert found is not None
    assert (found.world, found.engines[0].slots) == (2, (2,))
    (tmp_path / "roster.toml").write_text('trainer_slots=[0, 1]\nnodes={a=[0, 1, 2]}\nengines=[{id="E0", slots=[2]}]')
    assert declare_roster(str(tmp_path / "roster.toml"), RANK_0, (), None) == found


def test_roster_file_of_another_world(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    path.write_text(json.dumps({"nodes": {"a": [0, 1]}, "trainer_slots": [0], "engines": []}))
    with pytest.raises(ConfigError, match="it has 1 trainer slots, this trainer has 2 ranks"):
        declare_roster(path, RANK_0, (), None)


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_roster_file_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "roster.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError):
        declare_roster(path, RANK_0, (), None)


def test_declared_shards_take_the_options_of_the_constructor() -> None:
    given = set(inspect.signature(Publisher.__init__).parameters) - {"self", "module_or_params"}

    assert given == set(PublisherOptions.__annotations__)
