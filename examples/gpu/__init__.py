"""One command that validates rlzoo on a GPU: ``python -m examples.gpu``. See docs/reference/gpu.md."""
