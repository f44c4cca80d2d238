"""The saved view of MLflow's runs page: rules side by side, with the columns and the charts that compare them.

MLflow keeps a saved view in an experiment tag, lists it in the *Views* menu of the runs page, and opens it by its key in the
address. The tag's format is not documented; it is that of the pinned version, which the browser tests hold it to.
"""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

from rlzoo.support.colours import RULE_TAG

TAG_PREFIX = "mlflow.sharedViewState."
KEY = "rlzoo-rules-1"  # a later layout gets another number, so that a view which somebody changed is kept
NAME = "Rules side by side"
MOST_RUNS = 100  # lines or bars of a chart
REPORT = "report"
"""In place of a rule, the group of the runs that hold a comparison's report. It is in the table and not in the charts."""

COLUMNS = (
    *("params.`seed`", "metrics.`accuracy`", "metrics.`gain`", "metrics.`lre_at_0.1`", "metrics.`lre_noise_at_0.1`"),
    *("metrics.`clip_fraction`", "metrics.`response_length`", "metrics.`tokens_per_second`"),
)
"""Columns of the table, from left to right."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Result: high accuracy, low length error": ("accuracy", "lre_at_0.1"),
    "Clip fraction: all, shortest sixth (0), longest sixth (5)": (*("clip_fraction", "clip_by_length_0", "clip_by_length_5"),),
    "Training": (
        *("eval/accuracy", "reward/mean", "clip/fraction"),
        *("fairness/lre_max", "learner/entropy", "response/length_mean"),
    ),
}
"""The metrics of each section's charts. A metric of whole runs has a bar for each rule, a metric of steps a line."""
MOST_COLUMNS = 3  # charts beside each other


def write_view(client: Any, experiment_id: str) -> None:
    """Save the view in an experiment; one that is there already is kept, with what somebody changed in it."""
    tag = TAG_PREFIX + KEY
    if tag not in client.get_experiment(experiment_id).tags:
        client.set_experiment_tag(experiment_id, tag, view())


def view_path(experiment_id: str) -> str:
    """The part of the address after the host that opens the view's charts."""
    where = f"viewStateShareKey={KEY}&compareRunsMode=CHART&workflowType=machine_learning"
    return f"/#/experiments/{quote(experiment_id)}/runs?{where}"


def view() -> str:
    """The view, as its tag's value."""
    now = int(time.time() * 1000)
    return json.dumps({"name": NAME, "createdAt": now, "updatedAt": now, "state": json.dumps(_state())})


def _state() -> dict[str, Any]:
    """The state of the page, as the page saves it."""
    return {
        "searchFilter": "",
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
        "runsVisibilityMap": {f"tag.{RULE_TAG}.{REPORT}": False},
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
    """A section as the page saves it."""
    kept = {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    return {"uuid": name, "name": name, **kept, "columns": min(num_charts, MOST_COLUMNS)}


def _chart(section: str, metric: str) -> dict[str, Any]:
    """A chart as the page saves it: lines by step for a metric of steps, which has a prefix, else a bar."""
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
