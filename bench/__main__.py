"""Runs the benchmarks that need nothing but this repository, then those beside others where *bench_peers* is there.

``make bench`` runs this; each benchmark is a process of its own, so that one's memory is not another's.
"""

import importlib.util
import subprocess
import sys

PLANS = (("bench.plan_70k",), ("bench.plan_70k", "--ranks", "8"))
PUBLISH = (("bench.publish",),)
OURS = "ours=bench.peers_snapshot,live=bench.peers_live"
PEERS = ("bench_peers", "--pattern", f"ideal_numpy,colocated,{OURS}", "--model", "dense")


def main() -> int:
    """Run every benchmark; return 1 if one failed."""
    commands = [*PLANS, *PUBLISH]
    if importlib.util.find_spec("bench_peers") is not None:
        commands.append(PEERS)
    else:
        print("bench_peers is not on PYTHONPATH: the comparison with other patterns is not run; see bench/README.md")
    statuses = []
    for command in commands:
        print(f"\npython -m {' '.join(command)}", flush=True)
        statuses.append(subprocess.run([sys.executable, "-m", *command], check=False).returncode)
    return 1 if any(statuses) else 0


if __name__ == "__main__":
    sys.exit(main())
