"""An append-only journal: checksummed records, synced before anyone is told.

File: an 8-byte magic, then records of ``<u32 length> <u32 crc32> <msgpack map>``.
A torn tail (a crash in mid-write) is cut off at the last whole record and
said; a bad record *before* good ones is a refusal, since a decision may be lost.
Blocking: call it from a worker thread.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgpack

from weightd.core.errors import Story, WeightdError

MAGIC = b"weightd\x01"
_HEAD = struct.Struct("<II")

MAX_RECORD_BYTES = 64 << 20
"""No record is larger; a length beyond it is damage, not data."""

COMPACT_BYTES = 1 << 20
"""A journal below it is read in a moment: some ten thousand records."""

RESERVE_BYTES = 64 << 10
"""Preallocated ahead of the end, so that a commit record cannot meet a full disk."""


@dataclass(eq=False)
class JournalError(WeightdError):
    """The journal cannot be read or written."""

    code: ClassVar[str] = "E_JOURNAL_FILE"
    path: str
    offset: int
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"journal {self.path}: {self.why} at byte {self.offset}",
            effect="nothing that was not journaled is told to anyone; engines keep the version they serve",
            next="free space or repair the disk, then start the daemon again",
        )


class Journal:
    """One open journal file.

    Attributes:
        path: The file.
        records: All that it holds, oldest first.
        cut_nbytes: Bytes of a torn tail that were cut off at opening.
        broken: Why nothing more is written to it, once a sync has failed.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file; ``records`` then holds what it says.

        Raises:
            JournalError: The file cannot be opened, is none of ours, or is damaged before its end.
        """
        self.path = path
        self.records: list[dict[str, object]] = []
        self.cut_nbytes = 0
        self.broken = ""
        self._compact_nbytes = 0
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            data = _read_all(self._fd)
            if not data:
                _write_all(self._fd, MAGIC, 0)
                os.fsync(self._fd)
                _sync_dir(path.parent)
                data = MAGIC
        except OSError as e:
            raise JournalError(str(path), 0, f"cannot be opened: {e.strerror}") from None
        if data[: len(MAGIC)] != MAGIC:
            raise JournalError(str(path), 0, "is not a journal of this version")
        self._end = self._replay(data)
        if self.cut_nbytes:
            os.ftruncate(self._fd, self._end)  # else the rest of a torn tail would follow the next record

    def _replay(self, data: bytes) -> int:
        at = len(MAGIC)
        while at < len(data):
            record, size = _record_at(data, at)
            if record is None:
                if any(data[at:]) and _whole_record_after(data, at):
                    raise JournalError(str(self.path), at, "holds a damaged record before whole ones")
                self.cut_nbytes = len(data[at:].rstrip(b"\0"))
                break
            self.records.append(record)
            at += size
        return at

    def append(self, record: dict[str, object]) -> None:
        """Write one record and sync it.

        Raises:
            JournalError: It did not get to the disk.  The file is as before or ends in a torn tail.
        """
        body = _packed(record)
        frame = _HEAD.pack(len(body), zlib.crc32(body)) + body
        if self.broken:
            raise JournalError(str(self.path), self._end, self.broken)
        try:
            _write_all(self._fd, frame, self._end)
        except OSError as e:
            raise JournalError(str(self.path), self._end, f"cannot be written: {e.strerror}") from None
        try:
            os.fdatasync(self._fd)
        except OSError as e:
            # The kernel may have dropped the pages and call the next sync a success: nothing more is written here.
            self.broken = f"cannot be synced: {e.strerror}"
            raise JournalError(str(self.path), self._end, self.broken) from None
        self._end += len(frame)
        self.records.append(record)

    def reserve(self, nbytes: int = RESERVE_BYTES) -> None:
        """Make sure that ``nbytes`` more fit on the disk, now rather than in mid-decision.

        Raises:
            JournalError: The disk is full.
        """
        try:
            os.posix_fallocate(self._fd, self._end, nbytes)
            os.fsync(self._fd)
        except OSError as e:
            raise JournalError(str(self.path), self._end, f"no room for {nbytes} bytes: {e.strerror}") from None

    @property
    def overgrown(self) -> bool:
        """Whether compaction is due: large, and twice what the last one left."""
        return self._end > max(COMPACT_BYTES, 2 * self._compact_nbytes)

    def rewrite(self, records: Iterable[dict[str, object]]) -> None:
        """Replace the content by ``records`` (compaction), atomically.

        Raises:
            JournalError: It could not be done; the old content stands.
        """
        kept = list(records)
        fresh = self.path.with_suffix(".new")
        bodies = [_packed(r) for r in kept]
        data = MAGIC + b"".join(_HEAD.pack(len(b), zlib.crc32(b)) + b for b in bodies)
        try:
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, data, 0)
                os.fsync(fd)
                fresh.replace(self.path)
                _sync_dir(self.path.parent)
            except OSError:
                os.close(fd)
                raise
        except OSError as e:
            raise JournalError(str(self.path), 0, f"cannot be compacted: {e.strerror}") from None
        os.close(self._fd)
        self._fd, self._end, self.records = fd, len(data), kept
        self._compact_nbytes = len(data)

    @property
    def nbytes(self) -> int:
        """Bytes of whole records and the magic."""
        return self._end

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _packed(record: dict[str, object]) -> bytes:
    packed: bytes = msgpack.packb(record, use_bin_type=True)  # pyright: ignore[reportAssignmentType] - bytes unless autoreset is off
    return packed


def _record_at(data: bytes, at: int) -> tuple[dict[str, object] | None, int]:
    if len(data) - at < _HEAD.size:
        return None, 0
    length, crc = _HEAD.unpack_from(data, at)
    body = data[at + _HEAD.size : at + _HEAD.size + length]
    if not 0 < length <= MAX_RECORD_BYTES or len(body) < length or zlib.crc32(body) != crc:
        return None, 0
    try:
        record = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException):
        return None, 0
    return (record, _HEAD.size + length) if isinstance(record, dict) else (None, 0)


def _whole_record_after(data: bytes, at: int) -> bool:
    """Whether the record after the damaged one at ``at`` is whole: then this is no torn tail."""
    if len(data) - at < _HEAD.size:
        return False
    length, _ = _HEAD.unpack_from(data, at)
    following = at + _HEAD.size + length
    return following < len(data) and _record_at(data, following)[0] is not None


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    parts, at = [], 0
    while at < size:
        part = os.pread(fd, size - at, at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _write_all(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def _sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
