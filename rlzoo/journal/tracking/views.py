"""The saved view that compares rules side by side on MLflow's runs page.

MLflow stores a saved view in an experiment tag, lists it in the *Views* menu of the runs page, and opens it if its key is
in the URL. The tag's format is undocumented. This module writes the format that the pinned MLflow version uses; browser tests
check it.
"""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

from rlzoo.measure.colours import RULE_TAG

TAG_PREFIX = "mlflow.sharedViewState."
KEY = "rlzoo-4"  # part of the URL, so it is short; a new layout needs a new number, to keep views that users edited
NAME = "Rules side by side"
MOST_RUNS = 100  # maximum number of lines or bars in a chart

FILTER = f"tags.{RULE_TAG} != '' and attributes.status != 'FAILED'"
"""Selects the runs that the view shows, which are all runs that have a rule, except failed runs."""

COLUMNS = (  # listed from left to right
    *("params.`seed`", "metrics.`accuracy`", "metrics.`gain`", "metrics.`lre_at_0.1`", "metrics.`lre_noise_at_0.1`"),
    *("metrics.`lre_tokens_at_0.1`", "metrics.`lre_noise_tokens_at_0.1`"),  # for rules that clip tokens or turns
    *("metrics.`clip_fraction`", "metrics.`response_length`", "metrics.`tokens_per_second`"),
)

SECTIONS: dict[str, tuple[str, ...]] = {
    "Result": ("accuracy", "lre_at_0.1", "lre_tokens_at_0.1"),
    "Clip fraction": ("clip_fraction", "clip_by_length_0", "clip_by_length_5"),
    "Training": (
        *("eval/accuracy", "reward/mean", "clip/fraction", "learner/entropy", "response/length_mean"),
        "critic/explained_variance",  # hidden if no run has a critic
    ),
}
"""The metrics of each section's charts. Whole-run metrics are bars, and per-step metrics are lines. MLflow cuts off long
section names if its assistant is open."""
MOST_COLUMNS = 2  # charts in a row; MLflow cuts off the titles of narrower charts


def write_view(client: Any, experiment_id: str) -> None:
    """Save the view in an experiment. An existing view is kept, because users may have edited it."""
    tag = TAG_PREFIX + KEY
    if tag not in client.get_experiment(experiment_id).tags:
        client.set_experiment_tag(experiment_id, tag, view())


def view_path(experiment_id: str) -> str:
    """Return the path and query of the URL that opens the charts of the view."""
    where = f"viewStateShareKey={KEY}&compareRunsMode=CHART&workflowType=machine_learning"
    return f"/#/experiments/{quote(experiment_id)}/runs?{where}"


def view() -> str:
    """Return the value of the view's tag."""
    now = int(time.time() * 1000)
    return json.dumps({"name": NAME, "createdAt": now, "updatedAt": now, "state": json.dumps(_state())})


def _state() -> dict[str, Any]:
    """Return the state of the page in MLflow's format."""
    return {
        "searchFilter": FILTER,
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(COLUMNS),
        "columnOrder": list(COLUMNS),
        "columnWidths": {},
        "runsHiddenMode": "SHOW_ALL",
        "runsVisibilityMap": {},
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "useGroupedValuesInCharts": True,
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": RULE_TAG}]},
        "groupsExpanded": {},
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        "compareRunCharts": [_chart(section, metric) for section, metrics in SECTIONS.items() for metric in metrics],
        "compareRunSections": [_section(name, len(metrics)) for name, metrics in SECTIONS.items()],
    }


def _section(name: str, num_charts: int) -> dict[str, Any]:
    """Return a section in MLflow's format."""
    kept = {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    return {"uuid": name, "name": name, **kept, "columns": min(num_charts, MOST_COLUMNS)}


def _chart(section: str, metric: str) -> dict[str, Any]:
    """Return a chart in MLflow's format: lines for a per-step metric (whose name has a ``/``), bars for any other metric."""
    chart = {
        "uuid": f"{KEY}-{metric}",
        "type": "BAR",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "metricSectionId": section,
        "runsCountToCompare": MOST_RUNS,
        "deleted": False,
        "isGenerated": False,
    }
    if "/" not in metric:
        return chart
    axes = {"xAxisKey": "step", "yAxisKey": "metric", "selectedXAxisMetricKey": "", "yAxisExpressions": [], "range": {}}
    scales = {"xAxisScaleType": "linear", "scaleType": "linear", "useGlobalXaxisKey": False, "ignoreOutliers": False}
    return {**chart, "type": "LINE", **axes, **scales, "lineSmoothness": 0, "useGlobalLineSmoothing": False}  # raw points
