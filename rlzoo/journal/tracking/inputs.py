"""The data a run learns from and is evaluated on, as MLflow shows it beside the run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

CONTEXT = "mlflow.data.context"
COLUMNS = [{"name": name, "type": "string", "required": True} for name in ("question", "answer")]
SHOWN_DIGEST = 12  # characters: enough to tell data apart, and shown in full in the table of runs


@dataclass(frozen=True, slots=True)
class Data:
    """Questions with answers that a run uses.

    Example:
        ``Data("arithmetic", digest, "train", "code", {"tags": {"task": "arithmetic"}}, num_questions=1280)``
    """

    name: str
    digest: str  # tells questions that are not the same ones apart
    context: Literal["train", "eval"]
    source_type: Literal["code", "local", "hugging_face"]  # MLflow's names: generated, a file, a data set on the hub
    source: dict[str, Any]  # with the keys of MLflow's source of that type
    num_questions: int


def send_inputs(client: Any, run: Any, used: Iterable[Data]) -> None:
    """Tell the store of the data it does not know of yet."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    known = {(given.dataset.name, given.dataset.digest) for given in run.inputs.dataset_inputs}
    missing = [
        DatasetInput(
            Dataset(
                name=data.name,
                digest=data.digest[:SHOWN_DIGEST],
                source_type=data.source_type,
                source=json.dumps(data.source),
                schema=json.dumps({"mlflow_colspec": COLUMNS}),
                profile=json.dumps({"num_rows": data.num_questions}),
            ),
            [InputTag(CONTEXT, data.context)],
        )
        for data in used
        if (data.name, data.digest[:SHOWN_DIGEST]) not in known
    ]
    if missing:
        client.log_inputs(run.info.run_id, missing)
