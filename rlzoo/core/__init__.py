"""The building blocks of rules, estimators and corrections, which import no other part of rlzoo."""
