"""A folder full of modules that report if they are imported instead of the real ones."""

PYTHONS = ["collections", "json", "logging", "math", "pickle", "random", "re", "runpy", "signal", "socket", "struct", "typing"]
LIBRARIES = [
    "accelerate",
    "click",
    "flask",
    "math_verify",
    "mlflow",
    "numpy",
    "pydantic",
    "torch",
    "transformers",
    "uvicorn",
    "yaml",
]


def poison(folder):
    """Write the modules."""
    for name in [*PYTHONS, *LIBRARIES, "rlzoo", "types"]:
        marker = folder / f"imported-{name}"
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit('{name} of {folder}')\n")


def poisoned(folder):
    """The names of the modules that were imported."""
    return sorted(file.name.removeprefix("imported-") for file in folder.glob("imported-*"))
