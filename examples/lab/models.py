"""Asks of every type of causal language model in transformers whether rlzoo's log-probs are those of the model itself.

``python -m examples.lab.models [TYPE ...]`` builds a small random model of each type, and samples and scores with it as
``rlzoo train`` would. It compares all log-probs with plain passes of a second copy, which only transformers loads: one row at a
time, in evaluation mode, without padding and without a cache. What rlzoo refuses is confirmed by plain passes as well.
``--write`` updates the table in docs/reference/models.md. All types take minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import string
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from rlzoo import RunConfig
from rlzoo.errors import UserError
from rlzoo.learner.batch import Batch, collate
from rlzoo.tasks import Task
from rlzoo.training.run import Run
from rlzoo.types import Problem

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
TOLERANCE = 2e-3  # nats, in float32
PROMPTS = ("3+5+9", "what is 12 + 7 * (3-1)?", "add 17, 4, 88 and 1; then take 5 from a sum.")  # 5, 23 and 44 tokens
NEW_TOKENS = 40
VOCABULARY = 128
LAYERS = 4

SIZES = {
    r"original_max_position_embeddings": 64,
    r".*vocab(_size.*)?": VOCABULARY,
    r"max_(position_embeddings|seq(uence)?_len(gth)?|(source|target)_positions)|n_(positions|ctx)|context_length|model_max_length": 256,
    r"num_experts_per_tok(en)?|moe_top_?k|moe_k|.*(period|interval|sliding_window_pattern|every_n_layers)": 2,
    r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|num_blocks|depth": LAYERS,
    r"(num_|n_)?(moe_num_|local_|routed_)?experts|zero_expert_num": 4,
    r"qk_head_dim|mamba_(d_head|head_?dim)|index_n_heads": 16,  # fewer index heads would often choose between equal scores
    r"(.*_)?head_(dim|size)|rotary_dim|kv_channels|d_kv|dim_head|d_head": 8,
    r"(.*_)?(kv_|key_value_)heads|kv_n_heads|(mamba_)?n_groups|mamba_ngroups|o_groups": 2,
    r"(.*_)?heads?|num_query_groups": 4,
    r"(attention_|backbone_)?hidden_size(_.*)?|d_model|n_embd|emb(edding)?_dim|embedding_size|.*put_(embedding_)?size": 32,
    r"word_embed_proj_dim|lru_width": 32,
    r".*(intermediate|ffn|feed_forward|inner|mlp).*|dim_ff|dff|d_ff|d_inner|mamba_d_ssm": 64,
    r".*rank|d_rel|router_hidden_size": 16,
    r"(mamba_|ssm_)?(d_state|state_size)": 8,
    r".*window(_size|_len)?|.*chunk_(size|length)|(index_)?block_size|local_attention|index_topk|rel_extent": 16,
    r"max_window_layers|first_k_dense_replace|.*num_dense_layers|num_kv_shared_layers|moe_layer_start_index": 1,
    r"(n|topk|num_expert)_group": 1,
}
"""Sizes of the small models, by patterns of their names in a configuration; the first pattern that matches counts."""

ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
INDEXER = {"n_heads": 16, "kv_heads": 1, "head_dim": 8, "budget": 16, "compress_ratio": 4}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": HYBRID,
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY, "sliding_attention": ROTARY}},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config.head_dim": 16, "vision_config.adapter_in_dim": 32, "vision_config.adapter_out_dim": 32, "audio_config.adapter_out_dim": 32},
    "dots3_note_text": {"head_dim": 16},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {"attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "qwen4_exp": {f"text_config.indexer_{name}": value for name, value in INDEXER.items()},
    "qwen4_exp_text": {f"indexer_{name}": value for name, value in INDEXER.items()},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # it rounds its heads up to 64 in all
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "hybrid_layer_ids": [1, 3]},
}
"""Values that the patterns get wrong, by type; names with a dot are those of a nested configuration."""


@dataclass
class Row:
    """What the sweep found about one type: a row of the table."""

    type: str
    result: str = ""  # agrees, refused, off, failed or not built
    way: str = ""  # how its responses were sampled
    packing: str = ""
    checkpointing: str = ""
    remark: str = ""
    errors: dict[str, float] = field(default_factory=dict)  # largest difference of each path from plain passes, in nats
    properties: dict[str, float | str] = field(default_factory=dict)  # of the model itself, if something is off or refused
    messages: list[str] = field(default_factory=list)  # rlzoo's warnings
    seconds: float = 0.0


class Prompts(Task):
    """Three prompts of uneven length; every second response is right."""

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """See `Task.train_problems`."""
        return [Problem(PROMPTS[index % len(PROMPTS)], "") for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """See `Task.held_out_problems`."""
        return [Problem(prompt, "") for prompt in PROMPTS[:count]]

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> Sequence[float | None]:
        return [float(index % 2) for index in range(len(responses))]


def shrunk(config: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with small sizes; of a list with one entry per layer, one entry of every kind remains."""
    depth = next((config[name] for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if config.get(name)), 0)
    lists = {name: values for name, values in config.items() if isinstance(values, list | tuple) and 1 < len(values) == depth}
    by_layer = {int(layer): values for layer, values in (config.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(repr([[values[layer] for values in lists.values()], by_layer.get(layer)]), layer)
    layers = [list(kinds.values())[number % min(len(kinds), LAYERS)] for number in range(LAYERS)] if kinds else []
    small: dict[str, Any] = {}
    for name, value in config.items():
        if name == "per_layer_config" and by_layer:
            chosen = {number: by_layer[layer] for number, layer in enumerate(layers) if layer in by_layer}
            small[name] = {f"{number:02d}": shrunk(values, {}) for number, values in chosen.items()}
        elif name in lists:
            small[name] = [_small(name, lists[name][layer]) for layer in layers]
        elif isinstance(value, Mapping) and name not in ("id2label", "label2id"):
            nested = {key.split(".", 1)[1]: entry for key, entry in special.items() if key.startswith(f"{name}.")}
            small[name] = shrunk(value, nested)
        else:
            small[name] = _small(name, value)
    if config.get("num_key_value_heads") == config.get("num_attention_heads") is not None:
        small["num_key_value_heads"] = small["num_attention_heads"]
    for name in ("head_dim", "num_key_value_heads"):
        if name in config and config[name] is None:
            small[name] = _small(name, 99)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1} if "vocab_size" in config else {}
    return small | ids | {name: value for name, value in special.items() if "." not in name}


def _small(name: str, value: Any) -> Any:
    if name in ("initializer_range", "init_std"):
        return 0.2
    if type(value) is not int or value <= 1 or name.endswith(("token_id", "token_index")):
        return value
    return next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), value)


def build(kind: str, folder: Path) -> None:
    """Save a small random model of a type with a tokenizer of single characters, which has no begin token."""
    torch.manual_seed(0)
    known = CONFIG_MAPPING[kind]
    settings = shrunk(known().to_dict(), SPECIAL.get(kind, {}))
    for name in ("architectures", "dtype", "transformers_version", "model_type"):
        settings.pop(name, None)
    config = known.from_dict(settings)
    with torch.device("meta"):
        sizes = {name: weight.numel() for name, weight in AutoModelForCausalLM.from_config(config).named_parameters()}
    if sum(sizes.values()) > 2**23:
        raise ValueError(f"{sum(sizes.values())} weights; the largest is {max(sizes, key=sizes.__getitem__)}")
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            _enlarge(weight)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


def _enlarge(weight: Tensor) -> None:
    """Make the weights large and different enough that a wrong position or mask shows."""
    if not weight.is_floating_point() or weight.numel() < 2:
        return
    spread = float(weight.std())
    if weight.dim() >= 2 and 0 < spread < 0.2:
        weight.mul_(0.2 / spread)
    elif spread == 0:
        weight.add_(0.2 * torch.randn_like(weight))
    if weight.dim() == 2:
        empty = (weight == 0).all(dim=1)  # the row of the padding token
        weight[empty] = 0.2 * torch.randn_like(weight[empty])


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, and ``VOCABULARY`` tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = [*string.printable[:95], *map(chr, range(0xC0, 0x100))]
    words = ["<pad>", "<eos>", "<unk>", *characters][:VOCABULARY]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class Plain:
    """A copy of a model that only transformers loads, for passes that involve no code of rlzoo."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, **options: str) -> None:
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()

    @torch.no_grad()
    def log_probs(self, *rows: Sequence[int], **inputs: Tensor) -> Tensor:
        """Return the log-probs ``(R, S, V)`` of rows of equal length."""
        logits: Tensor = self.model(input_ids=torch.tensor(rows), use_cache=False, **inputs).logits
        return logits.log_softmax(-1)

    def of(self, row: Sequence[int], start: int) -> Tensor:
        """Return the log-probs of a row's tokens from ``start`` on."""
        return self.log_probs(row)[0, start - 1 : -1].gather(-1, torch.tensor(row[start:])[:, None])[:, 0]

    def properties(self) -> Iterator[tuple[str, float | str]]:
        """Yield how much the log-probs of a row change with what they should not depend on; or why this cannot be asked."""
        random = torch.Generator().manual_seed(1)
        short, long = (torch.randint(3, 98, (size,), generator=random).tolist() for size in (21, 84))
        mate = torch.randint(3, 98, (21,), generator=random).tolist()
        alone, other = self.log_probs(short)[0], self.log_probs(long)[0]
        size, pads = len(short), [0] * (len(long) - len(short))
        positions = torch.arange(len(long))
        left = torch.tensor([0] * len(pads) + [1] * size)[None]

        def generated() -> Tensor:
            asked = GenerationConfig(
                max_new_tokens=20, min_new_tokens=20, pad_token_id=0, output_logits=True, return_dict_in_generate=True
            )
            with torch.no_grad():
                given = self.model.generate(torch.tensor([short]), generation_config=asked)
            row = given.sequences[0].tolist()
            return (torch.cat(given.logits).log_softmax(-1) - self.log_probs(row)[0, size - 1 : -1]).abs().max()

        def packed() -> Tensor:
            both = torch.cat([torch.arange(len(long)), torch.arange(size)])[None]
            return (self.log_probs([*long, *short], position_ids=both)[0, len(long) :] - alone).abs().max()

        def trained() -> Tensor:
            self.model.train()
            for module in self.model.modules():
                for name in [name for name in vars(module) if "drop" in name and "layerdrop" not in name]:
                    if isinstance(getattr(module, name), float):
                        setattr(module, name, 0.0)
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            return (self.log_probs(short)[0] - self.log_probs(short)[0]).abs().max()

        def padded_left() -> Tensor:
            given = {"attention_mask": left, "position_ids": (left.cumsum(1) - 1).clamp(min=0)}
            return (self.log_probs(pads + short, **given)[0, len(pads) :] - alone).abs().max()

        questions: dict[str, Callable[[], Tensor]] = {
            "visible padding": lambda: (self.log_probs(pads + short)[0, len(pads) :] - alone).abs().max(),
            "later token": lambda: (self.log_probs([*short[:-1], 7])[0, :-1] - alone[:-1]).abs().max(),
            "longer row": lambda: (self.log_probs(long[:50])[0] - other[:50]).abs().max(),
            "twice": lambda: (self.log_probs(short)[0] - alone).abs().max(),
            "after a longer row": lambda: (self.log_probs(long)[0] - other).abs().max() + (self.log_probs(short)[0] - alone).abs().max(),
            "other rows": lambda: (self.log_probs(short, mate)[0] - alone).abs().max(),
            "right padding": lambda: (self.log_probs(short + pads, long)[0, :size] - alone).abs().max(),
            "left padding": padded_left,
            "positions given": lambda: (self.log_probs(short, position_ids=positions[None, :size])[0] - alone).abs().max(),
            "generate alone": generated,
            "packed": packed,
            "training mode": trained,
        }
        questions["rounding"] = lambda: (Plain(self.folder, torch.float64, experts_implementation="eager").log_probs(long)[0] - other).abs().max()
        for name, question in questions.items():
            try:
                yield name, round(float(question()), 6)
            except Exception as error:
                yield name, one_line(error)


CONFIRMED_BY = {
    r"causal|later token|future": ("later token", "longer row"),
    r"pack": ("packed",),
    r"random|twice|repeat|training mode": ("twice", "training mode"),
    r"longer": ("after a longer row", "left padding", "right padding"),
    r"generate|sampl|cache": ("generate alone", "left padding"),
    r"pad|rows|batch": ("left padding", "right padding", "other rows", "after a longer row"),
}
"""Properties that confirm a refusal, by words of its message; the first pattern that matches counts."""


def confirmed(message: str, properties: Mapping[str, float | str]) -> str:
    """Return whether plain passes show the property that a refusal names, and how much."""
    for pattern, names in CONFIRMED_BY.items():
        if re.search(pattern, message):
            for name in names:
                value = properties[name]
                if isinstance(value, str) or value > TOLERANCE or value != value:
                    return f"confirmed: {name} {value if isinstance(value, str) else f'{value:.2g} nats'}"
    return "NOT confirmed"


def ask(kind: str, folder: Path) -> Row:
    """Build a model of a type, and compare every path through rlzoo with plain passes."""
    row, model = Row(kind), folder / "model"
    try:
        build(kind, model)
        plain = Plain(model)
        plain.log_probs(range(3, 87))
    except Exception as error:
        row.result, row.remark = "not built", one_line(error)
        return row
    batch: Batch | None = None
    truth: list[Tensor] = []
    for mode, setting in {"": "", "checkpointing": "gradient_checkpointing", "packing": "packing"}.items():
        answer = "yes"
        with heard(row.messages) as messages:
            try:
                config = configured(model, folder / f"run{mode}", *([f"learner.{setting}=true"] if setting else []))
                run = opened(config)
                if batch is None:
                    row.way = str(getattr(run.rollouts.sampler, "way", ""))
                    batch = collate(run.sample(1).groups)
                    starts = batch.prompt_lengths.tolist()
                    truth = [plain.of(ids.tolist(), start) for ids, start in zip(batch.sequences, starts, strict=True)]
                    row.errors["sampler"] = difference(batch.rollout_log_probs, truth)
                row.errors[f"learner {mode}".strip()] = off = difference(run.learner.log_probs(batch), truth)
                scored = run.learner.score(batch)
                (update,) = run.learner.update(scored)[1]
                step = torch.zeros_like(batch.rollout_log_probs).index_copy(0, update.rows, update.log_probs)
                row.errors[f"update {mode}".strip()] = off = max(off, difference(step, truth))
                answer = "yes" if off <= TOLERANCE else f"off by {off:.2g}"
            except UserError as error:
                answer = f"no ({error})"
            except Exception as error:
                answer = f"failed ({one_line(error)})"
        if not mode and answer[:2] in ("no", "fa"):
            row.result, row.remark = ("refused" if answer[:2] == "no" else "failed"), answer.split(" ", 1)[1].strip("()")
            break
        switched = [message for message in messages if mode and mode in message]
        if mode:
            setattr(row, mode, f"no ({switched[0]})" if switched and answer == "yes" else answer)
    wrong = {path: error for path, error in row.errors.items() if not error <= TOLERANCE}
    if not row.result:
        row.result = "off" if wrong else "agrees"
        row.remark = ", ".join(f"{path} {error:.2g}" for path, error in wrong.items())
    row.properties = dict(plain.properties())
    if row.result == "refused":
        row.remark += f" [{confirmed(row.remark, row.properties)}]"
    for mode in ("packing", "checkpointing"):
        answer = getattr(row, mode)
        if answer.startswith("no"):
            setattr(row, mode, f"{answer} [{confirmed(answer, row.properties)}]")
    return row


def opened(config: RunConfig) -> Run:
    """Open a run as ``rlzoo train`` does."""
    return Run(config, config.task)


def configured(model: Path, output: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run of one step."""
    settings = [
        f"model.path={model}",
        "task.name=examples.lab.models:Prompts",
        f"rollout.num_prompts={len(PROMPTS)}",
        "rollout.group_size=2",
        f"rollout.max_new_tokens={NEW_TOKENS}",
        "learner.num_minibatches=1",
        "eval.num_problems=0",
        "tracking.mlflow=false",
        *overrides,
    ]
    return RunConfig.compose(clip="grpo", overrides=settings, steps=1, output=output)


def difference(log_probs: Tensor, truth: Sequence[Tensor]) -> float:
    """Return the largest difference of log-probs ``(B, T)`` from plain passes of each row."""
    pairs = zip(log_probs, truth, strict=True)
    return max(float((ours[: len(theirs)] - theirs).abs().max().nan_to_num(torch.inf)) for ours, theirs in pairs)


@contextmanager
def heard(messages: list[str]) -> Iterator[list[str]]:
    """Collect rlzoo's warnings of the block, and add them to ``messages``."""
    new: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: new.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rlzoo")
    logger.addHandler(handler)
    try:
        yield new
    finally:
        logger.removeHandler(handler)
        messages += [message for message in new if message not in messages]


def one_line(error: Exception) -> str:
    """Return an error as one line, with the place that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text} at {Path(place.filename).name}:{place.lineno}"


def _answer(kind: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        pipe.send(ask(kind, Path(folder)))


def sweep(kinds: Sequence[str], *, jobs: int, seconds: float) -> Iterator[Row]:
    """Ask about types, each in a process of its own; yield rows as they are ready."""
    context = multiprocessing.get_context("fork")
    import_module("transformers.models.llama.modeling_llama")  # once, before the forks
    import_module("accelerate")
    configured(Path(), Path())
    waiting, open_ = list(kinds)[::-1], dict[Any, tuple[str, Any, float]]()
    while waiting or open_:
        while waiting and len(open_) < jobs:
            kind = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(kind, theirs))
            process.start()
            theirs.close()
            open_[ours] = kind, process, time.monotonic()
        ready = wait(list(open_), timeout=1)
        for pipe, (kind, process, started) in list(open_.items()):
            duration = time.monotonic() - started
            if pipe not in ready and duration < seconds:
                continue
            try:
                row = pipe.recv() if pipe in ready else Row(kind, "failed", remark=f"no answer after {seconds:g} s")
            except EOFError:
                process.join()
                row = Row(kind, "failed", remark=f"the process ended with exit code {process.exitcode}")
            row.seconds = round(duration, 1)
            process.kill()
            process.join()
            del open_[pipe]
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="types of models; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes at once")
    parser.add_argument("--seconds", type=float, default=60, help="time limit of one type")
    parser.add_argument("--json", type=Path, help="file for all figures")
    given = parser.parse_args()
    rows = []
    for row in sweep(given.types or TYPES, jobs=given.jobs, seconds=given.seconds):
        rows.append(row)
        print(f"{row.type:26} {row.result:9} {row.way:8} {row.seconds:5.1f} s  gc {row.checkpointing[:60]}  packing {row.packing[:60]}  {row.remark[:300]}", flush=True)
        if given.json:
            given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    sys.modules["examples.lab.models"] = sys.modules["__main__"]
    main()
