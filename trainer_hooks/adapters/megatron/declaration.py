"""The declaration of a Megatron rank: where it stands, and one rule for every parameter.

::

    Megatron(
        tensor_rank=1, tensor_size=2, layers=range(2, 5), experts=64, expert_rank=3, expert_size=8,
        rules=[
            Rule("embedding.word_embeddings.weight", Vocabulary("model.embed_tokens.weight", 50257), optional=True),
            Rule("decoder.layers.{layer}.self_attention.linear_qkv.weight", GroupedQKV(
                q="model.layers.{layer}.self_attn.q_proj.weight", k=…, v=…, heads=16, groups=4, head_dim=128)),
            …
        ],
    )

Nothing is read from Megatron's process groups; what it has written on parameters and layers is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from weightd.core.errors import ConfigError
from weightd.core.layout.boxes import Pieces
from weightd.core.layout.intersect import intersect
from weightd.trainer_hooks.adapters.leaves import Leaf, Source, leaves_of
from weightd.trainer_hooks.adapters.megatron import marks
from weightd.trainer_hooks.adapters.megatron.experts import of_expert
from weightd.trainer_hooks.adapters.megatron.faults import RulesDoNotFit
from weightd.trainer_hooks.adapters.megatron.place import DoesNotFit, Expertise, Held, Ring
from weightd.trainer_hooks.adapters.megatron.rules import Match, Rule, filled
from weightd.trainer_hooks.adapters.megatron.splits import Skip
from weightd.trainer_hooks.adapters.strays import Watch
from weightd.trainer_hooks.shards import Holdings, Part, Shard, checked

_WRAPPER = "module."
"""What Megatron's DDP and its half-precision module put before every name, once each."""


class Megatron:
    """Where a rank stands among Megatron's, and what its parameters are.

    Data-parallel ranks make equal declarations: they hold replicas.
    """

    def __init__(
        self,
        *,
        rules: Iterable[Rule],
        tensor_rank: int = 0,
        tensor_size: int = 1,
        layers: Sequence[int] | None = None,
        experts: int = 0,
        expert_rank: int = 0,
        expert_size: int = 1,
        expert_tensor_rank: int | None = None,
        expert_tensor_size: int | None = None,
    ) -> None:
        """Declare a rank.

        Args:
            rules: Exactly one for each parameter and persistent buffer.
            tensor_rank: Place among the tensor-parallel ranks.
            tensor_size: Number of them.
            layers: Global number (from 0) of each layer that this rank's pipeline stage has, in the order of their
                local numbers; None where names have global numbers already.
            experts: Experts of the whole model; 0 without.
            expert_rank: Place among the expert-parallel ranks.
            expert_size: Number of them.
            expert_tensor_rank: Place among the ranks that cut an expert; by default ``tensor_rank``.
            expert_tensor_size: Number of them; by default ``tensor_size``.

        Raises:
            ConfigError: A place outside of its ring, experts that do not divide, a layer listed twice.
        """
        self.rules = tuple(rules)
        self._tensor = _ring("tensor", tensor_rank, tensor_size)
        rank = tensor_rank if expert_tensor_rank is None else expert_tensor_rank
        size = tensor_size if expert_tensor_size is None else expert_tensor_size
        self._expert_tensor = _ring("expert_tensor", rank, size)
        self._experts = Expertise(_ring("expert", expert_rank, expert_size), experts)
        if experts < 0 or experts % expert_size:
            raise ConfigError("experts", str(experts), f"is no equal number for each of {expert_size} ranks")
        self._layers = None if layers is None else tuple(layers)
        if self._layers is not None and len(set(self._layers)) != len(self._layers):
            raise ConfigError("layers", str(self._layers), "lists a layer twice")
        if any(rule.of_experts for rule in self.rules) and not experts:
            raise ConfigError("experts", "0", "a rule is about experts: say how many the whole model has")

    def holdings(self, source: Source) -> Holdings:
        """Return what this rank holds; no collective.

        Raises:
            RulesDoNotFit: Parameters without a rule or with several, rules without a parameter, or a rule that
                contradicts a parameter's shape, its attributes or its layer's number.
            UnsupportedPlacement: A parameter that no rule can describe.
        """
        marks.refuse_source(source)
        source = source if isinstance(source, nn.Module | Mapping) else list(source)
        found = leaves_of(source)
        leaves = _without_wrappers(found)
        numbers = {_bare(name, leaves, found): n for name, n in marks.layer_numbers(source).items()}
        chosen = self._choose(leaves)
        first: dict[object, Leaf] = {}
        ties: list[tuple[Leaf, Leaf]] = []
        shards: dict[str, Shard] = {}
        for raw, leaf, rule in zip(found, leaves, chosen, strict=True):
            if isinstance(rule.split, Skip):
                continue
            shards[leaf.name] = self._shard(leaf, rule, numbers)
            canonical = first.setdefault(_memory(leaf.read()), leaf)
            if canonical is not leaf:
                ties.append((raw, found[leaves.index(canonical)]))
        aliases = self._aliases(shards, [(_bare(a.name, leaves, found), _bare(b.name, leaves, found)) for a, b in ties])
        self._refuse_twice(shards.values())
        watch = Watch(source, found, ties, lambda leaf: _memory(leaf.read()))
        return Holdings(tuple(shards.values()), aliases, watch.stray)

    # ------------------------------------------------------------ rules

    def _choose(self, leaves: Sequence[Leaf]) -> list[Rule]:
        """Return the one rule of each parameter."""
        matching = {leaf.name: [rule for rule in self.rules if rule.match(leaf.name)] for leaf in leaves}
        lost = [name for name, rules in matching.items() if not rules]
        if lost:
            raise self._fault(lost, "no rule matches")
        for name, rules in matching.items():
            if len(rules) > 1:
                raise self._fault([name], "several rules match", rules)
        used = {id(rules[0]) for rules in matching.values()}
        idle = [rule.pattern for rule in self.rules if not rule.optional and id(rule) not in used]
        if idle:
            names = tuple(matching)
            raise RulesDoNotFit(tuple(idle), "the rule matches no parameter of this rank", "parameters", names)
        return [rules[0] for rules in matching.values()]

    def _shard(self, leaf: Leaf, rule: Rule, numbers: Mapping[str, int]) -> Shard:
        tensor, match = leaf.read(), rule.match(leaf.name)
        assert match is not None
        marks.refuse_foreign(leaf.name, tensor)
        ring = self._expert_tensor if rule.of_experts else self._tensor
        against = marks.contradiction(tensor, rule.split.partition(tuple(tensor.shape)), ring)
        if against:
            raise self._fault([leaf.name], against, [rule])
        try:
            held = self._held(tensor, rule, match, ring, numbers)
        except DoesNotFit as error:
            raise self._fault([leaf.name], f"{tuple(tensor.shape)} as {_kind(rule)}: {error}", [rule]) from None
        return checked(Shard(leaf.name, tensor.dtype, tuple(tensor.shape), held.parts, leaf.read, held.padding))

    def _held(self, tensor: Tensor, rule: Rule, match: Match, ring: Ring, numbers: Mapping[str, int]) -> Held:
        held = rule.split.held(tuple(tensor.shape), ring, self._experts)
        texts = {key: text for key, text in match.texts.items() if key != "expert"}
        layer, expert = match.number("layer"), match.number("expert")
        known = {} if layer is None else {"layer": self._global_layer(layer, match, numbers)}
        parts = [Part(filled(p.name, texts, known), p.shape, p.pieces) for p in held.parts]
        if expert is not None:
            if expert >= self._experts.local:
                raise DoesNotFit(f"local expert {expert}, this rank has {self._experts.local}")
            parts = [of_expert(p, self._experts.first + expert, self._experts.total) for p in parts]
        return Held(tuple(parts), held.padding)

    def _global_layer(self, local: int, match: Match, numbers: Mapping[str, int]) -> int:
        if self._layers is not None and local >= len(self._layers):
            raise DoesNotFit(f"local layer {local}, this rank has {len(self._layers)} layers")
        number = local if self._layers is None else self._layers[local]
        found = numbers.get(match.layer_name)
        if found is not None and found != number + 1:
            raise DoesNotFit(f"layer {number} by declaration, its layer_number (from 1) is {found}")
        return number

    # ------------------------------------------------------------ several parameters

    def _aliases(self, shards: dict[str, Shard], ties: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Take the further names of tied parameters out, and return them as aliases."""
        aliases: list[tuple[str, str]] = []
        for further, canonical in ties:
            mine, other = shards.pop(further).parts, shards[canonical].parts
            if not _alike(mine, other):
                raise self._fault([further, canonical], "they share memory, and are declared as different cuts")
            aliases.extend((a.name, b.name) for a, b in zip(mine, other, strict=True) if a.name != b.name)
        return tuple(aliases)

    def _refuse_twice(self, shards: Iterable[Shard]) -> None:
        """Refuse two parameters that would hold the same elements: which of them arrives would be chance."""
        held: dict[str, list[tuple[str, Pieces]]] = {}
        for shard in shards:
            for part in shard.parts:
                others = held.setdefault(part.name, [])
                for name, pieces in others:
                    if len(intersect(pieces, part.pieces)):
                        raise self._fault([name, shard.name], f"they hold the same elements of {part.name}")
                others.append((shard.name, part.pieces))

    def _fault(self, names: Sequence[str], found: str, rules: Sequence[Rule] | None = None) -> RulesDoNotFit:
        listed = self.rules if rules is None else rules
        return RulesDoNotFit(tuple(names), found, "rules", tuple(f"{r.pattern} ({_kind(r)})" for r in listed))


def _memory(tensor: Tensor) -> object:
    """Return what is equal for two names of one memory, and for nothing else."""
    if tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _ring(name: str, rank: int, size: int) -> Ring:
    if not 0 <= rank < size:
        raise ConfigError(f"{name}_rank", str(rank), f"is none of {size} ranks ({name}_size)")
    return Ring(rank, size)


def _kind(rule: Rule) -> str:
    return type(rule.split).__name__


def _without_wrappers(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the leaves by their names without what wraps the whole model."""
    bare = list(leaves)
    while bare and all(leaf.name.startswith(_WRAPPER) for leaf in bare):
        bare = [replace(leaf, name=leaf.name.removeprefix(_WRAPPER)) for leaf in bare]
    return bare


def _bare(name: str, leaves: Sequence[Leaf], found: Sequence[Leaf]) -> str:
    """Return a name of the source without what ``_without_wrappers`` took away."""
    return name[len(found[0].name) - len(leaves[0].name) :] if found else name


def _alike(some: Sequence[Part], others: Sequence[Part]) -> bool:
    """Say whether parts are the same boxes, whatever they are called."""
    return len(some) == len(others) and all(
        a.shape == b.shape and _columns(a.pieces) == _columns(b.pieces) for a, b in zip(some, others, strict=True)
    )


def _columns(pieces: Pieces) -> list[list[object]]:
    columns = (pieces.start, pieces.extent, pieces.step, pieces.offset, pieces.stride)
    return [column.tolist() for column in columns]
