"""One tensor-parallel rank of the demo's engine: declares what it needs, receives, and compares every byte.

``python -m weightd.rollout_hooks.demo`` is started by ``weightd demo``, once a rank; it
also shows all that an engine adds to its loop: one declaration, one ``Receiver`` and, between two of its steps,
one ``receive``.  What it does is said in lines of JSON on standard output, and orders come in lines
of JSON on standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightd.core.errors import WeightdError, flatten
from weightd.core.layout.cuts import spans
from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.demo_engine import PADDING_BITS, EngineConfig, EngineModel, read_config
from weightd.rollout_hooks.demo_oracle import Bits, expected_params, read_oracle
from weightd.rollout_hooks.receiver import Receiver

WAIT_S = 60.0


def say(event: str, **facts: object) -> None:
    """Tell the parent one thing that happened."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def next_order() -> dict[str, Any]:
    """Return the parent's next order; the end of the input is the order to stop."""
    line = sys.stdin.readline()
    return json.loads(line) if line else {"order": "stop"}


def declare(c: EngineConfig, k: int) -> Declaration:
    """Return what rank ``k`` needs, in terms of the checkpoint's tensors."""
    d = Declaration("bfloat16")
    q_heads, kv_heads = spans(c.heads), spans(c.kv_heads)
    q_rows = [n * c.head_dim for n in c.heads]
    inner = sum(c.intermediate)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        d.vocabulary(name, (c.vocab_size, c.hidden_size), [c.vocab_rows] * c.size, k)
    for i in range(c.layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        for kind, rest in (("weight", (c.hidden_size,)), ("bias", ())):
            q, key, value = (f"{attention}.{x}_proj.{kind}" for x in "qkv")
            d.qkv(f"{attention}.qkv_proj.{kind}", (q, key, value), c.head_dim, q_heads, kv_heads, k, rest)
        d.row(f"{attention}.o_proj.weight", (c.hidden_size, sum(q_rows)), q_rows, k)
        gate_up = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        d.gate_up(f"{mlp}.gate_up_proj.weight", gate_up, (inner, c.hidden_size), c.intermediate, k)
        d.row(f"{mlp}.down_proj.weight", (c.hidden_size, inner), c.intermediate, k)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            d.replicated(f"model.layers.{i}.{norm}.weight", (c.hidden_size,))
    d.replicated("model.norm.weight", (c.hidden_size,))
    return d


def differing(model: EngineModel, expected: dict[str, Bits]) -> list[str]:
    """Return the parameters of which any byte is not as expected, or that are not expected at all.

    Rows beyond the expected ones are padding, which nobody may have written.
    """
    found = {name: parameter.view(torch.int16).numpy().view(np.uint16) for name, parameter in model.named_parameters()}
    wrong = set(found) ^ set(expected)
    for name in set(found) & set(expected):
        real = len(expected[name])
        if not np.array_equal(found[name][:real], expected[name]) or not (found[name][real:] == PADDING_BITS).all():
            wrong.add(name)
    return sorted(wrong)


class PauseClock:
    """How long the engine stood paused for the last version."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def before_apply(self, _version: int) -> None:
        """An engine would let its running steps end here."""
        self._began = time.monotonic()

    def after_apply(self, _version: int) -> None:
        """An engine would drop its prefix cache here."""
        self.seconds = time.monotonic() - self._began


def receive_and_compare(
    model: EngineModel, receiver: Receiver, c: EngineConfig, clock: PauseClock, folder: Path, versions: int
) -> None:
    """Receive ``versions`` versions and compare each with what the trainer gathered."""
    for wanted in range(1, versions + 1):
        version = receiver.receive(wanted, timeout_s=WAIT_S)
        whole = read_oracle(folder, version, WAIT_S)
        expected = expected_params(whole, c, receiver.rank.k)
        wrong = differing(model, expected)
        say(
            "compared",
            version=version,
            tensors=len(expected),
            nbytes=sum(bits.nbytes for bits in expected.values()),
            seconds=clock.seconds,
            equal=not wrong,
            different=wrong,
        )


def take_part(model: EngineModel, c: EngineConfig, args: argparse.Namespace, order: dict[str, Any]) -> None:
    """Attach to the run that ``order`` names, and stay in it until the next order."""
    clock = PauseClock()
    receiver = Receiver(
        model,
        run=order["run"],
        engine=args.engine,
        k=args.rank,
        size=c.size,
        layout=declare(c, args.rank),
        socket=order["socket"],
        before_apply=clock.before_apply,
        after_apply=clock.after_apply,
    )
    began = time.monotonic()
    try:
        receiver.attach()
    except WeightdError as error:
        say("refused", codes=[e.code for e in flatten([error])], text=str(error), seconds=time.monotonic() - began)
        return
    say("attached", seconds=time.monotonic() - began)
    with receiver:
        receive_and_compare(model, receiver, c, clock, args.folder, args.versions)
        say("finished")
        next_order()


def main() -> None:
    """Be one rank until the parent's orders end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="holds engine.json and the gathered tensors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    c = read_config(args.folder / "engine.json")
    model = EngineModel(c, args.rank)
    say("ready")
    try:
        while (order := next_order())["order"] == "run":
            take_part(model, c, args, order)
    except WeightdError as error:
        say("failed", text=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
