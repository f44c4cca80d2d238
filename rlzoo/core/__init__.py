"""What a rule, an advantage estimator or a correction uses; imports no other part of rlzoo."""
