"""The fairness lab: sweeps, replay of recorded rollouts, calibration, and comparisons of rules."""
