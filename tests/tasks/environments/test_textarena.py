"""Single-player games of TextArena."""

import random

import pytest
from rlzoo_textarena import TextArena

from rlzoo.core.errors import UserError
from rlzoo.tasks.problem import Problem
from tests.tasks.environments.page import check_training, train
from tests.training.short import lines

EPISODE = Problem("episode 0:0", "")
GAMES = {
    "GuessTheNumber-v0": ["[5]", "no number", "[7]", "[3]"],
    "Mastermind-v0": ["[1 2 3 4]", "[4 3 2 1]"],
    "Blackjack-v0": ["[Hit]", "[Stand]", "[Hit]", "[Hit]"],
    "Minesweeper-v0": ["[3 3]", "[0 0]"],
}


def played(game, seed, moves, **options):
    """Return all observations and rewards of an episode."""
    environment = TextArena(game, **options)
    seen = [environment.reset(EPISODE, seed)]
    for move in moves:
        seen.append(environment.step(move))
        if seen[-1][2]:
            break
    return seen


@pytest.mark.parametrize("game", GAMES)
def test_one_seed_gives_one_game(game):
    assert played(game, 3, GAMES[game]) == played(game, 3, GAMES[game])


def test_another_seed_gives_another_game():
    assert len({str(played("GuessTheNumber-v0", seed, ["[5]", "[7]", "[3]"])) for seed in range(8)}) > 1


def test_concurrent_episodes_equal_separate_ones():
    moves = GAMES["Blackjack-v0"]  # cards are drawn at every move, from the generator that all games share
    alone = played("Blackjack-v0", 3, moves)
    state = random.getstate()
    first, second = TextArena("Blackjack-v0"), TextArena("Blackjack-v0")
    seen = [[first.reset(EPISODE, 3)], [second.reset(EPISODE, 3)]]
    for move in moves:
        random.random()
        seen[0].append(first.step(move))
        seen[1].append(second.step(move))
    assert seen == [alone, alone]
    random.setstate(state)
    first.reset(EPISODE, 5)
    assert random.getstate() == state


def test_a_guessed_number_pays_one_and_two_invalid_moves_in_a_row_end_the_game():
    rows = [played("GuessTheNumber-v0", seed, [f"[{number}]" for number in range(1, 10)], max_number=9) for seed in range(3)]
    assert [row[-1][1:] for row in rows] == [(1.0, True, {"invalid_move": False})] * 3
    *_, last = played("GuessTheNumber-v0", 0, ["no number", "none again"])
    assert last[1:] == (0.0, True, {"invalid_move": True})


def test_an_observation_is_new_text_without_the_models_own():
    prompt, (hint, *_) = played("GuessTheNumber-v0", 3, ["I say [5]"], max_number=9)
    assert "between 1 and 9" in prompt
    assert hint == "The target number is lower."


@pytest.mark.parametrize(
    ("game", "said"),
    [
        ("GuessTheNumber", "GuessTheNumber-v0"),
        ("", "no game with that name"),
        ("TicTacToe-v0", "does not support a single player"),
        ("Wordle-v0", "python -m nltk.downloader words averaged_perceptron_tagger_eng"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(game, said, monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])  # without the word lists
    with pytest.raises(UserError, match=said):
        TextArena(game).reset(EPISODE, 0)


@pytest.mark.environments
def test_the_example_on_the_page_trains(tmp_path, model):
    path, rows = train("TextArena", tmp_path, model)
    check_training(path, rows)
    for step, row in enumerate(rows, 1):  # a game ends when the number is found, or after two invalid moves in a row
        ended = [each for each in lines(path / "rollouts" / f"{step:06}.jsonl") if each["finished"]]
        assert row["env/invalid_move"] == pytest.approx(sum(each["reward"] < 1 for each in ended) / len(ended))
