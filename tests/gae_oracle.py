"""Float64 oracle of generalised advantage estimation and of the clipped value loss, written from the formulas with sums."""

import numpy as np


def steps_of(mask, turn_ids, row, time_step):
    """Return the positions of each step's tokens: one token, or the tokens of one turn."""
    tokens = [t for t in range(mask.shape[1]) if mask[row, t]]
    if time_step == "token":
        return [[t] for t in tokens]
    return [[t for t in tokens if turn_ids[row, t] == turn] for turn in sorted({int(turn_ids[row, t]) for t in tokens})]


def gae(
    rewards, values, last_values, finished, mask, turn_ids, paid=None,
    *, gamma=1.0, lam=0.95, lam_alpha=None, lam_returns=None, time_step="token", bootstrap_truncated=False, whiten=False,
):  # fmt: skip
    """Return the advantages and the value targets, ``(B, T)`` each: A_k = sum over j of (gamma lam)^j delta_(k+j)."""
    advantages, targets = np.zeros(mask.shape), np.zeros(mask.shape)
    for row in range(len(mask)):
        steps = steps_of(mask, turn_ids, row, time_step)
        number = len(steps)
        earned = [sum(0.0 if paid is None else float(paid[row, t]) for t in step) for step in steps]
        before = [float(values[row, step[0]]) for step in steps]
        cut_off = bootstrap_truncated and not finished[row]
        if number and not cut_off:
            earned[-1] += float(rewards[row])
        after = [*before[1:], float(last_values[row]) if cut_off else 0.0]
        delta = [earned[k] + gamma * after[k] - before[k] for k in range(number)]
        own = lam if lam_alpha is None else max(0.0, 1 - 1 / (lam_alpha * max(number, 1)))
        others = own if lam_returns is None else lam_returns
        for k, step in enumerate(steps):
            for t in step:
                advantages[row, t] = sum((gamma * own) ** j * delta[k + j] for j in range(number - k))
                targets[row, t] = before[k] + sum((gamma * others) ** j * delta[k + j] for j in range(number - k))
    if whiten:
        chosen = advantages[mask]
        advantages = np.where(mask, (advantages - chosen.mean()) / (chosen.std(ddof=1) + 1e-6), 0.0)
    return advantages, targets


def value_loss(values, old_values, targets, mask, clip):
    """Return the mean over the tokens of half of the larger squared error, and its derivative in the values."""
    loss, derivative = 0.0, np.zeros(mask.shape)
    for row, t in zip(*np.nonzero(mask), strict=True):
        value, old, target = (float(array[row, t]) for array in (values, old_values, targets))
        near = value if clip is None else min(max(value, old - clip), old + clip)
        plain, clipped = (value - target) ** 2, (near - target) ** 2
        loss += max(plain, clipped) / 2
        derivative[row, t] = value - target if plain >= clipped else 0.0
    return loss / mask.sum(), derivative / mask.sum()
