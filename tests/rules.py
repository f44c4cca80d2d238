"""Parameters of tests, of which only some are tested in continuous integration."""

import pytest

from rlzoo import load_zoo


def by_inputs(names=None):
    """Return the names of rules, by default all. All but the first two of each scope and set of needs are `long`."""
    zoo, seen, parameters = load_zoo(), {}, []
    for name in zoo if names is None else names:
        alike = seen.setdefault((zoo[name].scope, zoo[name].needs), [])
        alike.append(name)
        parameters.append(name if len(alike) <= 2 else pytest.param(name, marks=pytest.mark.long))
    return parameters


def few(values, number=1):
    """Return values of which all but the first ``number`` are `long`."""
    return [
        value if at < number else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
        for at, value in enumerate(values)
    ]
