"""The bundled rules as parameters of a test."""

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
