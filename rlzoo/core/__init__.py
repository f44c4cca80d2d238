"""Building blocks of rules, estimators and corrections; imports no other part of rlzoo."""
