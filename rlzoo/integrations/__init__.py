"""Integrations of rlzoo's rules with other trainers."""
