"""rlzoo: a configurable zoo of reinforcement-learning rules for language models.

Public names are imported on first use, so that ``rlzoo --help`` does not have to import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlzoo.config.run_config import RunConfig as RunConfig
    from rlzoo.core import ops as ops
    from rlzoo.core.advantages import Advantage as Advantage
    from rlzoo.core.advantages import AdvantageEstimator as AdvantageEstimator
    from rlzoo.core.advantages import AdvantageInputs as AdvantageInputs
    from rlzoo.core.corrections import Correction as Correction
    from rlzoo.core.corrections import CorrectionInputs as CorrectionInputs
    from rlzoo.core.errors import UserError as UserError
    from rlzoo.core.hookspecs import hookimpl as hookimpl
    from rlzoo.core.policy import ClipPolicy as ClipPolicy
    from rlzoo.core.policy import ClipStats as ClipStats
    from rlzoo.core.policy import Width as Width
    from rlzoo.core.reductions import Reduction as Reduction
    from rlzoo.core.types import ClipBand as ClipBand
    from rlzoo.core.types import ClipInputs as ClipInputs
    from rlzoo.core.types import ClipResult as ClipResult
    from rlzoo.core.zoo import load_zoo as load_zoo
    from rlzoo.lab.compare import compare as compare
    from rlzoo.lab.evaluation import evaluate as evaluate
    from rlzoo.lab.study import replay as replay
    from rlzoo.training.train import train as train

_NAMES = {
    "rlzoo.cli.progress": ("train",),
    "rlzoo.config.run_config": ("RunConfig",),
    "rlzoo.core.advantages": ("Advantage", "AdvantageEstimator", "AdvantageInputs"),
    "rlzoo.core.corrections": ("Correction", "CorrectionInputs"),
    "rlzoo.core.errors": ("UserError",),
    "rlzoo.core.hookspecs": ("hookimpl",),
    "rlzoo.core.ops": ("ops",),
    "rlzoo.core.policy": ("ClipPolicy", "ClipStats", "Width"),
    "rlzoo.core.reductions": ("Reduction",),
    "rlzoo.core.types": ("ClipBand", "ClipInputs", "ClipResult"),
    "rlzoo.core.zoo": ("load_zoo",),
    "rlzoo.lab.compare": ("compare",),
    "rlzoo.lab.evaluation": ("evaluate",),
    "rlzoo.lab.study": ("replay",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "Advantage", "AdvantageEstimator", "AdvantageInputs", "ClipBand", "ClipInputs", "ClipPolicy", "ClipResult", "ClipStats",
    "Correction", "CorrectionInputs", "Reduction", "RunConfig", "UserError", "Width", "compare", "evaluate", "hookimpl",
    "load_zoo", "ops", "replay", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlzoo' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if name == "ops" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
