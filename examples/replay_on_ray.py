"""Replays each rule on each recording as a separate task on a Ray cluster, and prints a row of results for each pair.

``python examples/replay_on_ray.py fspo,gspo,grpo runs/a runs/b``
"""

import sys
from pathlib import Path

import pandas as pd
import ray

import rlzoo


@ray.remote(num_cpus=1)
def replayed(rule: str, recording: str) -> dict[str, object]:
    """Return the row for a rule and a recording that the node can read."""
    return {"recording": recording, **rlzoo.replay(recording, [rule]).rows[0]}


def main(rules: str, *recordings: str) -> None:
    """Replay every rule on every recording."""
    ray.init("auto", log_to_driver=False)
    paths = [str(Path(recording).resolve()) for recording in recordings]
    rows = ray.get([replayed.remote(rule, path) for path in paths for rule in rules.split(",")])
    print(pd.DataFrame(rows).to_csv(index=False), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
