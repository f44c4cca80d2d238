"""Logs the final checkpoint as an MLflow model that ``mlflow.transformers.load_model`` can load."""

from __future__ import annotations

import json
import re
import tempfile
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from rlzoo.journal.tracking.store import artifact_repository
from rlzoo.support.parsing import dump_yaml

TAG = "rlzoo_checkpoint"
REQUIRED = ("mlflow", "torch", "transformers", "tokenizers", "accelerate")
WEIGHTS = (".safetensors", ".safetensors.index.json")
NOT_ITS_FILES = ("manifest.json", "clip.json")


def final_checkpoint(directory: Path, step: int, max_mb: float) -> Path | None:
    """Return the checkpoint of the last step; None if it does not exist or its model is larger than ``max_mb`` megabytes."""
    folder = directory / "checkpoints" / f"step-{step:06d}"
    # a link in an untrusted run directory could point to any folder
    files = model_files(folder) if folder.resolve().is_relative_to(directory.resolve()) else []
    size = sum(file.stat().st_size for file in files)
    return folder if folder / "config.json" in files and size <= max_mb * 1e6 else None


def model_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint that ``from_pretrained`` reads, excluding symbolic links."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [file for file in found if file.is_file() and not file.is_symlink() and file.name not in NOT_ITS_FILES]


def send_model(client: Any, uri: str, run: Any, record_id: str, checkpoint: Path, step: int) -> None:
    """Log a checkpoint as the model of a run, unless the store already has that model."""
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    mark = f"{record_id}:{checkpoint.name}"
    found = client.search_logged_models([run.info.experiment_id], f"tags.{TAG} = '{mark}'")
    if found and found[0].status == LoggedModelStatus.READY:
        return
    name = re.sub(r"[/:.%\"']", "-", run.info.run_name)
    # a killed process leaves a model that is not ready
    model = found[0] if found else client.create_logged_model(
        run.info.experiment_id, name=name, source_run_id=run.info.run_id, tags={TAG: mark}
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="rlzoo-model-") as folder:
        write_model(Path(folder), checkpoint, model, run.info.run_id)
        artifact_repository(model.artifact_location, uri).log_artifacts(folder)
    outputs = client.get_run(run.info.run_id).outputs
    if model.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else ())]:
        client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, step)])
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def write_model(folder: Path, checkpoint: Path, model: Any, run_id: str) -> None:
    """Write an MLflow model of the transformers flavour, with links to the files of the checkpoint.

    ``mlflow.transformers.save_model`` would copy the weights and load the tokenizer, which takes time and memory. If a
    tokenizer comes with its own code, that function would fail or run the code.
    """
    from mlflow.models import Model, ModelSignature
    from mlflow.types.schema import ColSpec, Schema

    (folder / "model").mkdir()
    (folder / "components" / "tokenizer").mkdir(parents=True)
    for file in model_files(checkpoint):
        (folder / "model" / file.name).symlink_to(file.resolve())
        if not file.name.endswith(WEIGHTS):
            (folder / "components" / "tokenizer" / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    text = Schema([ColSpec("string")])
    described = Model(run_id=run_id, model_id=model.model_id, signature=ModelSignature(inputs=text, outputs=text))
    described.add_flavor(
        "transformers",
        transformers_version=version("transformers"),
        task="text-generation",
        instance_type="TextGenerationPipeline",
        pipeline_model_type=config["architectures"][0],
        source_model_name=checkpoint.name,
        model_binary="model",
        torch_dtype=f"torch.{config.get('dtype', 'float32')}",
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
    )
    loaded = {"python_version": python_version(), "env": {"virtualenv": "python_env.yaml"}}
    described.add_flavor("python_function", loader_module="mlflow.transformers", **loaded)
    described.save(str(folder / "MLmodel"))
    # a local version suffix (+cpu) is not on PyPI
    versions = "".join(f"{name}=={version(name).partition('+')[0]}\n" for name in REQUIRED)
    (folder / "requirements.txt").write_text(versions, encoding="utf-8")
    environment = {"python": python_version(), "build_dependencies": ["pip"], "dependencies": ["-r requirements.txt"]}
    (folder / "python_env.yaml").write_text(dump_yaml(environment), encoding="utf-8")
