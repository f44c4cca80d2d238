"""The fairness lab: sweeps, replay on recorded rollouts, calibration and races between rules."""
