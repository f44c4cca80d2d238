"""The guessing game, and the shipped model that plays it."""

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

import rlzoo
from rlzoo import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.models.pretrained import eos_token_ids, load_pretrained
from rlzoo.rollout.episodes import Limits, Player
from rlzoo.rollout.sampler import HFSampler
from rlzoo.tasks import build_task
from rlzoo.tasks.guess import Guess, GuessTask, read_guess
from rlzoo.tasks.problem import Problem

ASSETS = Path(rlzoo.__file__).parent / "models" / "assets"


def game(number=37, top=100, **rules):
    made = Guess(**rules)
    assert made.reset(Problem(f"guess 0-{top}: ", str(number)), 0) == f"guess 0-{top}: "
    return made


def test_a_game_worked_by_hand():
    play = game(37)
    text, reward, done, info = play.step("50")
    assert (text, reward, done, info["state"], info["found"]) == (" lower ", -0.05, False, "0-50", 0.0)
    text, reward, done, info = play.step("0-50:25")
    assert (text, reward, done, info["state"]) == (" higher ", -0.05, False, "25-50")
    text, reward, done, info = play.step("25-50:60")  # 60 is already excluded
    assert (text, reward, done, info["state"], info["wasted"]) == (" lower ", -0.05, False, "25-50", 1 / 3)
    text, reward, done, info = play.step("25-50:37")
    assert (text, reward, done) == (" found", 1.0, True)
    assert info == {"state": "25-50", "found": 1.0, "guesses": 4.0, "wasted": 1 / 4}


def test_a_game_ends_when_its_turns_are_used_up():
    play = game(5, 10, turns=3, cost=0.25)
    seen = [play.step(guess) for guess in ("6", "no guess", "7")]
    assert [reward for _, reward, _, _ in seen] == [-0.25, -0.25, -0.25]
    assert [done for *_, done, _ in seen] == [False, False, True]
    assert [text for text, *_ in seen] == [" lower ", " what? ", " lower "]
    assert (seen[-1][3]["found"], seen[-1][3]["wasted"]) == (0.0, 2 / 3)


@pytest.mark.parametrize(
    ("message", "guess"),
    [
        ("64", 64),
        ("37-100:64", 64),
        ("well, then: 64", None),
        ("well then:064", 64),
        ("", None),
        ("37-100", None),
        ("-5", None),
    ],
)
def test_a_guess_is_a_bare_number_or_follows_a_colon(message, guess):
    assert read_guess(message) == guess


@pytest.mark.parametrize("message", ["9" * 10_000, "1:2:3", "٣٧", "\ud800:7", "\0", ":" * 10_000])
def test_invalid_text_uses_only_one_turn(message):
    assert game(37).step(message)[1:3] == (-0.05, False)


def middle(problem, task):
    """Return the reward of the player that halves the range."""
    play = task.make()
    low, high = 0, int(play.reset(problem, 0).split("-")[1].rstrip(": "))
    total, done = 0.0, False
    while not done:
        text, reward, done, _ = play.step(f"{(low + high) // 2}")
        low, high = ((low + high) // 2, high) if text == " higher " else (low, (low + high) // 2)
        total += reward
    return total


def test_halving_the_range_finds_every_number_up_to_999_in_ten_turns():
    task = GuessTask(seed=0)
    rewards = [middle(problem, task) for problem in task.train_problems(0, 500)]
    assert min(rewards) >= 1 - 9 * 0.05 - 1e-9
    assert 0.7 < sum(rewards) / len(rewards) < 0.85


def test_every_response_to_a_problem_has_the_same_start_and_hidden_number():
    task = build_task({"name": "guess", "seed": 3})
    (problem,) = task.train_problems(17, 1)
    assert task.train_problems(17, 1) == [problem]
    seed = task.episode_seed(problem)
    numbers, seen = task.host.begin([problem, problem], [seed, seed])
    assert seen[0] == seen[1]
    first, second = task.host.step(dict.fromkeys(numbers, problem.answer))
    assert first == second
    assert (first.reward, first.done, first.numbers["found"]) == (1.0, True, 1.0)
    task.host.end(numbers)


def test_held_out_games_are_never_trained_on():
    small = GuessTask(seed=0, highest=20)  # few games: training uses all that it may
    trained, kept = set(small.train_problems(0, 3000)), set(small.held_out_problems(1000))
    games = sum(range(5, 21))
    assert not trained & kept
    assert (len(trained | kept), 0 < len(kept) < games / 4) == (games, True)


def test_settings_are_validated_and_serialized():
    task = build_task({"name": "guess", "turns": 8, "highest": 99})
    assert (task.name, task.workers, task.host.timeout) == ("guess", 0, 5.0)
    for wrong in ({"turns": 0}, {"highest": 19}, {"cost": -0.1}):
        with pytest.raises(ValidationError):
            GuessTask(**wrong)
    with pytest.raises(UserError, match=r"task.reward: an environment .*; remove this setting"):
        build_task({"name": "guess", "reward": "mine:mine"})


def test_the_shipped_model_is_small():
    folder = ASSETS / "embedded-guess"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000
    assert load_pretrained("embedded-guess")[0].num_parameters() < 250_000


@pytest.mark.long
def test_the_shipped_model_knows_the_rules_but_plays_badly():
    config = RunConfig.compose(["guess"])
    model, tokenizer = load_pretrained(config.model.path)
    sampler = HFSampler(model, tokenizer, end_ids=eos_token_ids(model, tokenizer), max_new_tokens=208)
    player = Player(sampler, config.task.host, Limits.of(config.rollout, sampler.context))
    problems = config.task.held_out_problems(200)
    rollouts = player.play(problems, [0] * 200, seed=0)
    reward = sum(rollout.reward for rollout in rollouts) / 200
    best = sum(middle(problem, config.task) for problem in problems) / 200
    assert 0.0 < reward < best - 0.2  # a game without a guess is worth -0.8
    assert sum(rollout.finished for rollout in rollouts) >= 195
    lengths = sorted(rollout.length for rollout in rollouts)
    assert lengths[190] > 2 * lengths[100] > 4 * lengths[10]  # a long tail
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    assert sum(read_guess(turn.text) is not None for turn in turns) > 0.98 * len(turns)


@pytest.mark.long
def test_the_shipped_config_trains(tmp_path):
    overrides = ["rollout.num_prompts=2", "rollout.group_size=4", "eval.num_problems=8", "tracking.mlflow=false"]
    config = RunConfig.compose(["guess"], clip="fspo", overrides=overrides, steps=2, output=tmp_path / "run", seed=0)
    assert RunConfig.compose([write(tmp_path / "again.yaml", config.to_yaml())]) == config
    before, *steps = rlzoo.train(config).metrics
    assert -0.8 <= before["eval/accuracy"] <= 1
    for row in steps:
        assert all(math.isfinite(value) for value in row.values())
        assert (row["reward/failed"], row["learner/grad_norm"] > 0) == (0.0, True)


def write(path, text):
    path.write_text(text)
    return path
