"""Reads other trainers' rollout dumps as recorded steps.

Field names follow verl 0.9.1 and the commits prime-rl 559b447, NeMo-RL 7ea279a, SkyRL a956457 and slime 624b824 (August 2026).
Pickles are read without running the code to which they refer.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlzoo.errors import UserError, did_you_mean, shown
from rlzoo.recording import PER_TOKEN, RecordedStep, UpdateLogProbs
from rlzoo.support.parsing import UnreadableError, parse_json
from rlzoo.support.reading import opened

MOST_BYTES = 2**36  # maximum size of a dump


@dataclass(frozen=True, slots=True)
class Response:
    """A prompt and its response in a dump, with n tokens in total."""

    token_ids: Tensor  # (n,)
    chosen: Tensor  # (n,) bool: True on tokens that the model generated
    values: Mapping[str, Tensor] = field(default_factory=dict)  # log-probs and advantages, (n,), keyed by field of RecordedStep
    current: Tensor | None = None  # (n,) log-probs at the optimizer step, if there is only one step
    group: str | None = None  # identifies the prompt; if None, the prompt's tokens do
    reward: float | None = None
    finished: bool | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError that names the first value with a wrong type or shape."""
        size = tuple(self.token_ids.shape)
        if self.token_ids.is_floating_point() or self.token_ids.is_complex() or len(size) != 1:
            raise ValueError(f"token ids have type {self.token_ids.dtype} and shape {size}, but must be integers of shape (n,)")
        for name, value in {"mask values": self.chosen, **self.values, "current log-probs": self.current}.items():
            if value is not None and tuple(value.shape) != size:
                raise ValueError(f"{name} have shape {tuple(value.shape)}, but there are {len(self.token_ids)} tokens")

    @property
    def prompt(self) -> str:
        """A string that is equal for responses to the same prompt."""
        if self.group is not None:
            return self.group
        first = int(self.chosen.int().argmax()) if bool(self.chosen.any()) else len(self.chosen)
        return " ".join(map(str, self.token_ids[:first].tolist()))


def read_dumps(trainer: str, paths: Sequence[Path], temperature: float = 1.0) -> Iterator[RecordedStep]:
    """Read a trainer's dumps, step by step.

    Args:
        trainer: a name in `READERS`.
        paths: dumps, or folders with dumps.
        temperature: the sampler's temperature, which dumps do not contain.

    Yields:
        The steps, in numerical order.

    Raises:
        UserError: there is nothing to read, or a dump cannot be converted to a rollout file; the message gives the reason.
    """
    if trainer not in READERS:
        raise UserError(f"unknown trainer {shown(trainer)} (known: {', '.join(READERS)}){did_you_mean(trainer, READERS)}")
    reader = READERS[trainer]
    found = [file for path in paths for file in reader.files(path)]
    numbered = sorted((_reading(reader.step, file, trainer), str(file), file) for file in found)
    for step, files in groupby(numbered, key=lambda each: each[0]):
        named = [file for _, _, file in files]
        responses = [each for file in named for each in _reading(reader.read, file, trainer)]
        yield _assembled(step, responses, trainer, temperature, named[0])


Read = TypeVar("Read")


def _reading(read: Callable[[Path], Read], file: Path, trainer: str) -> Read:
    """Read a file; any failure becomes an error that names the file."""
    try:
        return read(file)
    except UserError:
        raise
    except Exception as error:  # libraries raise various errors for unexpected content
        what = f"has no {error}" if isinstance(error, KeyError) else f"cannot be read: {error}"
        raise UserError(f"{str(file)!r} {what}; is it a dump from {trainer}?") from error


def _assembled(step: int, responses: Sequence[Response], trainer: str, temperature: float, file: Path) -> RecordedStep:
    """Build a step from its responses; a field that any response lacks is left out."""
    if not responses:
        raise UserError(f"{str(file)!r} contains no trained response")
    number: dict[str, int] = {}
    groups = [number.setdefault(each.prompt, len(number)) for each in responses]

    def flat(rows: list[Tensor | None]) -> Tensor | None:
        chosen = [row[each.chosen] for row, each in zip(rows, responses, strict=True) if row is not None]
        return torch.cat(chosen).float() if len(chosen) == len(responses) else None

    fields: dict[str, Any] = {name: flat([each.values.get(name) for each in responses]) for name in PER_TOKEN}
    advantages = flat([each.values.get("advantages") for each in responses])
    if advantages is not None:
        fields["advantages"] = _per_response(advantages, [int(each.chosen.sum()) for each in responses])
    if None not in (rewards := [each.reward for each in responses]):
        fields["rewards"] = torch.tensor(rewards, dtype=torch.float32)
    if None not in (finished := [each.finished for each in responses]):
        fields["finished"] = torch.tensor(finished)
    current = flat([each.current for each in responses])
    try:
        recorded = RecordedStep(
            step=step,
            token_ids=torch.cat([each.token_ids for each in responses]).long(),
            sequence_lengths=torch.tensor([len(each.token_ids) for each in responses]),
            response_mask=torch.cat([each.chosen for each in responses]),
            group_ids=torch.tensor(groups),
            updates=() if current is None else (UpdateLogProbs(torch.arange(len(responses)), current),),
            temperature=temperature,
            writer=trainer,
            **fields,
        )
        recorded.check()
    except ValueError as error:
        raise UserError(f"{str(file)!r} cannot be converted to a rollout file: {error}") from error
    return recorded


def _per_response(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return one value per response if the values are equal within every response, otherwise the per-token values."""
    rows = torch.split(values, list(lengths))
    if all(len(row) > 0 and bool((row == row[0]).all()) for row in rows):
        return torch.stack([row[0] for row in rows])
    return values


# verl


def _verl_files(path: Path) -> Iterable[Path]:
    found = _files(path, "**/tq_batch.pt", "**/gen_batch.dp")
    texts = [path] if path.suffix == ".jsonl" else [] if found else _files(path, "*.jsonl")
    if texts:
        raise UserError(
            f"{str(texts[0])!r} was written by trainer.rollout_data_dir and has texts and scores, but no tokens or log-probs; "
            "set skip.rollout_tq.enable=true skip.rollout_tq.dump_dir=FOLDER, and convert that folder"
        )
    return _required(found, path, "tq_batch.pt or gen_batch.dp, which skip.rollout_tq and skip.rollout write")


def _verl_step(file: Path) -> int:
    content = _json(file.with_name("meta.json"))
    return int(content["global_steps"])


def _read_verl(file: Path) -> list[Response]:
    if importlib.util.find_spec("tensordict") is None:
        raise UserError("verl's dumps need tensordict, which is not installed: pip install tensordict")
    import tensordict  # noqa: F401  this registers its classes as safe to load

    if file.name == "tq_batch.pt":
        payload = _torch_load(file)
        batch, uids = payload["tensordict"], [str(key).rsplit("_", 2)[0] for key in payload["keys"]]
        columns = {key: batch[key].unbind() for key in _VERL if key in batch}
        columns |= {"prompts": batch["prompts"].unbind(), "responses": batch["responses"].unbind()}
    else:
        state = _unpickle(file, {"verl.protocol.DataProto": _Stored}).state
        if not isinstance(state[0], bytes):
            raise UserError(f"{str(file)!r} was written with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy; unset it")
        batch, uids = _torch_load(io.BytesIO(state[0])), state[1].get("uid", ())
        width = batch["prompts"].shape[1]
        before, behind = batch["attention_mask"].bool().tensor_split([width], dim=1)
        columns = {"prompts": [row[mask] for row, mask in zip(batch["prompts"], before, strict=True)]}
        for key in ("responses", *_VERL):
            if key in batch.keys():  # noqa: SIM118, a method of tensordict
                columns[key] = [row[mask] for row, mask in zip(batch[key], behind, strict=True)]
    if "rollout_log_probs" not in columns:
        raise UserError(f"{str(file)!r} has no rollout_log_probs: set actor_rollout_ref.rollout.calculate_log_probs=true")
    responses = []
    for row, (prompt, answer) in enumerate(zip(columns["prompts"], columns["responses"], strict=True)):
        rewards = columns["rm_scores"][row] if "rm_scores" in columns else None
        responses.append(
            Response(
                torch.cat([prompt, answer]),
                _behind(prompt, columns["response_mask"][row]).bool(),
                {"rollout_log_probs": _behind(prompt, columns["rollout_log_probs"][row])},
                group=str(uids[row]) if len(uids) else None,
                reward=None if rewards is None else float(rewards.sum()),
            )
        )
    return responses


_VERL = ("response_mask", "rollout_log_probs", "rm_scores")


# prime-rl


def _prime_rl_files(path: Path) -> Iterable[Path]:
    return _required(_files(path, "**/rank_*.jsonl"), path, "step_*/rank_*.jsonl, which enable_token_export writes")


def _read_prime_rl(file: Path) -> list[Response]:
    responses = []
    for line in _json_lines(file):
        if line.get("schema_version") != 1:
            found = shown(line.get("schema_version"))
            raise UserError(f"{str(file)!r} has schema_version {found}, but only version 1 is supported")
        chosen = torch.tensor(line["loss_mask"]).bool()
        weights = line.get("rl_weights") or [None]
        if None not in weights:
            chosen &= torch.tensor(weights) != 0  # tokens with weight 0 belong to another loss
        if not bool(chosen.any()):
            continue
        sampler = _floats(line["inference_logprobs"], chosen, file)
        responses.append(
            Response(
                torch.tensor(line["token_ids"]),
                chosen,
                {
                    "rollout_log_probs": sampler,
                    "old_log_probs": sampler,  # the denominator of prime-rl's ratio
                    "advantages": _floats(line["advantages"], chosen, file),
                },
                current=_floats(line["trainer_logprobs"], chosen, file),
            )
        )
    return responses


def _floats(values: list[float | None], chosen: Tensor, file: Path) -> Tensor:
    """Convert numbers to a tensor; prime-rl writes null for values that are not finite."""
    numbers = torch.tensor([torch.nan if value is None else value for value in values])
    if bool(numbers[chosen].isnan().any()):
        raise UserError(f"{str(file)!r} has a null log-prob or advantage for a trained token")
    return numbers


# NeMo-RL


def _nemo_rl_files(path: Path) -> Iterable[Path]:
    return _required(_files(path, "**/train_data_step*.jsonl"), path, "train_data_step*.jsonl, which its logger writes")


def _read_nemo_rl(file: Path) -> list[Response]:
    names = {"rollout_log_probs": "generation_logprobs", "old_log_probs": "prev_logprobs", "advantages": "advantages"}
    responses = []
    for line in _json_lines(file):
        row = {key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in line.items()}
        if not row["sample_loss_mask"]:
            continue
        length = int(row["input_lengths"])
        chosen = torch.tensor(row["token_loss_mask"][:length]).bool()
        values = {name: torch.tensor(row[key], dtype=torch.float32).flatten() for name, key in names.items()}
        values = {name: (value if len(value) > 1 else value.expand(length))[:length] for name, value in values.items()}
        reward = float(row.get("filtered_rewards", row["rewards"]))
        responses.append(Response(torch.tensor(row["token_ids"][:length]), chosen, values, reward=reward))
    if not any(bool(each.values["old_log_probs"][each.chosen].any()) for each in responses):
        # zeros mean that NeMo-RL did not compute log-probs, as with force_on_policy_ratio
        known = ("rollout_log_probs", "advantages")
        return [replace(each, values={name: each.values[name] for name in known}) for each in responses]
    return responses


# SkyRL


def _skyrl_files(path: Path) -> Iterable[Path]:
    found = _files(path, "**/global_step_*_training_input.pkl")
    return _required(found, path, "global_step_*_training_input.pkl, which trainer.dump_data_batch writes")


def _read_skyrl(file: Path) -> list[Response]:
    state = _unpickle(
        file,
        {
            "training_batch._rebuild_tensor_batch": lambda kind, state: state,
            "training_batch.TrainingInputBatch": _Stored,
            "training_batch.TensorFormat": str,
            "torch.device": torch.device,
        },
    )
    names = {
        "rollout_log_probs": "rollout_logprobs",
        "old_log_probs": "action_log_probs",
        "ref_log_probs": "base_action_log_probs",
        "advantages": "advantages",
    }
    read = ("sequences", "attention_mask", "response_mask", "loss_mask", *names.values())
    stored = {name: state["batch_dict"].get(name) for name in read}
    batch = {name: _skyrl_tensor(value) for name, value in stored.items() if value is not None}
    number = len(batch["sequences"]) - int((state["metadata"] or {}).get("pad_size", 0))
    width = batch["sequences"].shape[1] - batch["response_mask"].shape[1]
    responses = []
    for row in range(number):
        present = batch["attention_mask"][row].bool()

        def whole(values: Tensor, row: int = row, present: Tensor = present) -> Tensor:
            # responses are right-aligned, like the sequences
            return torch.cat([torch.zeros(width, dtype=values.dtype), values[row]])[present]

        chosen = whole(batch["loss_mask"]).bool()
        if bool(chosen.any()):
            values = {name: whole(batch[key]).float() for name, key in names.items() if key in batch}
            responses.append(Response(batch["sequences"][row][present], chosen, values))
    return responses


def _skyrl_tensor(stored: Mapping[str, Any]) -> Tensor:
    """Return a tensor from SkyRL's serialized form."""
    if stored.get("format") == "torch":
        loaded: Tensor = _torch_load(io.BytesIO(stored["data"]))
        return loaded
    array = np.frombuffer(stored["data"], dtype=np.dtype(stored["dtype"])).reshape(stored["shape"])
    return torch.from_numpy(array.copy())


# slime


def _slime_files(path: Path) -> Iterable[Path]:
    found = [file for file in _files(path, "*.pt") if file.stem.isdecimal()]  # skips files written by evaluations
    return _required(found, path, "NUMBER.pt, which --save-debug-rollout-data FOLDER/{rollout_id}.pt writes")


def _slime_step(file: Path) -> int:
    return int(file.stem) + 1  # slime numbers its rollouts from 0


def _read_slime(file: Path) -> list[Response]:
    responses = []
    for sample in _torch_load(file)["samples"]:
        tokens, number = torch.as_tensor(sample["tokens"]), int(sample["response_length"])
        if number == 0 or sample.get("remove_sample"):
            continue
        if sample["rollout_log_probs"] is None:
            raise UserError(f"{str(file)!r} has no rollout_log_probs, which replay needs")
        prompt = tokens[: len(tokens) - number]
        mask = sample["loss_mask"] if sample["loss_mask"] is not None else [1] * number
        reward = sample["reward"]
        responses.append(
            Response(
                tokens,
                _behind(prompt, torch.as_tensor(mask)).bool(),
                {"rollout_log_probs": _behind(prompt, torch.as_tensor(sample["rollout_log_probs"], dtype=torch.float32))},
                group=None if sample["group_index"] is None else str(sample["group_index"]),
                reward=float(reward) if isinstance(reward, int | float) else None,
                finished=sample["status"] == "completed",
            )
        )
    return responses


# files


@dataclass(frozen=True, slots=True)
class Reader:
    """Finds, numbers and reads the dumps of one trainer."""

    files: Callable[[Path], Iterable[Path]]
    step: Callable[[Path], int]
    read: Callable[[Path], list[Response]]


def _numbered(pattern: str) -> Callable[[Path], int]:
    """Return a function that finds the step number in the name of a file or its folder."""

    def step(file: Path) -> int:
        found = re.search(pattern, str(file.absolute()))
        if found is None:
            raise UserError(f"{str(file)!r} has no step number in its name ({pattern})")
        return int(found[1])

    return step


READERS: dict[str, Reader] = {
    "verl": Reader(_verl_files, _verl_step, _read_verl),
    "prime-rl": Reader(_prime_rl_files, _numbered(r"step_(\d+)/rank_\d+\.jsonl$"), _read_prime_rl),
    "nemo-rl": Reader(_nemo_rl_files, _numbered(r"train_data_step(\d+)\.jsonl$"), _read_nemo_rl),
    "skyrl": Reader(_skyrl_files, _numbered(r"global_step_(\d+)_training_input\.pkl$"), _read_skyrl),
    "slime": Reader(_slime_files, _slime_step, _read_slime),
}
"""The supported trainers."""


def _files(path: Path, *patterns: str) -> list[Path]:
    """Return the file itself, or the files in a folder that match a pattern."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{str(path)!r} does not exist; pass a dump or a folder of dumps")
    return sorted({file for pattern in patterns for file in path.glob(pattern)})


def _required(found: list[Path], path: Path, what: str) -> list[Path]:
    if not found:
        raise UserError(f"{str(path)!r} contains no {what}")
    return found


def _json(file: Path) -> Any:
    with opened(file, MOST_BYTES) as content:
        return _parsed(file, 1, content.read())


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a file, one per line."""
    with opened(file, MOST_BYTES) as lines:
        for number, line in enumerate(lines, start=1):
            value = _parsed(file, number, line)
            if not isinstance(value, dict):
                raise UserError(f"line {number} of {str(file)!r} is not a JSON object")
            yield value


def _parsed(file: Path, number: int, text: bytes) -> Any:
    try:
        return parse_json(text.decode())
    except (UnreadableError, UnicodeDecodeError) as error:
        raise UserError(f"line {number} of {str(file)!r} cannot be read: {error}") from error


def _behind(prompt: Tensor, values: Tensor) -> Tensor:
    """Prepend a zero for every prompt token to the values of a response's tokens."""
    return torch.cat([torch.zeros(len(prompt), dtype=values.dtype), values])


def _torch_load(source: Path | io.BytesIO) -> Any:
    """Load a `torch.save` file that contains only tensors, containers and classes that libraries have declared safe.

    Raises:
        UserError: the file contains anything else.
    """
    file: Any = source if isinstance(source, io.BytesIO) else opened(source, MOST_BYTES)
    try:
        with file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about other pickle protocols before it reads or rejects them
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = "it is not a torch file of plain values, so reading it could run code"
        raise UserError(f"{shown(str(source))} was not read: {what}") from error


class _Stored:
    """Placeholder that keeps only the state of a trainer's object."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_NUMPY = {
    f"numpy.{core}.{name}": f"numpy._core.{name}"
    for core in ("core", "_core")
    for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
}


def _unpickle(file: Path, known: Mapping[str, Any]) -> Any:
    """Load a pickle that refers only to the given functions and classes, and to NumPy arrays.

    Args:
        file: the pickle.
        known: allowed functions and classes, keyed by module and name; leading packages may be omitted.

    Raises:
        UserError: the pickle refers to anything else.
    """

    class Reading(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            whole = f"{module}.{name}"
            for end, value in known.items():
                if whole == end or whole.endswith(f".{end}"):
                    return value
            if whole in ("numpy.ndarray", "numpy.dtype"):
                return getattr(np, name)
            if whole in _NUMPY:
                place, _, attribute = _NUMPY[whole].rpartition(".")
                return getattr(importlib.import_module(place), attribute)
            raise UserError(f"{str(file)!r} was not read, because it refers to {shown(whole)}, which is not allowed")

    with opened(file, MOST_BYTES) as content:
        try:
            return Reading(content).load()
        except pickle.UnpicklingError as error:
            raise UserError(f"{str(file)!r} is not a pickle: {error}") from error
