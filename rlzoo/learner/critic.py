"""The critic, a language model whose value head predicts the rewards that follow each token of a response."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from rlzoo.config.sections import CriticConfig, LearnerConfig, LoraConfig
from rlzoo.core.errors import RunError, UserError
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import MicroBatches
from rlzoo.learner.optimization import freeze_unused, make_optimization, named_weights
from rlzoo.learner.row_check import check_rows
from rlzoo.learner.values import ResponseValues, value_loss
from rlzoo.models.adapters import prepare_for_training
from rlzoo.models.pretrained import naming, save_model

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlzoo.learner.batch import AdvantageBatch, Batch
    from rlzoo.models.probe import Probe

HEAD = "value_head.safetensors"
"""Name of the file that holds the value head in a critic's folder, next to the files of its language model."""


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """One optimizer step of the critic."""

    loss: float
    grad_norm: float  # gradient norm before clipping
    nonfinite: bool  # whether no step was taken because the gradient was not finite


class Critic:
    """Owns the critic's network and optimizer, and distributes micro-batches among processes as the learner does.

    Args:
        language_model: the model that the critic starts from and modifies.
        config: settings of the critic.
        learner: settings of the learner, which apply if `config` does not override them. The critic never has an adapter.
        accelerator: connects the processes.
        probe: log-probs of the model for checking how the critic computes rows; None for no check.
        pad_id: ID of the padding token.
        fsdp: whether FSDP2 shards the weights, gradients and optimizer states.
        head: weights of the value head; None to start at 0.

    Raises:
        UserError: the model cannot be a critic; see `check_rows`, `freeze_unused` and `CriticConfig.frozen`.
    """

    def __init__(
        self,
        language_model: PreTrainedModel,
        config: CriticConfig,
        learner: LearnerConfig,
        accelerator: Accelerator,
        *,
        pad_id: int,
        probe: Probe | None = None,
        fsdp: bool = False,
        head: Mapping[str, Tensor] | None = None,
    ) -> None:
        settings = learner.model_copy(update={"lr": config.lr, "lora": LoraConfig()})
        self.config, self.accelerator, self.max_nonfinite = config, accelerator, learner.max_nonfinite
        self.updates: list[CriticUpdate] = []  # optimizer steps on the latest batch
        self.num_updates = 0  # number of updates in this process
        self.num_nonfinite = 0  # number of consecutive updates whose gradient was not finite
        self.micro_batches = MicroBatches(accelerator, language_model, settings, pad_id=pad_id)
        prepare_for_training(language_model, settings)
        self.module = ResponseValues(language_model)
        try:
            self.module.head.load_state_dict(head or self.module.head.state_dict())
        except RuntimeError as error:
            raise UserError(f"critic.model={config.model!r}: its {HEAD} does not fit the model: {error}") from error
        if probe is not None:
            plain = ResponseLogProbs(language_model)
            with naming("critic.model"):
                check_rows(self.micro_batches, plain, plain, settings, probe)
        names = [name for name, _ in language_model.named_parameters()]
        for pattern in config.frozen:
            if not (frozen := [name for name in names if re.search(pattern, name)]):
                raise UserError(f"critic.frozen: {pattern!r} matches no parameter; a parameter is called {names[-1]!r}")
            for name in frozen:
                language_model.get_parameter(name).requires_grad_(False)
        self.module.to(accelerator.device)
        freeze_unused(accelerator, self.module)
        self.optimization = make_optimization(accelerator, self.module, settings, fsdp=fsdp)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every current weight, unsharded, with its name in `module`. All processes must iterate over all weights."""
        return named_weights(self.module, self.optimization.rounded_to)

    def save(self, folder: Path) -> None:
        """Write the trained parameters and the optimizer's state to a subfolder."""
        (folder / "critic").mkdir(exist_ok=True)
        self.optimization.save(folder / "critic")

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote."""
        self.optimization.load(folder / "critic")

    def save_model(self, folder: Path, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the critic, from copies of its `weights`, as a separate model to which ``critic.model`` can refer."""
        own: dict[str, dict[str, Tensor]] = {"language_model": {}, "head": {}}
        for name, tensor in weights.items():
            part, _, rest = name.partition(".")
            own[part][rest] = tensor
        save_model(folder, self.module.language_model, own["language_model"], tokenizer)
        save_file(own["head"], folder / HEAD)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Tensor]:
        """Compute ``values`` ``(B, T)`` before each token that the model chose, and ``last_values`` ``(B, 1)``, on the CPU.

        Raises:
            RunError: a value is not finite.
        """
        # each row has one more position for the value after the last token, as if the model had chosen another token
        end = (torch.tensor(batch.sizes) - batch.prompt_lengths)[:, None]
        mask = pad(batch.response_mask, (0, 1)).scatter(1, end, True)
        longer = replace(batch, response_mask=mask, kept=None)
        scores = torch.zeros(mask.shape)
        for micro_batch in self.micro_batches.of(longer, torch.arange(len(batch))):
            values, _ = self.micro_batches.forward(self.optimization.model, longer, micro_batch.rows)
            if not micro_batch.is_idle:
                scores[micro_batch.rows] = values.float().cpu()
        scores = self.micro_batches.sum(scores)
        if number := int((~scores.isfinite()).sum()):
            raise RunError(f"the critic's values are not finite for {number} of {scores.numel()} tokens; lower critic.lr")
        return {"values": torch.where(batch.response_mask, scores[:, :-1], 0.0), "last_values": scores.gather(1, end)}

    def update(self, batch: AdvantageBatch, rows: Tensor, lr_factor: float = 1.0) -> None:
        """Take the critic's optimizer steps on one minibatch. Rows without a grade are ignored.

        Args:
            batch: batch with values and value targets.
            rows: ``(R,)`` rows of the minibatch, across all processes.
            lr_factor: learning rate, as a fraction of ``critic.lr``.

        Raises:
            RunError: the gradient was not finite in too many consecutive updates.
        """
        rows = rows[batch.graded[rows]]
        number = int(batch.response_mask[rows].sum())  # number of tokens across all micro-batches and processes
        if not number:
            return
        for group in self.optimization.optimizer.param_groups:
            group["lr"] = lr_factor * self.config.lr
        for _ in range(self.config.updates):
            loss = self.accumulate(batch, rows, number)
            norm, is_finite = self.optimization.apply(self.config.max_grad_norm)
            self.updates.append(CriticUpdate(loss, norm, not is_finite))
            self.num_updates += 1
            self.num_nonfinite = 0 if is_finite else self.num_nonfinite + 1
            if self.num_nonfinite >= self.max_nonfinite:
                raise RunError(
                    f"the critic's gradient was not finite in {self.num_nonfinite} consecutive updates "
                    "(learner.max_nonfinite); lower critic.lr, or check for infinite rewards"
                )

    def accumulate(self, batch: AdvantageBatch, rows: Tensor, number: int) -> float:
        """Accumulate the gradient of the mean loss over the ``number`` tokens of rows with a grade, and return the loss."""
        assert batch.values is not None, "the learner has scored the batch"
        assert batch.value_targets is not None, "the estimator needs values"
        micro_batches, total = self.micro_batches.of(batch, rows, learns=True), torch.zeros(())
        for index, micro_batch in enumerate(micro_batches):
            with self.optimization.micro_batch(index == len(micro_batches) - 1):
                values, _ = self.micro_batches.forward(self.optimization.model, batch, micro_batch.rows)
                tensors = (batch.values, batch.value_targets, batch.response_mask)
                old_values, targets, mask = (tensor[micro_batch.rows].to(values.device) for tensor in tensors)
                loss = value_loss(values, old_values, targets, mask, self.config.value_clip) / number
                self.optimization.backward(0.0 * loss if micro_batch.is_idle else loss)
                total += 0.0 if micro_batch.is_idle else loss.detach().cpu()
        return float(self.micro_batches.sum(total))
