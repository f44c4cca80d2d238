"""Converts a dump from another trainer (here, the JSON lines that NeMo-RL logs) to rollout files, one per step.

python examples/convert_dump.py DUMPS OUTPUT --temperature 1.0
rlzoo rescore OUTPUT --model CHECKPOINT --output rescored
rlzoo replay rescored --clip fspo,gspo,grpo

DUMPS is the folder with the train_data_step*.jsonl files of one run. For another trainer, change `FILE` and `read`.
docs/how-to/convert-rollouts.md lists the fields of verl, prime-rl, SkyRL and slime.
"""

import argparse
import json
import re
from pathlib import Path

import torch

from rlzoo.journal.rollout_file import RolloutFile

FILE = re.compile(r"train_data_step([1-9]\d*)\.jsonl")
UNREADABLE = (IndexError, KeyError, RuntimeError, TypeError, ValueError)  # JSON and torch raise these for other content


def read(file: Path, step: int, temperature: float) -> RolloutFile:
    """Read R responses, one per line, with a one-element list under every key. NeMo-RL pads prompt plus response to T tokens.

    The fields are those of NeMo-RL 7ea279a (August 2026). `RolloutFile.from_padded` rejects inconsistent values.
    """
    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    # leave out responses and tokens on which NeMo-RL did not train
    rows = [row for row in rows if row["sample_loss_mask"][0] and any(row["token_loss_mask"][0])]
    if not rows:
        raise ValueError("it contains no trained response")

    def column(key: str) -> torch.Tensor:
        return torch.tensor([row[key][0] for row in rows])

    token_ids, chosen = column("token_ids"), column("token_loss_mask").bool()
    sizes = chosen.long().argmax(1)  # lengths of the prompts
    # the dump does not number the prompts, so responses whose prompts have the same tokens form a group
    prompts = [tuple(row[:size].tolist()) for row, size in zip(token_ids, sizes, strict=True)]
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    advantages, old_log_probs = column("advantages"), column("prev_logprobs")
    per_response = advantages.gather(1, sizes[:, None])
    return RolloutFile.from_padded(
        step=step,
        prompt_ids=token_ids[:, :0],  # prompt and response are in the same row
        prompt_mask=token_ids[:, :0],
        completion_ids=token_ids,
        completion_mask=torch.arange(token_ids.shape[1]) < column("input_lengths")[:, None],
        response_mask=chosen,
        group_ids=torch.tensor([numbers[prompt] for prompt in prompts]),
        # with dynamic sampling, `rewards` contains the rewards of the responses before filtering
        rewards=column("filtered_rewards" if "filtered_rewards" in rows[0] else "rewards"),
        # one value per response, unless the values of its tokens differ
        advantages=per_response if bool((advantages == per_response)[chosen].all()) else advantages,
        rollout_log_probs=column("generation_logprobs"),
        # zeros mean that NeMo-RL did not compute these log-probs, as with force_on_policy_ratio
        old_log_probs=old_log_probs if bool(old_log_probs[chosen].any()) else None,
        temperature=temperature,
        writer="NeMo-RL",
    )


def main() -> None:
    """Convert every step of a run. The command stops at the first file that it cannot convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", metavar="DUMPS", type=Path, help="folder with the dumps of one run")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="new or empty folder for the rollout files")
    parser.add_argument("--temperature", type=float, default=1.0, help="the sampler's temperature, which no dump contains")
    options = parser.parse_args()
    files = {int(match[1]): file for file in options.dumps.glob("*") if (match := FILE.fullmatch(file.name))}
    if not files:
        parser.error(f"{str(options.dumps)!r} contains no train_data_step*.jsonl")
    options.output.mkdir(parents=True, exist_ok=True)
    if any(options.output.iterdir()):
        parser.error(f"{str(options.output)!r} is not empty; choose another folder")
    for step, file in sorted(files.items()):
        try:
            read(file, step, options.temperature).save(options.output / f"{step:06d}.safetensors")
        except UNREADABLE as error:
            parser.error(f"{str(file)!r} cannot be converted to a rollout file: {error!r}")
    print(f"converted {len(files)} steps to {options.output}")


if __name__ == "__main__":
    main()
