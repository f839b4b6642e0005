"""What was journaled is there after any crash; what is damaged is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightd.daemon.journal import COMPACT_BYTES, MAGIC, Journal, JournalError

RECORDS: list[dict[str, object]] = [{"kind": "term", "term": 1}, {"kind": "commit", "version": 7, "engines": ["E0"]}]


def filled(path: Path) -> Path:
    journal = Journal(path)
    for record in RECORDS:
        journal.append(record)
    journal.close()
    return path


def test_records_come_back_in_order(tmp_path: Path) -> None:
    assert Journal(filled(tmp_path / "j")).records == RECORDS


@pytest.mark.parametrize("kept", range(1, 40))
def test_a_torn_tail_costs_only_the_last_record(tmp_path: Path, kept: int) -> None:
    path = filled(tmp_path / "j")
    whole = path.read_bytes()
    first = len(MAGIC) + 8 + int.from_bytes(whole[8:12], "little")
    path.write_bytes(whole[: min(first + kept, len(whole) - 1)])

    journal = Journal(path)
    assert journal.records == RECORDS[:1]
    journal.append(RECORDS[1])
    journal.close()

    assert Journal(path).records == RECORDS


def test_nothing_is_left_of_a_torn_tail_that_is_longer_than_the_next_record(tmp_path: Path) -> None:
    path = filled(tmp_path / "j")
    journal = Journal(path)
    journal.append({"kind": "epoch", "layouts": "x" * 500})
    journal.close()
    path.write_bytes(path.read_bytes()[:-1])

    Journal(path).append({"kind": "fail"})
    again = Journal(path)

    assert again.records == [*RECORDS, {"kind": "fail"}]
    assert again.cut_nbytes == 0


def test_a_record_is_on_the_disk_before_anybody_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    journal.append(RECORDS[0])

    assert synced == [journal.nbytes]


def test_a_damaged_record_before_whole_ones_is_refused(tmp_path: Path) -> None:
    path = filled(tmp_path / "j")
    data = bytearray(path.read_bytes())
    data[len(MAGIC) + 10] ^= 0xFF
    path.write_bytes(bytes(data))

    with pytest.raises(JournalError, match="damaged record before whole ones"):
        Journal(path)


def test_preallocated_room_is_no_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(RECORDS[0])
    journal.reserve()
    journal.close()

    again = Journal(tmp_path / "j")
    assert again.records == RECORDS[:1]
    again.append(RECORDS[1])
    again.close()
    assert Journal(tmp_path / "j").records == RECORDS


def test_compaction_keeps_what_it_is_given(tmp_path: Path) -> None:
    path = filled(tmp_path / "j")
    journal = Journal(path)
    journal.rewrite(RECORDS[1:])
    journal.append({"kind": "fail"})
    journal.close()

    assert Journal(path).records == [RECORDS[1], {"kind": "fail"}]


def test_another_file_is_not_taken_for_a_journal(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"something else")

    with pytest.raises(JournalError, match="not a journal"):
        Journal(tmp_path / "j")


def test_a_full_disk_is_an_error_of_ours() -> None:
    with pytest.raises(JournalError, match="No space left"):
        Journal(Path("/dev/full"))


def test_a_long_journal_is_due_for_compaction_and_then_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append({"kind": "large", "data": "x" * COMPACT_BYTES})
    due = [journal.overgrown]
    journal.rewrite(RECORDS)
    due.append(journal.overgrown)

    assert due == [True, False]
    assert Journal(tmp_path / "j").records == RECORDS


def test_after_a_failed_sync_nothing_more_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may call the next sync a success although the pages are lost."""
    journal = Journal(tmp_path / "j")

    def fails(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", fails)
        with pytest.raises(JournalError, match="synced"):
            journal.append(RECORDS[0])

    with pytest.raises(JournalError, match="synced"):
        journal.append(RECORDS[1])
    journal.close()
    again = Journal(tmp_path / "j")  # a restart: what got there, got there; from here on it is synced again
    again.append(RECORDS[1])
    assert again.records[-1] == RECORDS[1]
