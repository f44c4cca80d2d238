"""The engine: rollouts, experience, learner, and the loop that joins them."""
