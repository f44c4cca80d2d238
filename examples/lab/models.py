"""Compares rlzoo's log-probs with plain passes of the model for every type of causal language model in transformers.

``python -m examples.lab.models [TYPE ...]`` builds a small random model of each type, samples and scores with it as ``rlzoo
train`` does, and compares all log-probs with plain passes of a second copy, which only transformers loads. A plain pass
computes one row in evaluation mode, without padding and without a cache. Plain passes also confirm each of rlzoo's refusals.
``--write`` updates docs/reference/models.md. Testing all types takes minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from examples.lab.small_models import build
from rlzoo import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.gate.enter import enter
from rlzoo.learner.batch import Batch, collate
from rlzoo.tasks import Task
from rlzoo.tasks.problem import Problem
from rlzoo.training.run import Run

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
WARNED = 0.01
"""Largest difference of the sampler in nats that is accepted if rlzoo warns of a difference before the first step."""
TOLERANCE = 2e-3  # maximum difference in nats in float32
PROMPTS = ("3+5+9", "what is 12 + 7 * (3-1)?", "add 17, 4, 88 and 1; then take 5 from a sum.")  # 5, 23 and 44 tokens
NEW_TOKENS = 40
DEFAULT = "default"
MODES = {DEFAULT: (), "packing": ("learner.packing=true",), "checkpointing": ("learner.gradient_checkpointing=true",)}
"""Overrides of the settings in each mode."""
COLUMNS = ("type", "sampled by", "log-probs", "packing", "checkpointing", "remarks")
ANSWERS = ("agrees", "refused", "off", "failed", "not built")
NOT_BUILT = {
    "emu3": "AutoModelForCausalLM saves its language model with a configuration that it cannot load",
    "gemma3n": "needs the package timm; gemma3n_text is its language model",
    "gemma4_assistant": "drafts for another model, whose states are its input",
    "gemma4_unified_assistant": "drafts for another model, whose states are its input",
    "mllama": "AutoModelForCausalLM saves its language model with a configuration that it cannot load",
    "musicgen": "AutoModelForCausalLM cannot build its decoder from its configuration",
    "musicgen_melody": "AutoModelForCausalLM cannot build its decoder from its configuration",
}
"""Reasons that the table states instead of the error messages."""


@dataclass
class Row:
    """The results of the sweep for one type of model."""

    type: str
    answers: dict[str, str] = field(default_factory=dict)  # outcome by mode: agrees, refused, off, failed or not built
    way: str = ""  # how its responses were sampled
    remarks: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)  # largest difference of each path from plain passes, in nats
    changes: dict[str, float | str] = field(default_factory=dict)  # see `Plain.changes`
    seconds: float = 0.0

    def add(self, mode: str, answer: str, remark: str = "") -> None:
        """Record the outcome of a mode, with a remark."""
        self.answers[mode] = answer
        if remark:
            self.remarks.append(remark if mode == DEFAULT else f"{mode}: {remark}")

    def __str__(self) -> str:
        """Return a row of the table."""
        cells = [f"`{self.type}`", self.way, *(self.answers.get(mode, "") for mode in MODES), "; ".join(self.remarks)]
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


class Prompts(Task):
    """Three prompts of different lengths. Every second response is right."""

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """See `Task.train_problems`."""
        return [Problem(PROMPTS[index % len(PROMPTS)], "") for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """See `Task.held_out_problems`."""
        return []

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> Sequence[float | None]:
        return [float(index % 2) for index in range(len(responses))]


class Plain:
    """A copy of a model, loaded by transformers alone, for passes that involve no rlzoo code."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def log_probs(self, *rows: Sequence[int], **inputs: Any) -> Tensor:
        """Return the log-probs ``(R, S, V)`` of rows of equal length."""
        logits: Tensor = self.model(input_ids=torch.tensor(rows), use_cache=False, **inputs).logits
        return logits.log_softmax(-1)

    def difference(self, batch: Batch, log_probs: Tensor) -> float:
        """Return the largest difference in nats between responses' log-probs, ``(B, T)``, and plain passes of each row."""
        worst = 0.0
        for ours, ids, start in zip(log_probs, batch.sequences, batch.prompt_lengths.tolist(), strict=True):
            theirs = self.log_probs(ids.tolist())[0, start - 1 : -1].gather(-1, ids[start:, None])[:, 0]
            worst = max(worst, float((ours[: len(theirs)] - theirs).abs().max().nan_to_num(torch.inf)))
        return worst

    def changes(self) -> Iterator[tuple[str, float | str]]:
        """Yield, for each input that should not affect a row's log-probs, the change in nats, or why it is untested."""
        random = torch.Generator().manual_seed(1)
        short, long = (torch.randint(3, 98, (size,), generator=random).tolist() for size in (21, 84))
        alone, whole, size, gap = self.log_probs(short)[0], self.log_probs(long)[0], len(short), len(long) - len(short)
        mask = torch.tensor([[0] * gap + [1] * size])
        left = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        packed = torch.cat([torch.arange(len(long)), torch.arange(size)])[None]
        questions: dict[str, Callable[[], Tensor]] = {
            "later token": lambda: self.log_probs([*short[:-1], 7])[0, :-1] - alone[:-1],
            "later tokens": lambda: self.log_probs(long[:50])[0] - whole[:50],
            "a second pass": lambda: self.log_probs(long)[0] - whole,
            "an earlier pass": lambda: self.log_probs(short)[0] - alone,
            "other rows": lambda: self.log_probs(short, long[:size])[0] - alone,
            "right padding": lambda: self.log_probs(short + [0] * gap, long)[0, :size] - alone,
            "left padding": lambda: self.log_probs([0] * gap + short, **left)[0, gap:] - alone,
            "packing": lambda: self.log_probs(long + short, position_ids=packed)[0, -size:] - alone,
            "a cache": lambda: self._generated(short),
            "checkpointing": lambda: self._checkpointed(short) - alone,
        }
        for name, question in questions.items():
            try:
                yield name, float(question().abs().max())
            except Exception as error:
                yield name, one_line(error)

    @torch.no_grad()
    def _generated(self, row: Sequence[int]) -> Tensor:
        """Return the differences ``(20, V)`` between transformers' `generate` and one pass over the generated tokens."""
        options = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
        asked = GenerationConfig(max_new_tokens=20, min_new_tokens=20, **options)
        given = self.model.generate(torch.tensor([row]), generation_config=asked)
        return torch.cat(given.logits).log_softmax(-1) - self.log_probs(given.sequences[0].tolist())[0, len(row) - 1 : -1]

    def _checkpointed(self, row: Sequence[int]) -> Tensor:
        """Return the log-probs ``(S, V)`` of a row in training mode without dropout and with gradient checkpointing."""
        model = copy.deepcopy(self.model).train()
        for module in model.modules():
            for name in [name for name in vars(module) if "drop" in name and "layerdrop" not in name]:
                if isinstance(getattr(module, name), float):
                    setattr(module, name, 0.0)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.gradient_checkpointing_enable({"use_reentrant": False})
        logits: Tensor = model(input_ids=torch.tensor([row]), use_cache=False).logits[0].detach()
        return logits.log_softmax(-1)


CONFIRMED_BY = {
    "causal": ("later token", "later tokens"),
    "random|repeat|checkpointing": ("a second pass", "checkpointing"),
    "earlier pass|longer": ("an earlier pass", "left padding", "right padding"),
    "pack": ("packing",),
    "sampl|generate": ("a cache", "left padding"),
    "pad|rows": ("left padding", "right padding", "other rows"),
}
"""Names in `Plain.changes` that confirm a refusal, by words in the refusal's message."""


def confirmed(message: str, changes: Mapping[str, float | str]) -> str:
    """Return how plain passes confirm the property that a refusal names, or state that they do not."""
    names = next((names for words, names in CONFIRMED_BY.items() if re.search(words, message)), ())
    for change in (changes[name] for name in names):
        if isinstance(change, str) or not change <= TOLERANCE:
            return f"confirmed: {change if isinstance(change, str) else f'{change:.2g} nats'}"
    return "NOT confirmed"


def ask(kind: str, folder: Path) -> Row:
    """Build a model of a type and compare every path through rlzoo with plain passes."""
    row, model, started = Row(kind), folder / "model", time.monotonic()
    try:
        build(kind, model)
        plain = Plain(model)
        row.changes = dict(plain.changes())
    except Exception as error:
        row.add(DEFAULT, "not built", NOT_BUILT.get(kind, one_line(error)))
        return row
    batch: Batch | None = None
    for mode, overrides in MODES.items():
        answer, remark, errors = "agrees", "", dict[str, float]()
        with heard() as messages:
            try:
                run = opened(configured(model, folder / mode, *overrides))
                if batch is None:
                    row.way = str(getattr(run.rollouts.sampler, "way", ""))
                    batch = collate(run.sample(1).groups)
                    errors["sampler"] = plain.difference(batch, batch.rollout_log_probs)
                errors["learner"] = plain.difference(batch, run.learner.log_probs(batch))
                (update,) = run.learner.update(run.learner.score(batch))[1]
                trained = torch.zeros_like(batch.rollout_log_probs).index_copy(
                    0, update.minibatch.rows, update.minibatch.log_probs
                )
                errors["training pass"] = plain.difference(batch, trained)
            except UserError as error:
                answer, remark = "refused", str(error)
            except Exception as error:
                answer, remark = "failed", one_line(error)
        off = [f"{path} {nats:.2g} nats" for path, nats in errors.items() if not nats <= TOLERANCE]
        named = [message for message in messages if mode in message]
        warned = [message for message in messages if "log-probs differ from those of one pass" in message]
        if off == [f"sampler {errors.get('sampler', 0):.2g} nats"] and warned and errors["sampler"] <= WARNED:
            remark = f"with a warning: {off[0]}"
        elif off:
            answer, remark = "off", ", ".join([*off, *filter(None, [remark])])
        elif answer == "agrees" and named:  # rlzoo continues without this mode
            answer, remark = "refused", named[0]
        if answer == "refused":
            message = re.sub(r"^(learner|model)\.[\w.=]+: ", "", remark.partition(";")[0])  # drop the name of the setting
            remark = f"{message} ({confirmed(remark, row.changes)})"
        row.errors |= {f"{mode}: {path}": nats for path, nats in errors.items()}
        row.add(mode, answer, remark)
        if row.answers[DEFAULT] in ("refused", "failed"):
            break
    row.seconds = round(time.monotonic() - started, 1)
    return row


def opened(config: RunConfig) -> Run:
    """Open a run as ``rlzoo train`` does."""
    return Run(enter(config, config.task))


def configured(model: Path, output: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run with one step."""
    settings = {
        "model.path": model,
        "task.name": "examples.lab.models:Prompts",
        "rollout.num_prompts": len(PROMPTS),
        "rollout.group_size": 2,
        "rollout.max_new_tokens": NEW_TOKENS,
        "learner.num_minibatches": 1,
        "eval.num_problems": 0,
        "tracking.mlflow": "false",
    }
    given = [*(f"{key}={value}" for key, value in settings.items()), *overrides]
    return RunConfig.compose(clip="grpo", overrides=given, steps=1, output=output)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect rlzoo's warnings inside the block."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rlzoo").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("rlzoo").removeHandler(handler)


def one_line(error: Exception) -> str:
    """Return an error as one line that includes where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]} at {Path(place.filename).name}:{place.lineno}"


def _alone(kind: str, folder: Path, seconds: int) -> Row:
    """Call `ask` in a separate process, which the system kills at the time limit."""
    signal.alarm(seconds)
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        return ask(kind, folder / kind)


def sweep(kinds: Sequence[str], *, jobs: int = 2, seconds: int = 60) -> Iterator[Row]:
    """Test types in ``jobs`` processes. A type fails if it takes more than ``seconds`` or its process crashes."""
    import_module("transformers.models.llama.modeling_llama")  # import once, before the processes are forked
    import_module("accelerate")
    configured(Path(), Path())
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, context.Pool(jobs, maxtasksperchild=1) as pool:
        results = [(kind, pool.apply_async(_alone, (kind, Path(folder), seconds))) for kind in kinds]
        for kind, result in results:
            try:
                yield result.get(seconds + 5)
            except multiprocessing.TimeoutError:
                yield Row(kind, {DEFAULT: "failed"}, remarks=[f"no answer in {seconds} s"])
            except Exception as error:
                yield Row(kind, {DEFAULT: "failed"}, remarks=[one_line(error)])


def page(rows: Sequence[Row], text: str) -> str:
    """Return a page with the table of the given rows."""
    counts = Counter(row.answers[DEFAULT] for row in rows)
    summary = ", ".join(f"{counts[answer]} {answer}" for answer in ANSWERS)
    head = f"{len(rows)} types in transformers {transformers.__version__}: {summary}.\n\n| {' | '.join(COLUMNS)} |"
    table = "\n".join([head, f"|{'---|' * len(COLUMNS)}", *map(str, rows)])
    return re.sub(r"(?s)(<!-- measured: models -->\n).*(\n<!-- end -->)", lambda match: f"{match[1]}{table}{match[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="types of models; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes at once (default: 2)")
    parser.add_argument("--seconds", type=int, default=60, help="time limit of one type (default: 60)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--write", action="store_true", help="write the table to docs/reference/models.md")
    given = parser.parse_args()
    if unknown := sorted(set(given.types) - set(TYPES)):
        parser.error(f"unknown types: {', '.join(unknown)} (allowed: {', '.join(TYPES)})")
    rows = []
    for row in sweep(given.types or TYPES, jobs=given.jobs, seconds=given.seconds):
        rows.append(row)
        print(row, flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if given.write:
        PAGE.write_text(page(rows, PAGE.read_text()))
    sys.exit(any(row.answers[DEFAULT] in ("off", "failed") for row in rows))


if __name__ == "__main__":
    sys.modules["examples.lab.models"] = sys.modules["__main__"]  # the task is imported by its name
    main()
