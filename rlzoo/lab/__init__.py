"""The fairness lab, which provides sweeps, replay of recorded rollouts, calibration, and comparisons of rules."""
