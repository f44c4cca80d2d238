"""rlzoo: a configurable zoo of reinforcement-learning rules for language models.

Public names are imported on first use, so that ``rlzoo --help`` does not have to import torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from rlzoo.support.redaction import RedactingFilter

if TYPE_CHECKING:
    from rlzoo import ops as ops
    from rlzoo.advantages import Advantage as Advantage
    from rlzoo.advantages import AdvantageEstimator as AdvantageEstimator
    from rlzoo.advantages import AdvantageInputs as AdvantageInputs
    from rlzoo.config.run_config import RunConfig as RunConfig
    from rlzoo.corrections import Correction as Correction
    from rlzoo.corrections import CorrectionInputs as CorrectionInputs
    from rlzoo.errors import UserError as UserError
    from rlzoo.hookspecs import hookimpl as hookimpl
    from rlzoo.policy import ClipPolicy as ClipPolicy
    from rlzoo.policy import ClipStats as ClipStats
    from rlzoo.policy import Width as Width
    from rlzoo.reductions import Reduction as Reduction
    from rlzoo.training.train import train as train
    from rlzoo.types import ClipBand as ClipBand
    from rlzoo.types import ClipInputs as ClipInputs
    from rlzoo.types import ClipResult as ClipResult
    from rlzoo.zoo import load_zoo as load_zoo

_HOMES = {
    "Advantage": "rlzoo.advantages",
    "AdvantageEstimator": "rlzoo.advantages",
    "AdvantageInputs": "rlzoo.advantages",
    "ClipBand": "rlzoo.types",
    "ClipInputs": "rlzoo.types",
    "ClipPolicy": "rlzoo.policy",
    "ClipResult": "rlzoo.types",
    "ClipStats": "rlzoo.policy",
    "Correction": "rlzoo.corrections",
    "CorrectionInputs": "rlzoo.corrections",
    "Reduction": "rlzoo.reductions",
    "RunConfig": "rlzoo.config.run_config",
    "UserError": "rlzoo.errors",
    "Width": "rlzoo.policy",
    "hookimpl": "rlzoo.hookspecs",
    "load_zoo": "rlzoo.zoo",
    "ops": "rlzoo.ops",
    "train": "rlzoo.training.train",
}

__all__ = [
    "Advantage", "AdvantageEstimator", "AdvantageInputs", "ClipBand", "ClipInputs", "ClipPolicy", "ClipResult", "ClipStats",
    "Correction", "CorrectionInputs", "Reduction", "RunConfig", "UserError", "Width", "hookimpl", "load_zoo", "ops", "train",
]  # fmt: skip

logging.getLogger("rlzoo").addFilter(RedactingFilter())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlzoo' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if name == "ops" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
