"""The sections of a run's configuration: plain settings with bounds, no behaviour."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rlzoo.policy import ClipPolicy
from rlzoo.reductions import KLEstimator


class Section(BaseModel):
    """A part of the configuration: immutable, and it refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    """Which language model is trained."""

    path: str = Field(
        "embedded", description="'embedded', 'embedded-guess', 'smollm2', a folder, or a name on the Hugging Face hub"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type of the trained weights")
    attn_implementation: str | None = Field(
        None, description="transformers' attention, such as 'eager'; null for its own choice"
    )
    chat_template: bool = Field(False, description="wrap prompts in the tokenizer's chat template")
    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the model; only for one whose files you have read"
    )


class VLLMConfig(Section):
    """How vLLM is run, where it is the sampler."""

    server: str | None = Field(
        None, pattern=r"^https?://[^/\s]+/?$", description="a running server, such as http://127.0.0.1:8000; null: in process"
    )
    sync_folder: str | None = Field(
        None, description="folder that trainer and server both see, for new weights; null: a temporary one, on one machine"
    )
    timeout: float = Field(600.0, gt=0, le=86400, description="seconds that the server may take for one answer")
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="type of its weights; null for the trained model's")
    max_model_len: int | None = Field(
        None, ge=1, description="longest prompt and response together, in tokens; null: the model's"
    )
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1, description="share of a GPU's memory for it, in process")
    sleep: bool = Field(True, description="in process on a GPU: give its memory back while the learner works")
    enforce_eager: bool = Field(False, description="without CUDA graphs: starts sooner, samples slower")


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: Literal["hf", "generate", "vllm"] = Field(
        "hf", description="what samples: the transformers model decoded row by row, its own generate, or vLLM"
    )

    num_prompts: int = Field(16, ge=1, le=65536, description="prompts per step")
    group_size: int = Field(8, ge=1, le=4096, description="responses per prompt")
    max_new_tokens: int = Field(
        256, ge=1, le=1_000_000, description="length limit of a response, in tokens of the model; of all turns together"
    )
    max_turns: int = Field(8, ge=1, le=1000, description="turns of the model in an episode, for a task that is played")
    max_turn_tokens: int | None = Field(
        None, ge=1, description="length limit of a turn, in tokens; null: that of the response, max_new_tokens"
    )
    max_observation_tokens: int = Field(
        1024, ge=1, le=1_000_000, description="tokens that an environment may write between two turns; more, and it has failed"
    )
    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature; the policy's log-probs use it too")
    batch_size: int = Field(256, ge=1, le=65536, description="responses sampled at once")
    dynamic_sampling: int = Field(0, ge=0, le=1000, description="extra rounds at most, to replace groups of equal rewards")
    max_staleness: int = Field(0, ge=0, le=1, description="1: the next batch is sampled while the learner works on this one")
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description="how vLLM is run")


class RewardConfig(Section):
    """How a response's grade becomes what is learned from."""

    overlong_buffer: float = Field(0.0, ge=0, le=1, description="share of max_new_tokens, at its end, with a growing penalty")
    overlong_penalty: float = Field(1.0, ge=0, le=1e6, description="that penalty at max_new_tokens, taken off the reward")
    overlong_filtering: bool = Field(False, description="responses cut off at max_new_tokens get advantage 0")
    kl_coef: float = Field(0.0, ge=0, le=100, description="weight of each token's KL to the starting model, in the reward")
    max_failed: float = Field(
        0.5, ge=0, le=1, description="share of responses whose grading may fail, each of them counted 0, before the run ends"
    )


class LoraConfig(Section):
    """A low-rank update instead of all weights (arXiv 2106.09685), through PEFT."""

    rank: int = Field(0, ge=0, le=4096, description="rank of the update; 0: all weights are trained")
    alpha: float | None = Field(None, gt=0, description="scale of the update times its rank; null for twice the rank")
    target: str = Field("all-linear", description="modules to adapt: PEFT's target_modules, one name or 'all-linear'")


class LearnerConfig(Section):
    """How the model is updated."""

    lr: float = Field(1e-6, gt=0, le=1, description="AdamW's learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after warm-up")
    warmup_updates: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    weight_decay: float = Field(0.0, ge=0, le=1, description="AdamW's decoupled weight decay")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decay rates")
    max_grad_norm: float | None = Field(1.0, gt=0, description="gradient-norm clipping; null for none")
    max_nonfinite: int = Field(
        10, ge=1, description="updates in a row without a finite gradient, each left out, that end the run"
    )
    rollback_above: float | None = Field(
        None,
        ge=1,
        description="after a step whose gradient norm is so many times the median of the last 50 steps, take the newest "
        "periodic checkpoint's weights again; null for never",
    )
    num_minibatches: int = Field(4, ge=1, le=65536, description="optimizer steps per pass over a rollout batch")
    minibatch_by: Literal["responses", "prompts"] | None = Field(
        None,
        description="what is drawn into a minibatch: single responses, or all responses to a prompt; null: prompts for a rule "
        "that compares the responses to a prompt, else responses",
    )
    num_epochs: int = Field(1, ge=1, le=1000, description="passes over a rollout batch")
    max_tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        description="rows x longest row of a forward pass, at most; null: 16384 on a GPU, 512 to 3072 on a processor",
    )
    autocast: Literal["none", "bfloat16"] = Field("none", description="type of the matrix products")
    kl_coef: float = Field(0.0, ge=0, le=100, description="weight of the KL to the starting model in the loss; 0 for none")
    kl_estimator: KLEstimator = Field("k3", description="estimator of that KL per token")
    entropy_coef: float = Field(0.0, ge=0, le=100, description="weight of the entropy bonus in the objective; 0 for none")
    optimizer: Literal["adamw", "adamw_8bit"] = Field("adamw", description="AdamW, or bitsandbytes' with 8-bit moments")
    master_weights: bool = Field(
        True, description="optimizer steps on float32 copies of bfloat16 weights; DeepSpeed always has such copies"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass, to save memory")
    packing: bool = Field(False, description="rows of a micro-batch end to end in one, without padding")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="train a low-rank update")


def needs_reference(learner: LearnerConfig, reward: RewardConfig, clip: ClipPolicy) -> bool:
    """Whether the run keeps the starting model, for a KL to it in the loss or in the reward, or for the rule."""
    return learner.kl_coef > 0 or reward.kl_coef > 0 or "ref_log_probs" in clip.needs


def minibatches_by_prompts(learner: LearnerConfig, clip: ClipPolicy) -> bool:
    """Whether the responses to a prompt share a minibatch."""
    return learner.minibatch_by == "prompts" or (learner.minibatch_by is None and "group_ids" in clip.needs)


class LaunchConfig(Section):
    """On how many processes a run is computed, and how the model's states are spread over them."""

    processes: int | None = Field(None, ge=1, le=65536, description="processes; null for one, or as many as a launcher started")
    deepspeed: str | None = Field(None, description="'zero2', 'zero3', or a file of DeepSpeed's settings")
    offload: Literal["none", "optimizer", "all"] = Field(
        "none", description="keep the optimizer's states, or with ZeRO-3 also the parameters, in the CPU's memory"
    )


class EvalConfig(Section):
    """Held-out evaluation: the mean reward of sampled responses."""

    num_problems: int = Field(0, ge=0, le=1_000_000, description="held-out problems; 0 for none")
    num_samples: int = Field(1, ge=1, le=65536, description="sampled responses per problem")
    every: int = Field(0, ge=0, description="steps between evaluations, beside the first and the last; 0 for only those")
    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature")


class CheckpointConfig(Section):
    """When the model is saved."""

    every: int = Field(
        10, ge=0, description="steps between checkpoints, beside those of step 0 and of the last step; 0 for only these"
    )
    keep: int = Field(2, ge=1, description="checkpoints kept, beside the one with the best evaluation")
    keep_for_replay: int = Field(0, ge=0, description="steps between those that keep the weights before each update; 0: none")


class TrackingConfig(Section):
    """What is logged to MLflow."""

    mlflow: bool = Field(True, description="track the run in MLflow; metrics.jsonl is written either way")
    experiment: str = Field("rlzoo", min_length=1, description="MLflow experiment (MLFLOW_EXPERIMENT_NAME overrides)")
    figure_every: int = Field(
        10, ge=0, description="steps between figures of the clip fraction by length, beside the last; 0: only it"
    )
    completions: int = Field(4, ge=0, description="sampled completions logged per step")
    metrics: Literal["curated", "all"] = Field(
        "curated", description="which metrics MLflow is sent, see docs/reference/metrics.md; metrics.jsonl keeps all of them"
    )
    machine_every: float = Field(
        10.0,
        ge=0,
        le=86400,
        description="seconds between samples of the machine's load: CPU, memory, disk, network, GPUs; 0: none",
    )
    max_model_mb: float = Field(
        100.0, ge=0, description="largest final model, in megabytes, of which MLflow gets a copy to load; 0: never"
    )
