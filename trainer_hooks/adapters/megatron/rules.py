"""Rules: which parameters a pattern means, and which numbers and names it takes from theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from weightd.core.errors import ConfigError
from weightd.trainer_hooks.adapters.megatron.experts import EXPERT, Experts
from weightd.trainer_hooks.adapters.megatron.splits import Split

NUMBERS = ("layer", "expert")
"""Placeholders for numbers, which are local in a parameter's name and global in a checkpoint's."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Rule:
    """What the parameters of one pattern are.

    Attributes:
        pattern: Megatron's name with placeholders: ``{layer}`` and ``{expert}`` for local numbers, any other name in
            braces for one component without a dot; without wrappers' prefixes.
        split: How they are cut, with the checkpoint's names, in which the placeholders occur again.
        optional: Whether the pattern may match nothing on a rank: what only some pipeline stages have.

    Raises:
        ConfigError: Pattern and names do not have the same placeholders.
    """

    pattern: str
    split: Split
    optional: bool = False

    def __post_init__(self) -> None:
        """Refuse names that would stand for several parameters, or for none."""
        given = set(_PLACEHOLDER.findall(self.pattern))
        extra = {"expert"} if isinstance(self.split, Experts) else set()
        for name in self.split.names:
            used = set(_PLACEHOLDER.findall(name))
            # A stack of the checkpoint holds all experts: its name has no number of one.
            if used - given - extra or given - used - {"expert"}:
                found = f"names {name}, which has {_listed(used)}, the pattern has {_listed(given)}"
                raise ConfigError("pattern", self.pattern, found)
        if "expert" in given and isinstance(self.split, Experts):
            raise ConfigError("pattern", self.pattern, f"has {EXPERT}, and its parameter would hold all experts")

    @property
    def of_experts(self) -> bool:
        """Whether its parameters belong to experts, and so are cut over the experts' own tensor-parallel ranks."""
        return EXPERT in self.pattern or isinstance(self.split, Experts)

    def match(self, name: str) -> Match | None:
        """Return what the pattern finds in a parameter's name, or None."""
        found = _compiled(self.pattern).fullmatch(name)
        if found is None:
            return None
        texts = found.groupdict()
        end = found.end("layer") if "layer" in texts else 0
        return Match(texts, name[:end])


@dataclass(frozen=True, slots=True)
class Match:
    """What a pattern found.

    Attributes:
        texts: Text of each placeholder.
        layer_name: Name of the module that is the layer; empty without one.
    """

    texts: Mapping[str, str]
    layer_name: str

    def number(self, placeholder: str) -> int | None:
        """Return the local number that stands for a placeholder, or None if the pattern has none."""
        text = self.texts.get(placeholder)
        return None if text is None else int(text)


def filled(template: str, texts: Mapping[str, str], numbers: Mapping[str, int]) -> str:
    """Return a name with its placeholders replaced; ``numbers`` are global and go before texts.

    >>> filled("model.layers.{layer}.mlp.{kind}.weight", {"layer": "0", "kind": "up_proj"}, {"layer": 2})
    'model.layers.2.mlp.up_proj.weight'
    """

    def text_of(found: re.Match[str]) -> str:
        key = found.group(1)
        return str(numbers[key]) if key in numbers else texts.get(key, found.group(0))

    return _PLACEHOLDER.sub(text_of, template)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    seen: set[str] = set()
    text = ""
    for n, piece in enumerate(_PLACEHOLDER.split(pattern)):
        if n % 2 == 0:
            text += re.escape(piece)
        elif piece in seen:
            text += f"(?P={piece})"
        else:
            seen.add(piece)
            text += rf"(?P<{piece}>{'[0-9]+' if piece in NUMBERS else '[^.]+'})"
    return re.compile(text)


def _listed(placeholders: set[str]) -> str:
    return " and ".join(f"{{{name}}}" for name in sorted(placeholders)) or "no placeholder"
