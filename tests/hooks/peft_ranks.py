"""Four ranks of the tests of adapters, facts and replicas under FSDP2.

``python -m tests.hooks.peft_ranks FOLDER [CASE ...]``: every rank runs the cases, all by default, and writes what it
found.  The ranks are forked: importing PEFT takes longer than all cases.
"""

import copy
import json
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.hooks.delivery import Held
from tests.hooks.forks import free_port, run_forked
from tests.hooks.peft_models import adapted, merged_by_peft, whole_numbers
from tests.hooks.published import Rank, unequal, whole
from weightd.core.errors import WeightdError
from weightd.core.session.deadlines import Deadlines
from weightd.trainer_hooks.exchange import Exchange
from weightd.trainer_hooks.facts import Facts
from weightd.trainer_hooks.lora import LoraAdapter

WORLD, LIMIT_S = 4, 150.0
LATE_S = 5.0

Found = list[str]
QUICK = Deadlines(collect_s=1.0)


def sharded(model: Any, mesh: Any = None, **options: Any) -> Any:
    """Shard the blocks and what is around them, as a trainer does."""
    for block in model.base_model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def publishing(model: Any, **options: Any) -> Rank:
    return Rank(model, dist.get_rank(), dist.get_world_size(), **options)


def together(held: Held) -> dict[str, Tensor]:
    """Return what all ranks hold together."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, held)
    return whole(every)


def local_bytes(model: nn.Module) -> list[bytes]:
    tensors = [t._local_tensor if isinstance(t, DTensor) else t for t in model.parameters()]
    # Copies: what numpy has seen cannot be freed by FSDP2 any more.
    return [t.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def merged(model: Any, cut: Any, **options: Any) -> Found:
    """Return what differs from PEFT's merge of the whole model, publish after publish."""
    expected = merged_by_peft(model)
    cut(model)
    rank = publishing(model, lora="merged", **options)
    before = local_bytes(model)
    first = unequal(together(rank.fill()), expected)
    written = [] if before == local_bytes(model) else ["the model was written"]
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).neg_()
    opposite = adapted_like(model)
    return first + written + unequal(together(rank.fill()), opposite)


def adapted_like(model: Any) -> dict[str, Tensor]:
    """Return PEFT's merge of a whole copy of a sharded model, made with ``full_tensor()``."""
    for module in model.modules():
        getattr(module, "reshard", lambda: None)()
    state = {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in model.state_dict().items()}
    fresh = FRESH["now"]()
    fresh.load_state_dict(state)
    return merged_by_peft(fresh)


FRESH: dict[str, Callable[[], Any]] = {}
"""How the model of the case under way is built."""


def case(build: Callable[[], Any], cut: Callable[[Any], Any], **options: Any) -> Callable[[], Found]:
    def run() -> Found:
        FRESH["now"] = build
        return merged(build(), cut, **options)

    return run


def rows_and_columns(model: Any) -> Any:
    """Base weights are cut along their columns where they divide, factors along rows."""
    world = dist.get_world_size()

    def place(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.ndim == 2 and p.shape[1] % world == 0 and p.shape[0] > 4 else None

    return sharded(model, shard_placement_fn=place)


def hybrid(model: Any) -> Any:
    return sharded(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("rep", "shard")))


def after_forward(model: Any) -> Any:
    """Parameters stay gathered: they show as plain, whole tensors."""
    sharded(model, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    return model


def half(model: Any) -> Any:
    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def low_precision() -> Any:
    return adapted().to(torch.bfloat16)


def everything() -> Any:
    return adapted(target_modules=["q", "o", "emb"], modules_to_save=["lm_head"], use_rslora=True)


def wide() -> Any:
    return adapted(target_modules=["q", "o", "emb", "lm_head"], r=3)


def one_adapter() -> Found:
    model = adapted(modules_to_save=["lm_head"])
    model.add_adapter("old", LoraConfig(r=3, target_modules=["o"]))
    whole_numbers(model)
    expected = get_peft_model_state_dict(copy.deepcopy(model), adapter_name="old")
    sharded(model)
    return unequal(together(publishing(model, lora=LoraAdapter("old")).fill()), expected)


def adapters_change() -> Found:
    """The active adapter changes between two publishes: other factors are exchanged."""
    model = adapted()
    model.add_adapter("b", LoraConfig(r=3, target_modules=["q"]))
    whole_numbers(model)
    other = copy.deepcopy(model)
    other.set_adapter("b")
    expected = merged_by_peft(model), merged_by_peft(other)
    sharded(model)
    rank = publishing(model, lora="merged")
    found = unequal(together(rank.fill()), expected[0])
    model.set_adapter("b")
    found += unequal(together(rank.fill()), expected[1])
    model.set_adapter("default")
    return found + unequal(together(rank.fill()), expected[0])


def random_numbers() -> Found:
    """With factors that are no integers, to the last bits of a sum of four products."""
    model = adapted()
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    expected = merged_by_peft(model)
    sharded(model)
    found = together(publishing(model, lora="merged").fill())
    return [n for n, t in expected.items() if not torch.allclose(found[n], t, rtol=1e-5, atol=1e-5)]


def same_names() -> Found:
    """One name set, whatever the sharding, a wrapper, or the absence of both."""
    build = everything
    sets = [
        publishing(build(), lora="merged").names(),
        publishing(sharded(build()), lora="merged").names(),
        publishing(torch.compile(sharded(build()), backend="eager"), lora="merged").names(),
        publishing(nn.parallel.DistributedDataParallel(build()), lora="merged").names(),
    ]
    return [str(names) for names in sets[1:] if names != sets[0]]


def different_adapters() -> Found:
    """One rank has another adapter active than the others: all ranks refuse."""
    model = adapted()
    model.add_adapter("b", LoraConfig(r=3, target_modules=["q"]))
    sharded(model)
    rank = publishing(model, lora="merged")
    if dist.get_rank() == 1:
        model.set_adapter("b")
    return raised(rank.fill)


def late_rank() -> Found:
    """One rank misses an exchange: no later one is mistaken for it, and the trainer's own collectives go on."""
    exchange = Exchange(publishing({"w": torch.ones(1)}).publisher._identity, "lora", LATE_S)
    exchange.gather_ranks()
    mine = torch.ones(1)
    found: Found = []
    if dist.get_rank() != 1:
        begun = time.monotonic()
        found = [*raised(lambda: exchange.gather_bytes(b"x")), f"{time.monotonic() - begun:.1f}"]
    dist.all_reduce(mine)
    found += raised(lambda: exchange.gather(torch.zeros(7)))
    dist.all_reduce(mine)
    return [*found, str(int(mine))]


def raised(call: Callable[[], object]) -> Found:
    try:
        call()
    except WeightdError as error:
        return [str(error)]
    return ["nothing was raised"]


# ------------------------------------------------------------ facts


def replicas() -> Found:
    """Plain tensors beside sharded ones: equal, then one byte differs on rank 1, then equal again."""
    model = sharded(adapted())
    state = {n: p for n, p in model.named_parameters() if "norm" in n and "weight" in n}
    head = torch.arange(6.0).view(2, 3)
    own = torch.full((2,), float(dist.get_rank()))
    mine = [("own", (dist.get_world_size(), 2), (dist.get_rank(), 0), (1, 2), own.view(1, 2))]
    source = {**{n.replace(".", "/"): p for n, p in state.items()}, "head": head}
    rank = publishing(source, check_replicas=True)
    found = [str(sorted(rank.publish()) != sorted(source))]
    if dist.get_rank() == 1:
        head[1, 2] += 1
    found += raised(rank.publish)
    head[1, 2] = 5.0
    rank.publish()
    declared = [("head", (2, 3), (0, 0), (2, 3), head), *mine]
    return [*found, *sorted(publishing(declared, check_replicas=True).publish())]


def equal_boxes_of_some() -> Found:
    """HSDP: each box is held by two ranks; rank 3 of 4 is out of step with its twin, rank 1."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard"))
    net: Any = nn.Linear(3, 8, bias=False)
    fully_shard(net, mesh=mesh)
    rank = publishing(net, check_replicas=True)
    rank.fill()
    if dist.get_rank() == world - 1:
        with torch.no_grad():
            net.weight._local_tensor[0, 0] += 1
    return raised(rank.fill)


def tied_stages() -> Found:
    """Two pipeline stages hold one weight under two names, tied by declaration from either end; others hold neither."""
    rank = dist.get_rank()
    weight = torch.arange(6.0).view(2, 3)
    name = {0: "emb", 1: "head"}.get(rank, f"layer-{rank}")
    ties = Facts(ties={"head": "emb"}) if rank < 2 else None
    stage = publishing({name: weight}, facts=ties, check_replicas=True)
    stage.fill()
    weight[1, 2] += float(rank == 1)
    return raised(stage.fill)


def frozen_shards() -> Found:
    """A step writes what trains, and nothing that is frozen; FSDP2's own work is no write."""
    model = sharded(adapted())
    rank = publishing(model, lora="merged", facts=Facts(frozen=["emb.*", "lm_head.*"]), slots=2)
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    sizes = []
    for slot in (0, 1, 0):
        sizes.append(rank.slots.fill(slot))
        model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    for module in model.modules():
        getattr(module, "reshard", lambda: None)()
    with torch.no_grad():
        model.base_model.model.emb.weight.add_(1)
    return [str(sizes[0] == sizes[1] > sizes[2]), *raised(rank.fill)]


def broken_tie() -> Found:
    """Tensor parallelism on the head alone breaks a tie: both go out while equal, neither when they are not."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model: Any = nn.Sequential(OrderedDict(emb=nn.Embedding(8, 4), head=nn.Linear(4, 8, bias=False)))
    model.head.weight = model.emb.weight
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    rank = publishing(model, facts=Facts(ties={"head.weight": "emb.weight"}))
    found = [str(rank.layout.aliases), *sorted(together(rank.fill()))]
    with torch.no_grad():
        model.emb.weight._local_tensor.add_(1)
    return found + [line.partition(":")[0] for line in raised(rank.fill)]


CASES: dict[str, Callable[[], Found]] = {
    "merged": case(adapted, sharded),
    "merged, every kind of module": case(wide, sharded),
    "merged, columns of the base": case(adapted, rows_and_columns),
    "merged, HSDP": case(adapted, hybrid),
    "merged, after a forward": case(adapted, after_forward),
    "merged, mixed precision": case(adapted, half),
    "merged, bfloat16": case(low_precision, sharded),
    "merged, DDP": case(adapted, nn.parallel.DistributedDataParallel),
    "adapter only": one_adapter,
    "adapters change": adapters_change,
    "random numbers": random_numbers,
    "same names": same_names,
}
"""Those that find nothing when all is well."""

TOLD: dict[str, Callable[[], Found]] = {
    "different adapters": different_adapters,
    "replicas": replicas,
    "equal boxes of some": equal_boxes_of_some,
    "tied stages": tied_stages,
    "frozen shards": frozen_shards,
    "broken tie": broken_tie,
    "late rank": late_rank,
}
"""Those of which the test looks at what is told."""


def told(run: Callable[[], Found]) -> Found:
    """Run a case; what it raises is told, so that the cases behind it are seen, too."""
    try:
        return run()
    except Exception:  # noqa: BLE001 - the test shows it
        return [traceback.format_exc()[-1500:]]


def rank_of_four(rank: int, port: int, folder: Path, wanted: set[str]) -> None:
    """Run the cases on one rank, and write what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    found = {name: told(run) for name, run in (CASES | TOLD).items() if name in wanted}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


def main() -> None:
    folder, port = Path(sys.argv[1]), free_port()
    wanted = set(sys.argv[2:]) or {*CASES, *TOLD}
    codes = run_forked([(rank_of_four, (rank, port, folder, wanted)) for rank in range(WORLD)], LIMIT_S)
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
