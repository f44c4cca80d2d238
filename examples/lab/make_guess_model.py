"""Creates the tiny guessing-game language model that ships with rlzoo, which knows the game but plays badly.

    python examples/lab/make_guess_model.py [--output DIR] [--seed 0] [--steps 3000]

The model is a two-layer Qwen3 with 0.1 million parameters that plays ``task.name=guess``. It learns from the games of a
mediocre player, which writes its current bounds and then a guess, as in ``37-100:64``. In every turn, this player may forget
an answer, confuse an answer with its opposite, or guess outside its bounds, each with a small probability. Otherwise, it
guesses uniformly between its bounds. Reinforcement learning can remove these mistakes and move the guesses to the middle.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, quantiles

import torch
from make_embedded_model import EOS, make_model, make_tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from rlzoo.models.pretrained import eos_token_ids
from rlzoo.rollout.episodes import Limits, Player
from rlzoo.rollout.sampler import HFSampler
from rlzoo.rollout.types import Rollout
from rlzoo.tasks.guess import Guess, GuessTask
from rlzoo.tasks.problem import Problem

OUTPUT = Path(__file__).resolve().parents[2] / "rlzoo" / "models" / "assets" / "embedded-guess"
CHARACTERS = "0123456789-:? abcdefghijklmnopqrstuvwxyz"
MAX_LENGTH = 512  # maximum number of tokens in an episode; the longest game has 341
TURN = 13  # number of tokens in the longest turn, such as 123-1000:456, including its end token
FIRST_PROBLEM = 10_000_000  # an index far above those of the first problems, on which reinforcement learning trains
FORGETS, CONFUSES, STRAYS = 0.1, 0.03, 0.15  # probabilities of the player's mistakes in each turn
BATCH, POOL = 32, 512
PEAK_LR, WARM_STEPS = 2.5e-3, 100

Segments = list[tuple[str, bool]]
"""Segments of an episode's text and, for each segment, whether the player wrote it."""


def mediocre_game(game: Guess, problem: Problem, generator: random.Random) -> Segments:
    """Play one game as the player that the model learns from. The module's docstring describes the player's mistakes.

    If no number is left between its bounds, the player starts again with the initial bounds.
    """
    text = game.reset(problem, 0)
    top = int(text.removeprefix("guess 0-").removesuffix(": "))
    low, high, done, segments = 0, top, False, [(text, False)]
    while not done:
        strays = generator.random() < STRAYS
        guess = generator.randint(1, top - 1) if strays else generator.randint(low + 1, high - 1)
        turn = str(guess) if len(segments) == 1 else f"{low}-{high}:{guess}"
        answer, _, done, _ = game.step(turn)
        segments += [(turn + EOS, True), (answer, False)]
        slip, higher = generator.random(), "higher" in answer
        if slip < FORGETS or not low < guess < high:
            continue
        if higher != (slip < FORGETS + CONFUSES):
            low = guess
        else:
            high = guess
        if high - low < 2:
            low, high = 0, top
    return segments[:-1]


def batches(task: GuessTask, generator: random.Random) -> Iterator[list[Segments]]:
    """Yield batches of games of similar length so that little computation is spent on padding."""
    start = FIRST_PROBLEM
    while True:
        problems = task.train_problems(start, POOL)
        start += POOL
        games = [mediocre_game(Guess(task.turns, task.cost), problem, generator) for problem in problems]
        games.sort(key=lambda game: sum(len(text) for text, _ in game))
        chunks = [games[first : first + BATCH] for first in range(0, POOL, BATCH)]
        generator.shuffle(chunks)
        yield from chunks


def encode(tokenizer: PreTrainedTokenizerFast, batch: list[Segments]) -> tuple[Tensor, Tensor]:
    """Return token IDs and labels. The labels are -100 on padding and on the environment's text."""
    rows = []
    for segments in batch:
        pieces = [(tokenizer(text)["input_ids"], own) for text, own in segments]
        ids = [token for piece, _ in pieces for token in piece]
        rows.append((ids, [token if own else -100 for piece, own in pieces for token in piece]))
    size = max(len(ids) for ids, _ in rows)
    padded = [ids + [tokenizer.pad_token_id] * (size - len(ids)) for ids, _ in rows]
    return torch.tensor(padded), torch.tensor([labels + [-100] * (size - len(labels)) for _, labels in rows])


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: GuessTask, options: argparse.Namespace) -> None:
    """Train on games. The learning rate rises for 100 steps and then falls linearly to zero."""
    steps = options.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_STEPS) * (1 - step / steps))
    progress = task.held_out_problems(256)
    stream, recent, began = batches(task, random.Random(options.seed)), [], time.perf_counter()
    for step in range(1, steps + 1):
        ids, labels = encode(tokenizer, next(stream))
        logits = model(input_ids=ids[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        optimizer.zero_grad()
        # The divisor is a constant close to the number of the player's tokens in a batch, so that tokens count equally in
        # short and long games.
        (loss / (BATCH * 75)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.item() / int((labels >= 0).sum()))
        if step % 250 == 0 or step == steps:
            reward = fmean(rollout.reward for rollout in play(model, tokenizer, task, progress, seed=options.seed))
            elapsed = time.perf_counter() - began
            print(f"step {step}  loss {fmean(recent):.3f}  mean reward {reward:.3f}  {elapsed:.0f} s", flush=True)
            recent.clear()


def play(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: GuessTask, problems: list[Problem], *, seed: int
) -> list[Rollout]:
    """Play one game per problem, sampling from the full distribution at temperature 1."""
    limits = Limits(turns=task.turns, turn_tokens=TURN, tokens=task.turns * TURN, observation_tokens=16, context=MAX_LENGTH)
    sampler = HFSampler(model, tokenizer, end_ids=eos_token_ids(model, tokenizer), max_new_tokens=limits.tokens)
    assert task.host is not None
    player = Player(sampler, task.host, limits)
    return player.play(problems, [task.episode_seed(problem) for problem in problems], seed=seed)


def bisect(task: GuessTask, problem: Problem) -> float:
    """Return the reward of a player that always guesses the middle."""
    game = Guess(task.turns, task.cost)
    low, high = 0, int(game.reset(problem, 0).removeprefix("guess 0-").removesuffix(": "))
    total, done = 0.0, False
    while not done:
        guess = (low + high) // 2
        answer, reward, done, _ = game.step(str(guess))
        total += reward
        low, high = (guess, high) if "higher" in answer else (low, guess)
    return total


def replayed(task: GuessTask, problem: Problem, segments: Segments) -> float:
    """Return the reward of a game that the mediocre player has played."""
    game = Guess(task.turns, task.cost)
    game.reset(problem, 0)
    return sum(game.step(text.removesuffix(EOS))[1] for text, own in segments if own)


def card(
    parameters: int, task: GuessTask, rollouts: list[Rollout], problems: list[Problem], options: argparse.Namespace
) -> str:
    """Return the model's README, which describes the model, how it was made, and how well it plays."""
    rewards = [rollout.reward for rollout in rollouts]
    lengths = quantiles((rollout.length for rollout in rollouts), n=20)
    turns = quantiles((len(rollout.turns) for rollout in rollouts), n=20)
    generator = random.Random(f"player:{options.seed}")
    player = [replayed(task, problem, mediocre_game(Guess(task.turns, task.cost), problem, generator)) for problem in problems]
    found = fmean(rollout.numbers.get("found", 0.0) for rollout in rollouts)
    wasted = fmean(rollout.numbers.get("wasted", 1.0) for rollout in rollouts)
    return f"""---
license: apache-2.0
library_name: transformers
---

# The guessing model that ships with rlzoo

This is a Qwen3 model with {parameters:,} parameters (2 layers, width 64, one token per character) that plays a multi-turn
game: it guesses a hidden number, reads `higher` or `lower`, and writes the remaining range and the next guess, such as
`37-100:64`. With this model, you can try reinforcement learning on episodes within minutes on two CPU cores. It can do
nothing else.

    rlzoo train --config guess --clip fspo

## How it was made

    python examples/lab/make_guess_model.py --seed {options.seed} --steps {options.steps}

The model was trained from scratch by supervised learning on {options.steps * BATCH:,} games that a program played. No
other data was used. **The program makes mistakes on purpose.** In every turn, it forgets the last answer with probability
{FORGETS}, confuses `higher` with `lower` with probability {CONFUSES}, and guesses any number with probability
{STRAYS}. Otherwise, it guesses any number between its bounds with equal probability, which takes more turns than guessing the
middle. If no number is left between its bounds, it starts again. Reinforcement learning removes these mistakes first. How
much a rule gains here says little about how much it would gain with a model that lacks knowledge.

One in eight (range, hidden number) pairs is held out. These games were never trained on.

## What was measured

The model played one game for each of {len(problems):,} held-out problems, sampled at temperature 1 from the whole distribution
(without top-k and top-p). An episode gives a reward of 1 for the number and {-task.cost} for every other turn, with at most
{task.turns} turns.

| | mean reward |
|---|---|
| the model | {fmean(rewards):.3f} |
| the program that it learned from | {fmean(player):.3f} |
| always guessing the middle | {fmean(bisect(task, problem) for problem in problems):.3f} |

| of the model's games | |
|---|---|
| found the number | {found:.3f} |
| share of turns without a guess in the remaining range | {wasted:.3f} |
| turns: 5th, 50th, 95th percentile | {turns[0]:.0f}, {turns[9]:.0f}, {turns[-1]:.0f} |
| tokens of the model: 5th, 50th, 95th percentile | {lengths[0]:.0f}, {lengths[9]:.0f}, {lengths[-1]:.0f} |
"""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Create the tiny guessing model that ships with rlzoo.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # so that the results do not depend on the number of cores
    torch.manual_seed(options.seed)
    task = GuessTask(seed=options.seed)
    tokenizer = make_tokenizer(CHARACTERS, MAX_LENGTH)
    model = make_model(tokenizer)
    warm_up(model, tokenizer, task, options)

    problems = task.held_out_problems(1000)
    rollouts = play(model, tokenizer, task, problems, seed=options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    # the file is created with access only for its owner, but every user of the package must be able to read it
    (options.output / "model.safetensors").chmod(0o644)
    text = card(model.num_parameters(), task, rollouts, problems, options)
    (options.output / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
