"""Dumps of other trainers, in the formats that their source code defines, are converted to rollout files.

tests/downstream uses files that were written by the trainers' own code, if they can be installed.
"""

import json
import pickle
import random
import sys
import types

import pytest
import torch

from rlzoo.errors import UserError
from rlzoo.integrations.dumps import READERS, read_dumps

# two responses to the prompt 7 8 and one to the prompt 9; the first has an environment's token, 5, in its middle
TOKENS = [[7, 8, 3, 5, 4], [7, 8, 6], [9, 2, 1]]
CHOSEN = [[0, 0, 1, 0, 1], [0, 0, 1], [0, 1, 1]]
SAMPLER = [[0.0, 0.0, -1.0, 0.0, -2.0], [0.0, 0.0, -3.0], [0.0, -4.0, -5.0]]
OLD = [[0.0, 0.0, -1.5, 0.0, -2.5], [0.0, 0.0, -3.5], [0.0, -4.5, -5.5]]
ADVANTAGES = [1.0, -1.0, 0.5]
REWARDS = [1.0, 0.0, 2.0]


def check_common(step, number=1):
    assert step.step == number
    assert step.token_ids.tolist() == [token for row in TOKENS for token in row]
    assert step.sequence_lengths.tolist() == [5, 3, 3]
    assert step.response_mask.tolist() == [bool(flag) for row in CHOSEN for flag in row]
    assert step.group_ids.tolist() == [0, 0, 1]
    assert step.rollout_log_probs.tolist() == [-1, -2, -3, -4, -5]
    assert step.lengths.tolist() == [2, 1, 2]


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


# prime-rl: prime_rl.trainer.rl.token_export at 559b447


def prime_rl_row(index, **replaced):
    size = len(TOKENS[index])
    return {
        "schema_version": 1, "step": 4, "rank": 0, "micro_step": 0, "micro_sequence_idx": index, "export_sequence_idx": index,
        "env_name": "sums", "token_ids": TOKENS[index], "position_ids": list(range(size)),
        "loss_mask": [bool(flag) for flag in CHOSEN[index]], "advantages": [ADVANTAGES[index]] * size,
        "inference_logprobs": [None, *SAMPLER[index][1:]], "trainer_logprobs": OLD[index], "entropy": [0.1] * size,
        "rl_weights": [None] * size, "ce_weights": [None] * size, "ref_kl_weights": [None] * size, **replaced,
    }  # fmt: skip


def test_prime_rls_token_export(tmp_path):
    folder = tmp_path / "token_exports" / "step_4"
    write_lines(folder / "rank_0.jsonl", [prime_rl_row(0), prime_rl_row(1)])
    write_lines(folder / "rank_1.jsonl", [prime_rl_row(2)])
    for path in (tmp_path, folder):
        (step,) = read_dumps("prime-rl", [path], temperature=0.7)
        check_common(step, 4)
        assert torch.equal(step.old_log_probs, step.rollout_log_probs)  # the denominator of prime-rl's ratio
        (update,) = step.updates
        assert (update.rows.tolist(), update.log_probs.tolist()) == ([0, 1, 2], [-1.5, -2.5, -3.5, -4.5, -5.5])
        assert (step.advantages.tolist(), step.rewards, step.temperature) == (ADVANTAGES, None, 0.7)


def test_tokens_that_prime_rl_learns_from_by_another_loss_are_left_out(tmp_path):
    rows = [prime_rl_row(0, rl_weights=[0.0, 0, 1, 0, 0]), prime_rl_row(1, rl_weights=[0.0, 0, 0]), prime_rl_row(2)]
    write_lines(tmp_path / "step_1" / "rank_0.jsonl", rows)
    (step,) = read_dumps("prime-rl", [tmp_path])
    assert step.rollout_log_probs.tolist() == [-1, -4, -5]
    assert step.sequence_lengths.tolist() == [5, 3]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [({"schema_version": 2}, "schema_version 2, but only version 1 is supported"),
     ({"inference_logprobs": [0, 0, None, 0, -1]}, "null log-prob or advantage for a trained token"),
     ({"trainer_logprobs": [1.0]}, "is it a dump from prime-rl"), ({"token_ids": "x"}, "is it a dump from prime-rl"),
     ({"token_ids": [1, 2]}, r"mask values have shape \(5,\), but there are 2 tokens"),
     ({"advantages": [1e39] * 5}, "advantages has a value"),
     ({"token_ids": [7, 8, 3, 5, -4]}, "cannot be converted to a rollout file: token_ids has a negative value")],
)  # fmt: skip
def test_a_token_export_that_does_not_fit_is_refused(replaced, message, tmp_path):
    write_lines(tmp_path / "step_1" / "rank_0.jsonl", [prime_rl_row(0, **replaced)])
    with pytest.raises(UserError, match=message):
        list(read_dumps("prime-rl", [tmp_path]))


# NeMo-RL: nemo_rl.algorithms.grpo and Logger.log_batched_dict_as_jsonl at 7ea279a: each value is a list of one


def nemo_rl_row(index, **replaced):
    padding = 6 - len(TOKENS[index])
    padded = {
        "token_ids": TOKENS[index] + [0] * padding, "token_loss_mask": CHOSEN[index] + [0] * padding,
        "generation_logprobs": SAMPLER[index] + [0.0] * padding, "prev_logprobs": OLD[index] + [0.0] * padding,
        "advantages": [ADVANTAGES[index]] * 6, "rewards": REWARDS[index], "input_lengths": len(TOKENS[index]),
        "sample_loss_mask": 1.0, "content": "7 8", **replaced,
    }  # fmt: skip
    return {**{key: [value] for key, value in padded.items()}, "idx": index}


def test_nemo_rls_training_data(tmp_path):
    write_lines(tmp_path / "exp_1" / "train_data_step10.jsonl", map(nemo_rl_row, range(3)))
    write_lines(tmp_path / "exp_1" / "train_data_step9.jsonl", map(nemo_rl_row, range(3)))
    first, second = read_dumps("nemo-rl", [tmp_path])
    check_common(first, 9)
    check_common(second, 10)
    assert first.old_log_probs.tolist() == [-1.5, -2.5, -3.5, -4.5, -5.5]
    assert (first.advantages.tolist(), first.rewards.tolist(), first.updates) == (ADVANTAGES, REWARDS, ())


def test_samples_that_nemo_rl_masks_are_left_out(tmp_path):
    write_lines(tmp_path / "train_data_step1.jsonl", [nemo_rl_row(0, sample_loss_mask=0.0), nemo_rl_row(1)])
    (step,) = read_dumps("nemo-rl", [tmp_path])
    assert (len(step), step.rollout_log_probs.tolist()) == (1, [-3])
    write_lines(tmp_path / "train_data_step1.jsonl", [nemo_rl_row(0, sample_loss_mask=0.0)])
    with pytest.raises(UserError, match="contains no trained response"):
        list(read_dumps("nemo-rl", [tmp_path]))


def test_zeros_are_no_old_log_probs(tmp_path):
    # NeMo-RL writes zeros with force_on_policy_ratio, for which it computes no log-probs
    write_lines(tmp_path / "train_data_step1.jsonl", [nemo_rl_row(index, prev_logprobs=[0.0] * 6) for index in range(3)])
    (step,) = read_dumps("nemo-rl", [tmp_path])
    check_common(step)
    assert step.old_log_probs is None
    assert step.advantages.tolist() == ADVANTAGES


def test_token_advantages_stay_token_advantages(tmp_path):
    write_lines(tmp_path / "train_data_step1.jsonl", [nemo_rl_row(0, advantages=[0, 0, 1.0, 0, 2.0, 0]), nemo_rl_row(1)])
    (step,) = read_dumps("nemo-rl", [tmp_path])
    assert step.advantages.tolist() == [1, 2, -1]


# slime: slime.observability.rollout_data_utils and Sample.to_dict at 624b824


def slime_sample(index, **replaced):
    size = 3 if index == 0 else 1 if index == 1 else 2
    return {
        "group_index": index // 2, "index": index, "rollout_id": index, "prompt": "7 8", "tokens": TOKENS[index],
        "response_length": size, "response": "3", "reward": REWARDS[index], "loss_mask": CHOSEN[index][-size:],
        "rollout_log_probs": SAMPLER[index][-size:], "remove_sample": False, "status": "truncated" if index else "completed",
        "metadata": {"a": [1, "b"]}, "spec_info": {"spec_verify_ct": 0}, **replaced,
    }  # fmt: skip


def write_slime(folder, rollout, samples):
    torch.save({"rollout_id": rollout, "samples": samples}, folder / f"{rollout}.pt")


def test_slimes_debug_rollout_data(tmp_path):
    write_slime(tmp_path, 0, [slime_sample(index) for index in range(3)])
    torch.save({"rollout_id": 0, "samples": []}, tmp_path / "eval_0.pt")
    (step,) = read_dumps("slime", [tmp_path])
    check_common(step, 1)
    assert (step.rewards.tolist(), step.finished.tolist()) == (REWARDS, [True, False, False])
    assert (step.advantages, step.old_log_probs, step.updates) == (None, None, ())


def test_a_missing_loss_mask_is_a_response_of_one_turn(tmp_path):
    write_slime(tmp_path, 2, [slime_sample(1, loss_mask=None), slime_sample(2, remove_sample=True)])
    (step,) = read_dumps("slime", [tmp_path])
    assert (step.step, step.rollout_log_probs.tolist()) == (3, [-3])
    write_slime(tmp_path, 2, [slime_sample(1, rollout_log_probs=None)])
    with pytest.raises(UserError, match="has no rollout_log_probs"):
        list(read_dumps("slime", [tmp_path]))


# SkyRL: skyrl.backends.skyrl_train.training_batch at a956457: sequences and responses are right-aligned


@pytest.fixture
def skyrl(monkeypatch):
    """A module with SkyRL's name, whose batch pickles like SkyRL's."""
    module = types.ModuleType("skyrl.backends.skyrl_train.training_batch")

    def _rebuild_tensor_batch(cls, state):
        raise AssertionError("the function of the file must not be run")

    class TrainingInputBatch(dict):
        metadata = None

        def __reduce__(self):
            stored = {
                name: None if value is None else {
                    "format": "numpy", "data": value.numpy().tobytes(), "shape": value.numpy().shape,
                    "dtype": str(value.numpy().dtype),
                }
                for name, value in self.items()
            }  # fmt: skip
            state = {"batch_dict": stored, "batch_size": 3, "device": torch.device("cpu"), "metadata": self.metadata}
            return _rebuild_tensor_batch, (type(self), state)

    for each in (_rebuild_tensor_batch, TrainingInputBatch):
        each.__module__, each.__qualname__ = module.__name__, each.__name__
        setattr(module, each.__name__, each)
    names = module.__name__.split(".")
    for end in range(1, len(names)):  # pickle imports the parent packages, which need not be installed
        name = ".".join(names[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return TrainingInputBatch


def right(rows, width, dtype=torch.float32):
    return torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], dtype=dtype)


def skyrl_batch(kind):
    sizes = [3, 1, 2, 2]  # of the responses; the fourth row is padding, a copy of the first without a loss
    tokens, chosen, sampler, old = (values + values[:1] for values in (TOKENS, CHOSEN, SAMPLER, OLD))
    sizes[3] = 3
    responses = [[row[-size:] for row, size in zip(rows, sizes, strict=True)] for rows in (chosen, sampler, old)]
    responses[0][3] = [0, 0, 0]
    batch = kind({
        "sequences": right(tokens, 6, torch.int64), "attention_mask": right([[1] * len(row) for row in tokens], 6, torch.int64),
        "response_mask": right([[1] * size for size in sizes], 4, torch.int64), "loss_mask": right(responses[0], 4),
        "rollout_logprobs": right(responses[1], 4), "action_log_probs": right(responses[2], 4), "base_action_log_probs": None,
        "advantages": torch.tensor([*ADVANTAGES, 1.0])[:, None].expand(4, 4).contiguous(), "values": None,
    })  # fmt: skip
    batch.metadata = {"pad_size": 1, "response_length": 4}
    return batch


def test_skyrls_data_batch(skyrl, tmp_path):
    file = tmp_path / "dumped_data" / "global_step_3_training_input.pkl"
    file.parent.mkdir()
    file.write_bytes(pickle.dumps(skyrl_batch(skyrl)))
    (step,) = read_dumps("skyrl", [tmp_path])
    check_common(step, 3)
    assert step.old_log_probs.tolist() == [-1.5, -2.5, -3.5, -4.5, -5.5]
    assert (step.advantages.tolist(), step.ref_log_probs, step.rewards) == (ADVANTAGES, None, None)


class Runs:
    """Would write a file when unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return exec, (f"open({str(self.file)!r}, 'w').close()",)


@pytest.mark.parametrize(
    ("trainer", "name"),
    [("skyrl", "global_step_1_training_input.pkl"), ("slime", "1.pt"), ("verl", "gen_batch.dp"), ("verl", "tq_batch.pt")],
)
def test_the_code_that_a_pickle_names_is_not_run(trainer, name, tmp_path):
    if trainer == "verl":
        pytest.importorskip("tensordict")
    dump, trace = tmp_path / name, tmp_path / "trace"
    if dump.suffix == ".pt":
        torch.save({"samples": Runs(trace)}, dump)
    else:
        dump.write_bytes(pickle.dumps(Runs(trace)))
    (tmp_path / "meta.json").write_text('{"global_steps": 1}')
    with pytest.raises(UserError, match=r"was not read[,:] "):
        list(read_dumps(trainer, [tmp_path]))
    assert not trace.exists()


# what is rejected


@pytest.mark.parametrize("trainer", READERS)
def test_a_folder_without_dumps_is_refused(trainer, tmp_path):
    with pytest.raises(UserError, match=r"contains no .*, which"):
        list(read_dumps(trainer, [tmp_path]))
    with pytest.raises(UserError, match="does not exist; pass a dump"):
        list(read_dumps(trainer, [tmp_path / "missing"]))


def test_texts_of_verl_are_refused_with_what_to_set(tmp_path):
    write_lines(tmp_path / "1.jsonl", [{"input": "1+1=", "output": "2", "score": 1.0, "step": 1}])
    for path in (tmp_path, tmp_path / "1.jsonl"):
        with pytest.raises(UserError, match=r"texts and scores, but no tokens or log-probs; set skip\.rollout_tq\.enable"):
            list(read_dumps("verl", [path]))


def test_an_unknown_trainer_is_refused():
    with pytest.raises(UserError, match=r"unknown trainer 'nemorl' \(known: verl, .*did you mean 'nemo-rl'"):
        list(read_dumps("nemorl", []))


@pytest.mark.parametrize("text", ["", "{", "[]\n", "1\n", '{"schema_version": 1}\n', "\xff\n"])
@pytest.mark.parametrize(("trainer", "name"), [("prime-rl", "step_1/rank_0.jsonl"), ("nemo-rl", "train_data_step1.jsonl")])
def test_torn_lines_are_refused_in_one_line(trainer, name, text, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as refused:
        list(read_dumps(trainer, [tmp_path]))
    assert name.rpartition("/")[2] in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("trainer", "name"), [("slime", "1.pt"), ("skyrl", "global_step_1_training_input.pkl")])
def test_torn_pickles_are_refused_in_one_line(trainer, name, tmp_path):
    for content in (b"", b"x", b"\x80\x04."):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            list(read_dumps(trainer, [tmp_path]))


BAD = [None, -1, float("inf"), 10**30, 2**63, "x", "\ud800", True, [], {}, [[]], [None], [1, [2]]]


def broken(values, rng):
    """Return a copy with one value, or one element of one, missing or bad."""
    values, key = {**values}, rng.choice(sorted(values))
    kind, value = rng.randrange(5), values.pop(key)
    if kind == 0:
        return values
    if kind < 3 or not isinstance(value, list) or not value:
        return {**values, key: rng.choice(BAD)}
    place = rng.randrange(len(value))
    return {**values, key: [*value[:place], *([] if kind == 3 else [rng.choice(BAD)]), *value[place + 1 :]]}


@pytest.mark.parametrize("trainer", ["prime-rl", "nemo-rl", "slime"])
def test_a_broken_dump_is_read_or_refused_in_one_line(trainer, tmp_path):
    rng, refused = random.Random(trainer), list[str]()
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        if trainer == "prime-rl":
            write_lines(folder / "step_1" / "rank_0.jsonl", [broken(prime_rl_row(0), rng), prime_rl_row(1)])
        elif trainer == "nemo-rl":
            write_lines(folder / "train_data_step1.jsonl", [broken(nemo_rl_row(0), rng), nemo_rl_row(1)])
        else:
            write_slime(folder, 0, [broken(slime_sample(0), rng), slime_sample(2)])
        try:
            list(read_dumps(trainer, [folder]))
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(str(tmp_path) in message and "\n" not in message for message in refused)
