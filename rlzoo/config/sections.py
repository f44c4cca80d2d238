"""The sections of a run's configuration, which define settings and their bounds but no behaviour."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rlzoo.config.engines import known_engine
from rlzoo.core.advantages import AdvantageEstimator
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.reductions import KLEstimator
from rlzoo.core.settings import NameOrPath, Settings


class ModelConfig(Settings):
    """The language model to train."""

    path: NameOrPath = Field(
        "embedded",
        description="'embedded', 'embedded-guess', 'smollm2', a GGUF file, a folder, or a name on the Hugging Face hub",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="data type of the trained weights")
    attn_implementation: str | None = Field(
        None, description="attention implementation in transformers, such as 'eager'; null: transformers' default"
    )
    chat_template: bool = Field(False, description="wrap prompts in the tokenizer's chat template")
    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the model; enable this only for a model whose files you have read"
    )
    reference: NameOrPath | None = Field(None, description="reference model with the same tokenizer; null: the starting model")
    reference_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="data type of the weights of model.reference; null: the data type in its files"
    )
    reference_offload: bool = Field(False, description="keep model.reference in CPU memory when it is not scoring responses")


class VLLMConfig(Settings):
    """Settings for vLLM when it is the sampler."""

    server: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]+/?$",
        description="URL of a running server, such as http://127.0.0.1:8000; null: run vLLM in the trainer's process",
    )
    sync_folder: NameOrPath | None = Field(
        None,
        description="folder for new weights that both trainer and server can access; null: a temporary folder, from which a "
        "server on another machine downloads them",
    )
    timeout: float = Field(600.0, gt=0, le=86400, description="maximum time for one reply from the server, in seconds")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="data type of vLLM's weights; null: the data type of the trained model"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="maximum number of tokens in prompt and response together; null: the model's limit"
    )
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1, description="in process: share of a GPU's memory for vLLM")
    sleep: bool = Field(True, description="in process on a GPU: free vLLM's memory while the learner works")
    in_flight: bool = Field(
        False,
        description="on a server, with rollout.max_staleness above 1: sample all queued batches at once, and update the "
        "weights during sampling, so that a single response may come from several versions of the weights",
    )
    enforce_eager: bool = Field(False, description="disable CUDA graphs, so that vLLM starts sooner but samples more slowly")


class RolloutConfig(Settings):
    """Settings for sampling responses."""

    engine: Annotated[str, AfterValidator(known_engine)] = Field(
        "hf",
        description="the sampler: rlzoo's decoding of the transformers model (hf), the model's generate method, or vLLM; "
        "recorded: take batches from rollout.recorded instead, and sample only evaluations, as hf does",
    )
    recorded: NameOrPath | None = Field(
        None, description="run directory, rollout file or folder of rollout files to train on, with rollout.engine=recorded"
    )
    recorded_epochs: int = Field(1, ge=1, le=1_000_000, description="maximum number of passes over the recorded steps")
    num_prompts: int = Field(16, ge=1, le=65536, description="prompts per step")
    group_size: int = Field(8, ge=1, le=4096, description="responses per prompt")
    max_new_tokens: int = Field(
        256, ge=1, le=1_000_000, description="maximum number of tokens that the model generates in a response, across all turns"
    )
    max_turns: int = Field(
        8, ge=1, le=1000, description="maximum number of model turns in an episode, for a task with an environment"
    )
    max_turn_tokens: int | None = Field(None, ge=1, description="maximum number of tokens in a turn; null: max_new_tokens")
    max_observation_tokens: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="maximum number of tokens that an environment writes between two turns; if it writes more, the "
        "episode fails",
    )
    temperature: float = Field(
        1.0, gt=0, le=10, description="sampling temperature, which also applies to the model's log-probs"
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample only from the most probable tokens that together have this probability; the model's log-probs "
        "are renormalized over the same tokens",
    )
    top_k: int | None = Field(
        None, ge=1, le=2**31 - 1, description="sample only from this many of the most probable tokens; null: no limit"
    )
    batch_size: int = Field(256, ge=1, le=65536, description="number of responses to sample at once")
    graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="with rollout.engine=hf: decode in CUDA graphs, so that a GPU seldom waits for the host; "
        "auto: on a GPU, for Llama-like models; on: require graphs (on a CPU, decoding takes the same steps without graphs)",
    )
    dynamic_sampling: int = Field(
        0, ge=0, le=1000, description="maximum number of extra sampling rounds that replace groups whose rewards are all equal"
    )
    band: tuple[float, float] | None = Field(
        None,
        description="prefer training problems whose mean reward, measured when they were last sampled, lies between these two "
        "values, such as [0.2,0.8]; if there are too few, the nearest are added; null: all problems in turn",
    )
    measure_every: int = Field(
        100, ge=1, description="with rollout.band: number of steps after which a problem is preferred again, at any mean reward"
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=1000,
        description="number of batches that are sampled ahead while the learner works: the batch of a step is sampled with "
        "the weights from this many steps earlier; 0: none",
    )
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description="how vLLM is run")


class RewardConfig(Settings):
    """Settings for rewarding responses."""

    overlong_buffer: float = Field(
        0.0, ge=0, le=1, description="final share of max_new_tokens over which a length penalty grows"
    )
    overlong_penalty: float = Field(
        1.0, ge=0, le=1e6, description="length penalty at max_new_tokens, subtracted from the reward"
    )
    overlong_filtering: bool = Field(False, description="give responses that are cut off at max_new_tokens an advantage of 0")
    kl_coef: float = Field(0.0, ge=0, le=100, description="weight of the per-token KL to the reference model in the reward")
    weights: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(
        default_factory=dict, description="weights of named rewards, by name; 1 for a name that is not listed"
    )
    max_failed: float = Field(
        0.5,
        ge=0,
        le=1,
        description="maximum share of responses whose grading may fail; they have no grade and advantage 0; if more fail, "
        "the run ends",
    )


def _patterns(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
    return values


class LoraConfig(Settings):
    """Settings for training a low-rank update with PEFT instead of all weights (arXiv 2106.09685)."""

    rank: int = Field(0, ge=0, le=4096, description="rank of the update; 0: train all weights")
    alpha: float | None = Field(None, gt=0, description="scale of the update, multiplied by its rank; null: twice the rank")
    target: Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)] = Field(
        ("all-linear",),
        min_length=1,
        description="modules to adapt: names such as q_proj, one regular expression for whole names, or 'all-linear'",
    )


class LearnerConfig(Settings):
    """Settings for updating the model."""

    lr: float = Field(1e-6, gt=0, le=1, description="AdamW's learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning rate after warm-up: constant, or linear or cosine decay"
    )
    warmup_updates: int = Field(
        0, ge=0, description="number of updates in the linear warm-up, the last of which has the full learning rate"
    )
    weight_decay: float = Field(0.0, ge=0, le=1, description="AdamW's decoupled weight decay")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decay rates")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="maximum gradient norm, above which gradients are scaled down; null: no limit"
    )
    max_nonfinite: int = Field(
        10,
        ge=1,
        description="number of consecutive updates with non-finite gradients after which the run ends; these updates "
        "are skipped",
    )
    rollback_above: float | None = Field(
        None,
        ge=1,
        description="return to the weights of the newest periodic checkpoint after a step whose gradient norm exceeds this "
        "multiple of the median over the last 50 steps; null: never",
    )
    num_minibatches: int = Field(4, ge=1, le=65536, description="optimizer steps per pass over a rollout batch")
    minibatch_by: Literal["responses", "prompts"] | None = Field(
        None,
        description="unit from which minibatches are drawn: single responses, or all responses to a prompt; null: prompts for "
        "a rule that compares the responses to a prompt and for clip.reduction=prompt_mean, otherwise responses",
    )
    ignore_equal_groups: bool = Field(
        False,
        description="leave groups with equal rewards out of the minibatches, and so out of all means",
    )
    num_epochs: int = Field(1, ge=1, le=1000, description="number of passes over a rollout batch")
    max_tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        description="maximum number of tokens in a forward pass, including padding (rows x longest row); null: 16384 on a GPU, "
        "512 to 3072 on a CPU",
    )
    autocast: Literal["none", "bfloat16"] = Field("none", description="data type of matrix products")
    tf32: bool = Field(False, description="on a GPU, compute float32 matrix products in TF32, which keeps 10 mantissa bits")
    kl_coef: float = Field(0.0, ge=0, le=100, description="weight of the KL to the reference model in the loss; 0: none")
    kl_estimator: KLEstimator = Field("k3", description="estimator of the per-token KL")
    entropy_coef: float = Field(0.0, ge=0, le=100, description="weight of the entropy bonus in the objective; 0: none")
    master_weights: bool = Field(
        True, description="apply optimizer steps to float32 copies of bfloat16 weights; DeepSpeed always does"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass, to save memory")
    packing: bool = Field(False, description="concatenate the rows of a micro-batch into one row without padding")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="low-rank update")


class CriticConfig(Settings):
    """Settings of the critic for an advantage estimator that needs values, such as gae. The learner's settings also apply."""

    model: NameOrPath | None = Field(
        None,
        description="model that the critic starts from, with the same tokenizer, or the folder of a saved critic; null: the "
        "starting model",
    )
    lr: float = Field(5e-6, gt=0, le=1, description="the critic's learning rate; learner.schedule and its warm-up apply")
    updates: int = Field(1, ge=1, le=100, description="number of critic updates on each minibatch, before the model's update")
    warmup_steps: int = Field(0, ge=0, description="number of initial steps in which only the critic learns")
    value_clip: float | None = Field(
        0.2,
        gt=0,
        description="largest change of a value in a step that still lowers the loss; null: no limit",
    )
    max_grad_norm: float | None = Field(1.0, gt=0, description="maximum gradient norm of the critic; null: no limit")
    frozen: Annotated[tuple[str, ...], AfterValidator(_patterns)] = Field(
        (), description="regular expressions, such as 'attn'; parameters whose names contain a match are not trained"
    )


def needs_reference(learner: LearnerConfig, reward: RewardConfig, *readers: ClipPolicy | AdvantageEstimator) -> bool:
    """Whether the loss, the reward, the rule or the estimator needs the log-probs of the reference model."""
    return learner.kl_coef > 0 or reward.kl_coef > 0 or any("ref_log_probs" in reader.needs for reader in readers)


def minibatches_by_prompts(learner: LearnerConfig, clip: ClipPolicy) -> bool:
    """Whether all responses to a prompt share a minibatch."""
    return learner.minibatch_by == "prompts" or (learner.minibatch_by is None and clip.needs_whole_prompts)


class LaunchConfig(Settings):
    """The number of processes in a run, and the sharding of the model's states across them."""

    processes: int | None = Field(
        None, ge=1, le=65536, description="number of processes; null: one, or as many as a launcher started"
    )
    deepspeed: NameOrPath | None = Field(None, description="'zero2', 'zero3', or a DeepSpeed configuration file")
    fsdp: bool = Field(
        False,
        description="shard weights, gradients and optimizer states with PyTorch's FSDP2; cannot be combined with DeepSpeed",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none", description="states to keep in CPU memory: the optimizer states or, with ZeRO-3, also the parameters"
    )


class EvalConfig(Settings):
    """Settings for held-out evaluation, which measures the mean reward of sampled responses."""

    num_problems: int = Field(0, ge=0, le=1_000_000, description="number of held-out problems; 0: no evaluation")
    num_samples: int = Field(1, ge=1, le=65536, description="sampled responses per problem")
    every: int = Field(
        0, ge=0, description="steps between evaluations; the model is also evaluated before and after training; 0: only then"
    )
    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature")


class CheckpointConfig(Settings):
    """Settings for saving the model."""

    every: int = Field(
        10,
        ge=0,
        description="steps between checkpoints; step 0 and the last step always have one; 0: only these two",
    )
    keep: int = Field(2, ge=1, description="number of checkpoints to keep, in addition to the one with the best evaluation")


class TrackingConfig(Settings):
    """Settings for logging to MLflow."""

    mlflow: bool = Field(True, description="track the run in MLflow; metrics.jsonl is written either way")
    experiment: str = Field(
        "rlzoo", min_length=1, description="MLflow experiment; MLFLOW_EXPERIMENT_ID and MLFLOW_EXPERIMENT_NAME override it"
    )
    figure_every: int = Field(
        10,
        ge=0,
        description="steps between logged pages of completions; the last step always has one; 0: only for the last step",
    )
    completions: int = Field(4, ge=0, description="number of prompts on each page of completions; 0: no pages")
