"""rlzoo: a configurable zoo of reinforcement-learning rules for language models.

Public names are imported on first use, so that ``rlzoo --help`` does not have to import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlzoo.config.run_config import RunConfig
    from rlzoo.core import ops
    from rlzoo.core.advantages import Advantage, AdvantageEstimator, AdvantageInputs
    from rlzoo.core.corrections import Correction, CorrectionInputs
    from rlzoo.core.errors import UserError
    from rlzoo.core.hookspecs import hookimpl
    from rlzoo.core.policy import ClipPolicy, ClipStats, Width
    from rlzoo.core.reductions import Reduction
    from rlzoo.core.types import ClipBand, ClipInputs, ClipResult
    from rlzoo.core.zoo import load_zoo
    from rlzoo.lab.compare import compare
    from rlzoo.lab.evaluation import evaluate
    from rlzoo.lab.study import replay
    from rlzoo.training.train import train

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
