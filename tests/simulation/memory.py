"""Bytes of a simulation: a region holds one version whole, or it is torn."""

from dataclasses import dataclass

from weightd.core.units import NO_KEY, VersionKey


@dataclass
class Memory:
    """A slot, or a half of a landing.

    Attributes:
        content: What it holds whole; None while it is written.
        generation: Odd while it is written.
        readers: Who reads it now.
        claimed: What somebody was told that it holds; bytes that nobody was told of may change.
        retained: Whether what it holds is kept until a newer version is committed; live memory is not.
        moved: Whether another slot holds the same bytes, for whoever begins to read.
    """

    content: VersionKey | None = NO_KEY
    generation: int = 0
    readers: int = 0
    claimed: VersionKey = NO_KEY
    retained: bool = True
    moved: bool = False

    def begin(self) -> None:
        """Start to overwrite it."""
        self.content, self.claimed, self.generation = None, NO_KEY, self.generation + 1
        self.moved = False

    def end(self, key: VersionKey) -> None:
        """It holds ``key`` whole."""
        self.content, self.generation = key, self.generation + 1

    def shows(self, key: VersionKey, generation: int) -> bool:
        """Whether a reader that began with this generation read these bytes and no others."""
        return self.content == key and self.generation == generation
