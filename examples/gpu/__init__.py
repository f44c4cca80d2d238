"""One command that proves rlzoo on a GPU: ``python -m examples.gpu``. See docs/reference/gpu.md."""
