"""The sections of a run's configuration: plain settings with bounds, no behaviour."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rlzoo.reductions import KLEstimator


class Section(BaseModel):
    """A part of the configuration: immutable, and it refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    """Which language model is trained."""

    path: str = Field("embedded", description="'embedded', 'smollm2', a folder, or a name on the Hugging Face hub")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type of the trained weights")
    attn_implementation: str | None = Field(
        None, description="transformers' attention, such as 'eager'; null for its own choice"
    )
    chat_template: bool = Field(False, description="wrap prompts in the tokenizer's chat template")


class RolloutConfig(Section):
    """How responses are sampled."""

    num_prompts: int = Field(16, ge=1, le=65536, description="prompts per step")
    group_size: int = Field(8, ge=1, le=4096, description="responses per prompt")
    max_new_tokens: int = Field(256, ge=1, le=1_000_000, description="length limit of a response, in tokens")
    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature; the policy's log-probs use it too")
    batch_size: int = Field(256, ge=1, le=65536, description="responses sampled at once")
    dynamic_sampling: int = Field(0, ge=0, le=1000, description="extra rounds at most, to replace groups of equal rewards")


class RewardConfig(Section):
    """How a response's grade becomes what is learned from."""

    overlong_buffer: float = Field(0.0, ge=0, le=1, description="share of max_new_tokens, at its end, with a growing penalty")
    overlong_penalty: float = Field(1.0, ge=0, le=1e6, description="that penalty at max_new_tokens, taken off the reward")
    overlong_filtering: bool = Field(False, description="responses cut off at max_new_tokens get advantage 0")
    kl_coef: float = Field(0.0, ge=0, le=100, description="weight of each token's KL to the starting model, in the reward")


class LearnerConfig(Section):
    """How the model is updated."""

    lr: float = Field(1e-6, gt=0, le=1, description="AdamW's learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after warm-up")
    warmup_updates: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    weight_decay: float = Field(0.0, ge=0, le=1, description="AdamW's decoupled weight decay")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decay rates")
    max_grad_norm: float | None = Field(1.0, gt=0, description="gradient-norm clipping; null for none")
    num_minibatches: int = Field(4, ge=1, le=65536, description="optimizer steps per pass over a rollout batch")
    num_epochs: int = Field(1, ge=1, le=1000, description="passes over a rollout batch")
    max_tokens_per_micro_batch: int = Field(16384, ge=1, description="rows x longest row of one forward pass, at most")
    autocast: Literal["none", "bfloat16"] = Field("none", description="type of the matrix products")
    kl_coef: float = Field(0.0, ge=0, le=100, description="weight of the KL to the starting model in the loss; 0 for none")
    kl_estimator: KLEstimator = Field("k3", description="estimator of that KL per token")


class EvalConfig(Section):
    """Held-out evaluation: the mean reward of sampled responses."""

    num_problems: int = Field(0, ge=0, le=1_000_000, description="held-out problems; 0 for none")
    num_samples: int = Field(1, ge=1, le=65536, description="sampled responses per problem")
    every: int = Field(0, ge=0, description="steps between evaluations, beside the first and the last; 0 for only those")
    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature")


class CheckpointConfig(Section):
    """When the model is saved."""

    every: int = Field(0, ge=0, description="steps between checkpoints; 0 for only the last")
    keep: int = Field(2, ge=1, description="checkpoints kept")
    keep_for_replay: int = Field(0, ge=0, description="steps between those that keep the weights before each update; 0: none")


class TrackingConfig(Section):
    """What MLflow is told."""

    mlflow: bool = Field(True, description="track the run in MLflow; metrics.jsonl is written either way")
    experiment: str = Field("rlzoo", min_length=1, description="MLflow experiment (MLFLOW_EXPERIMENT_NAME overrides)")
    figure_every: int = Field(
        10, ge=0, description="steps between figures of the clip fraction by length, beside the last; 0: only it"
    )
    completions: int = Field(4, ge=0, description="sampled completions logged per step")
