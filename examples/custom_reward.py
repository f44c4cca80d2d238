"""A custom reward, in which a right answer earns 1 and every character costs a little.

``python examples/custom_reward.py`` trains with this reward for three steps, in under a minute. The equivalent command, in this
folder, is ``rlzoo train --set task.reward=custom_reward:short_and_right --steps 3``.

A reward is a function of the problem and the text of the response. The function runs in a separate worker process. If a call
hangs, crashes or does not return a finite number, the response has no grade.
"""

import rlzoo
from rlzoo.tasks.problem import Problem

QUICK = ["rollout.num_prompts=8", "rollout.group_size=4", "eval.num_problems=0", "tracking.mlflow=false"]


def short_and_right(problem: Problem, response: str) -> float:
    """Return 1 for the right number after the last ``#``, minus 0.01 per character."""
    right = response.rpartition("#")[2].strip() == problem.answer
    return float(right) - 0.01 * len(response)


def main() -> None:
    """Train for three steps and print the rewards."""
    settings = ["task.reward=custom_reward:short_and_right", *QUICK]
    result = rlzoo.train(rlzoo.RunConfig.compose(clip="fspo", overrides=settings, steps=3))
    for step, metrics in enumerate(result.metrics[1:], start=1):  # the first row was recorded before training
        print(f"step {step}  reward {metrics['reward/mean']:.3f}  failed {metrics.get('reward/failed', 0):.0f}")
    print(f"run directory {result.path}")


if __name__ == "__main__":  # this file is also imported, for its reward function
    main()
