"""Converts a data batch that SkyRL's own code has written to a rollout file.

Only the package's file that writes it is loaded, because the whole package needs Python 3.12.
"""

import importlib
import importlib.util
import sys
import types
import warnings

from rlzoo.integrations.dumps import read_dumps
from tests.integrations.test_dumps import ADVANTAGES, check_common, skyrl_batch


def test_the_data_batch_of_skyrl(tmp_path, monkeypatch):
    place = next(iter(importlib.util.find_spec("skyrl").submodule_search_locations))
    for name in ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils"):
        package = types.ModuleType(name)
        package.__path__ = [place.removesuffix("skyrl") + name.replace(".", "/")]  # without the imports of the package
        monkeypatch.setitem(sys.modules, name, package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("skyrl.backends.skyrl_train.training_batch")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "dumped_data").mkdir()
    skyrl_batch(module.TrainingInputBatch).save(tmp_path / "dumped_data" / "global_step_3_training_input.pkl")
    (step,) = read_dumps("skyrl", [tmp_path])
    check_common(step, 3)
    assert step.advantages.tolist() == ADVANTAGES
