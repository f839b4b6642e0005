"""A run begins with what its journals say; reading them holds up nobody else."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightd.core.roster.topology import EngineDecl, Roster
from weightd.core.units import Boot, NodeId, RunName
from weightd.daemon import supervisor
from weightd.daemon.attached import AttachedHooks
from weightd.daemon.bulk.landing import MemoryBudget
from weightd.daemon.config import Address, Config
from weightd.daemon.epochs import LayoutStore
from weightd.daemon.journal import Journal, JournalError
from weightd.daemon.supervisor import House, RunSupervisor

pytestmark = pytest.mark.anyio

RUN = RunName("r")
BOOT = Boot(1)
ROSTER = Roster(1, (EngineDecl("E0", 1),), (), "disaggregated")


@pytest.fixture
def house(tmp_path: Path) -> House:
    address = Address("127.0.0.1", 1)
    config = Config(NodeId("a"), tmp_path, tmp_path, address, Address("127.0.0.1", 2), {})
    known = {"config": config, "boot": BOOT, "hooks": AttachedHooks(4), "layouts": LayoutStore()}
    rest = {"budget": MemoryBudget(1 << 20), "bulk": None, "memcpy_bytes_per_s": 1.0, "soon": lambda call: call()}
    return cast("House", SimpleNamespace(**known, **rest))


async def test_journals_are_read_in_another_thread(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*arguments)

        return call

    for name in ("open_journal", "replay", "replay_node"):
        monkeypatch.setattr(supervisor, name, noted(getattr(supervisor, name)))
    run = await RunSupervisor.begin(RUN, house)
    await run.rank0_greeted(ROSTER, BOOT)

    assert len(threads) == 4  # two journals, each opened and replayed
    assert threading.get_ident() not in threads
    assert run.leader is not None
    for journal in run._journals.values():
        journal.close()


async def test_a_journal_that_cannot_be_read_begins_no_run(house: House, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "node.journal").write_bytes(b"no journal")

    with pytest.raises(JournalError):
        await RunSupervisor.begin(RUN, house)


async def test_a_second_greeting_of_rank_0_waits_for_the_term_to_end(house: House) -> None:
    run = await RunSupervisor.begin(RUN, house)
    await run.rank0_greeted(ROSTER, BOOT)
    led = run.leader
    await run.rank0_greeted(ROSTER, BOOT)

    assert run.leader is led
    assert isinstance(run._journals["leader"], Journal)
    for journal in run._journals.values():
        journal.close()
