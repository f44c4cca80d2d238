"""The rules inside other trainers."""
