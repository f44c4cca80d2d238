"""Learning from a batch: scoring, the rule, the gradient and the optimizer."""
