"""The project's chores, one session each: `nox -s lint types tests`.

`lint`, `types`, `tests`, `fuzz` and `version` run in the environment that nox runs in, always through
`sys.executable`: a bare `python` may be another interpreter when the environment is not activated. What
asks whether our packages install and work makes environments of its own, with our wheels and nothing of
the working tree.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nox

if sys.version_info >= (3, 11):
    import tomllib
else:  # tomli is what pytest itself needs below 3.11
    import tomli as tomllib

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.error_on_external_run = True

ROOT = Path(__file__).resolve().parent
PROJECTS = {
    tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]: path.parent
    for pattern in ("packages/*/pyproject.toml", "examples/*/pyproject.toml")
    for path in sorted(ROOT.glob(pattern))
}
"""The folder of every distribution that is made here, the example of a third party's too."""
SHARED = ["nnx-checkpoint", "nnx-core", "nnx-conformance"]
"""What engines stand on, each on the one before."""
PLUGINS = [name for name in PROJECTS if name not in SHARED]

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
"""What the classifiers of every package name."""

NEEDED_WITH_GPUS = [
    name
    for name, folder in PROJECTS.items()
    if folder.parent.name == "packages" and name not in ("nnx-ray", "nnx-lite", "nnx-torchft", "nnx-hivemind")
]
"""What benchmarks/gpu use."""
WITH_GPUS = (
    *("torch==2.11.0", "lightning==2.6.6", "numpy", "scipy", "matplotlib", "safetensors", "xxhash", "typer"),
    *("rich", "einops", "msgpack", "ninja", "psutil", "py-cpuinfo", "setuptools", "pytest", "pytest-timeout"),
)
"""What the machine with a GPU and no network has, of what our packages, DeepSpeed and tests need."""

QUICK_CHECKS = ("losses_float32", "losses_resume", "listing_imports_no_torch")
"""Trains, saves, resumes, and lists without importing an engine: what shows whether an installation works."""
CHOOSE = """
import logging, sys
from lightning.pytorch import Trainer
logging.disable()
for name in sys.argv[1:]:
    trainer = Trainer(strategy=name, accelerator="cpu", logger=False)
    print(f"Trainer(strategy={name!r}) has a {type(trainer.strategy).__name__}")
"""
"""Chooses strategies by their names; nothing of ours is imported by hand."""
LAUNCH = """
import sys
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task
from nnx_conformance.training import make_trainer
task = Task(steps=2)
trainer = make_trainer(Subject("ddp", options={"launcher": sys.argv[1]}), task, devices=2)
trainer.fit(task.module())
assert trainer.global_step == 2
"""
"""Trains in processes that a launcher starts."""
LITE = """
import tempfile
import torch
from nnx.lite import LightningLite
class Train(LightningLite):
    def run(self):
        model = torch.nn.Linear(4, 1)
        model, optimizer = self.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        path = tempfile.mkdtemp() + "/lite.ckpt"
        self.save({"model": model, "optimizer": optimizer}, path)
        return sorted(self.load(path))
assert Train(strategy="ddp", devices=1).run() == ["model", "optimizer"]
"""
"""Trains a loop of Lite."""
ELASTIC = """
import tempfile
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from torchft.coordination import LighthouseServer
import nnx
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
address = "127.0.0.1:" + lighthouse.address().rpartition(":")[2]
strategy = nnx.strategy("torchft_ddp", lighthouse=address, run_id="wheels")
with tempfile.TemporaryDirectory() as root:
    settings = {"default_root_dir": root, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=3, **settings)
    trainer.fit(BoringModel())
assert trainer.global_step == 3 and trainer.callback_metrics["elastic/groups"] == 1
"""
"""Trains one group of an elastic run."""
PEER = """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
import nnx
class Model(BoringModel):
    def configure_optimizers(self):
        return super().configure_optimizers()[0]
strategy = nnx.strategy("hivemind", target_batch_size=1, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
settings = {"logger": False, "enable_checkpointing": False}
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=3, **settings)
trainer.fit(Model())
assert trainer.global_step == 3
"""
"""Trains one peer of a swarm."""
NO_LITE = """
import nnx
from nnx import *
assert "Lite" not in dir(nnx)
try:
    from nnx.lite import LightningLite
except nnx.NnxError as error:
    assert "pip install nnx-lite" in str(error), error
else:
    raise SystemExit("there is a Lite where nnx-lite is not installed")
"""
"""Asks for Lite where its package is absent."""
SCRIPTS = {
    "nnx-ray": (LAUNCH, "ray"),
    "nnx-lite": (LITE,),
    "nnx-torchft": (ELASTIC,),
    "nnx-hivemind": (PEER,),
}
"""The script, with its arguments, that tries a plugin which conformance alone cannot try."""
BARE_LOOP = """
import importlib.util, sys
import torch
import nnx_checkpoint
model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
nnx_checkpoint.save(sys.argv[1], model=model, step=3)
assert nnx_checkpoint.load(sys.argv[1], model=other) == {"step": 3}
assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
assert importlib.util.find_spec("lightning") is None and importlib.util.find_spec("nnx_core") is None
"""
"""Saves a model without Lightning and reads it back."""
ENGINES = ("deepspeed", "fairscale", "torchft", "hivemind", "ray")
"""The engines of others, whose versions the table of compatibility names."""
TOOLS_FOR_WHEELS = ("twine==7.0.0", "check-wheel-contents==0.6.3", "validate-pyproject==0.27")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting and which package may import which."""
    run(session, "-m", "ruff", "check", "--no-cache", ".")
    run(session, "-m", "ruff", "format", "--check", "--no-cache", ".")
    run(session, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


@nox.session
def types(session: nox.Session) -> None:
    """`mypy --strict` over every package."""
    run(session, "-m", "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of README's command, or named ones: `nox -s tests -- tests/test_main_job.py`."""
    run(session, "-m", "pytest", "-n", "3", "--dist", "loadfile", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Change checkpoints' structure and see what nnx makes of it: `nox -s fuzz -- 10000 nnx dcp`.

    The number is that of the cases of each format; FUZZ_START=7 tries others.
    """
    with session.chdir(ROOT / "tests"):
        run(session, "-m", "fuzz", *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Run all tests, which takes hours, or a share of them: `nox -s full -- --splits 3 --group 2`."""
    run(session, "-m", "pytest", "-n", "3", "--dist", "loadfile", "-m", "", *session.posargs)


@nox.session
def nodes(session: nox.Session) -> None:
    """Train on several nodes, which are network namespaces of this machine. Needs root and iproute2.

    `nox -s nodes -- -m nodes` runs the slow tests too: every strategy on Ray, and more lost nodes.
    """
    run(session, "-m", "pytest", "tests/nodes", "-m", "nodes and not slow", *session.posargs)


@nox.session(venv_backend="venv")
def docs(session: nox.Session) -> None:
    """Build the site into site/; a broken link fails the build."""
    session.install("-r", "docs/requirements.txt")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def version(session: nox.Session) -> None:
    """Give all distributions one version, and the bounds that go with it: `nox -s version -- 0.2.0`."""
    new = session.posargs[0] if session.posargs else ""
    if not re.fullmatch(r"\d+\.\d+\.\d+", new):
        session.error(f"{new!r} is no version; say for example: nox -s version -- 0.2.0")
    projects = [folder / "pyproject.toml" for folder in PROJECTS.values()]
    for path in [*projects, *ROOT.glob("packages/*/src/**/pyproject.toml.jinja")]:
        text = path.read_text(encoding="utf-8")
        path.write_text(with_version(text, new, own=path in projects), encoding="utf-8")
        session.log(f"{path.relative_to(ROOT)}: {new}")
    session.log("Now move what CHANGELOG.md calls unreleased under the new version, and run the tests.")


# --- what is published, installed where nothing else is ---


@nox.session(venv_backend="venv")
def contents(session: nox.Session) -> None:
    """Build everything and look into it, without installing it; `wheels` does so first."""
    build_and_check(session)


@nox.session(venv_backend="venv")
def wheels(session: nox.Session) -> None:
    """Build everything, look into it, install it all where nothing else is, and try every strategy there."""
    built = build_and_check(session)
    python = new_environment(session, "wheels")
    install(session, python, *built.values())
    names = ask(session, python)
    for plugin in PLUGINS:
        try_plugin(session, python, plugin, names.get(plugin, []))


@nox.session(name="gpu-wheels")
def gpu_wheels(session: nox.Session) -> None:
    """Gather in dist/gpu what benchmarks/gpu need on a machine with a GPU, Python 3.12, torch and no network.

    They are our packages and what such a machine lacks, some MiB. There, in the root of this repository:
    ``pip install --no-index --no-deps --target /tmp/site dist/gpu/*.whl``, and PYTHONPATH=/tmp/site.
    """
    place = gather_for_gpus(session)
    size = sum(path.stat().st_size for path in place.iterdir()) / 2**20
    session.log(f"{len(list(place.iterdir()))} wheels in {place}, {size:.0f} MiB")


@nox.session(name="gpu-rehearsal")
def gpu_rehearsal(session: nox.Session) -> None:
    """Try benchmarks/gpu/one_gpu.py, small and on the CPU, as it will run: `nox -s gpu-rehearsal -- PYTHON`.

    In an environment with Python 3.12, torch 2.11 with CUDA and Lightning, our wheels are in a folder on
    PYTHONPATH and nowhere else. The environment is kept: some gigabytes in `.nox/gpu-rehearsal`.
    """
    base = session.posargs[0] if session.posargs else shutil.which("python3.12")
    if base is None:
        session.error(
            "python3.12 is not on PATH; say where one is: nox -s gpu-rehearsal -- /path/to/python3.12"
        )
    folder = ROOT / ".nox" / "gpu-rehearsal"
    python = os.fspath(folder / "bin" / "python")
    if not Path(python).exists():
        session.run(base, "-m", "venv", os.fspath(folder), external=True)
    pip(session, python, "install", *WITH_GPUS)
    if found := installed(session, python).intersection(PROJECTS):
        session.error(f"{sorted(found)} are in {folder}, where nothing of ours may be; remove the folder")
    wheels = sorted(map(os.fspath, gather_for_gpus(session).iterdir()))
    site = Path(session.create_tmp()).resolve() / "site"
    shutil.rmtree(site, ignore_errors=True)
    pip(session, python, "install", "--no-index", "--no-deps", "--target", os.fspath(site), *wheels)
    session.run(
        python, "benchmarks/gpu/one_gpu.py", "--dry-run", external=True, env={"PYTHONPATH": os.fspath(site)}
    )


def gather_for_gpus(session: nox.Session) -> Path:
    """Fill dist/gpu with wheels for Python 3.12: ours, and what a machine that has `WITH_GPUS` lacks."""
    place = ROOT / "dist" / "gpu"
    shutil.rmtree(place, ignore_errors=True)
    limits = ("--constraint", os.fspath(ROOT / "constraints.txt"))
    wheel = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", os.fspath(place))
    run(session, *wheel, *(os.fspath(PROJECTS[name]) for name in NEEDED_WITH_GPUS))
    run(session, *wheel, "--no-build-isolation", *limits, "deepspeed", "fairscale", "hjson")
    platforms = (f"--platform=manylinux{version}_x86_64" for version in ("_2_28", "_2_17", "2014"))
    python = ("--python-version", "3.12", "--implementation", "cp", *platforms, "--only-binary", ":all:")
    run(session, "-m", "pip", "download", "--quiet", *python, *limits, "--dest", os.fspath(place), "pydantic")
    return place


@nox.session(venv_backend="venv")
def release(session: nox.Session) -> None:
    """Build and check what a release uploads, and install it in the order in which it is uploaded.

    With `-- --rehearse` the changelog may still call the version unreleased.
    """
    (number,) = {version_of(folder) for folder in PROJECTS.values()}
    title = re.search(
        rf"^## {re.escape(number)}(.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )
    if title is None or ("unreleased" in title[1] and "--rehearse" not in session.posargs):
        session.error(f"CHANGELOG.md has no section '## {number} (YYYY-MM-DD)'")
    wheels = build_and_check(session)
    python = new_environment(session, "release")
    limits = os.fspath(ROOT / "constraints.txt")
    found_in = os.fspath(Path(wheels["nnx-core"]).parent)
    engines = [name for name in PLUGINS if PROJECTS[name].parent.name == "packages"]
    uploaded = [*SHARED, *sorted(engines, key=lambda name: len(needed(name)))]  # those that others need first
    for name in uploaded:
        pip(session, python, "install", "--constraint", limits, "--find-links", found_in, wheels[name])
    expect_ours(session, installed(session, python), uploaded)
    try_each(session, python, engines)
    session.log(
        f"Now tag v{number}, and `twine upload` from {found_in}, in this order: {', '.join(uploaded)}."
    )


@nox.session  # in no environment of nox's: Ray's workers do not start where TMPDIR is inside of one
def isolation(session: nox.Session) -> None:
    """Checkpoints alone, the core, and each plugin with what it declares: `nox -s isolation -- nnx-fsdp`.

    The tests of each, or of those named, are found in its folder without the rest of the repository. One
    environment serves all of them, as torch is large: before the next plugin comes, everything goes that
    came with the last.
    """
    find_tests_alone(session, session.posargs or [*SHARED, *PLUGINS])
    built = {wheel_of(path): path for path in build(session, "wheel")}
    python = new_environment(session, "isolation")
    save_without_lightning(session, python, built["nnx-checkpoint"])
    install(session, python, built["nnx-checkpoint"], built["nnx-core"])
    expect_ours(session, installed(session, python), SHARED[:2])
    ask(session, python)
    session.run(python, "-I", "-c", NO_LITE, external=True)
    read_without_the_engine(session, python, built["nnx-deepspeed"])
    install(session, python, built["nnx-conformance"], built["nnx-core"], built["nnx-checkpoint"])
    shared = installed(session, python)
    for plugin in session.posargs or PLUGINS:
        ours = needed(plugin)
        session.log(f"{plugin} alone" + (f", with {', '.join(ours[1:])}, which it needs" if ours[1:] else ""))
        install(session, python, *(built[name] for name in [*SHARED, *ours]))
        expect_ours(session, installed(session, python), [*SHARED, *ours])
        try_each(session, python, [plugin])
        if plugin == "nnx-fsdp":
            outlive_another_nnx(session, python, built)
        came = sorted(installed(session, python) - shared)
        pip(session, python, "uninstall", "--yes", *came)


@nox.session(venv_backend="venv")
@nox.parametrize("python,edge", [(PYTHONS[0], "oldest"), *((python, "newest") for python in PYTHONS)])
def compat(session: nox.Session, edge: str) -> None:
    """A strategy of each package with the oldest, or the newest, torch and Lightning that they accept.

    The newest under every Python that the packages name, the oldest under the first. Each run starts with our
    wheels in an empty environment, `pip check`, torch's private names and README's script, then runs the fast
    profile of conformance, or with `-- --quick` three checks. It writes rows of docs/compatibility.json.

    `oldest` takes everything that they name at the lowest version they name; then, beside the same torch,
    each end of what is accepted of Lightning. Fetches a torch with CUDA, some gigabytes, where the package
    index has no other; remove `.nox/compat-*` afterwards.
    """
    python = os.fspath(Path(session.bin) / "python")
    lightning = next(pin for pin in floors() if pin.startswith("lightning=="))
    place = Path(session.create_tmp())
    limits = place / "limits.txt"
    limits.write_text("\n".join([*floors(), f"pytorch-{lightning}"] if edge == "oldest" else []))
    built = build(session, "wheel")
    pip(session, python, "install", "--constraint", os.fspath(limits), *built, "pytest")
    session.run(python, "-m", "pip", "check")
    alone = ("--noconftest", "-c", os.devnull, "--rootdir", os.fspath(ROOT), "-p", "no:cacheprovider")
    session.run(python, "-m", "pytest", "-q", *alone, "tests/test_private_names.py")
    (place / "readme.py").write_text(readme_script(), encoding="utf-8")
    with session.chdir(place):
        session.run(python, "-I", "readme.py", env={"OMP_NUM_THREADS": "1"})
    checks = QUICK_CHECKS if "--quick" in session.posargs else ()
    try_each(session, python, PLUGINS, checks)
    record(session, python, edge, "three checks" if checks else "the fast profile")
    other = "lightning" if edge == "oldest" else lightning
    pip(session, python, "install", "--upgrade", other, f"pytorch-{other}", *built)
    try_each(session, python, PLUGINS)
    record(session, python, edge, "three checks", other_lightning=True)


def readme_script() -> str:
    """The script of README's section "Use it"."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Use it")[2]
    return section.partition("```python\n")[2].partition("```")[0]


def record(
    session: nox.Session, python: str, edge: str, checks: str, *, other_lightning: bool = False
) -> None:
    """Replace the row of the last such run; tests/test_docs_compatibility.py makes a page of the rows."""
    listed = session.run(python, "-m", "pip", "list", "--format", "json", external=True, silent=True)
    versions = {entry["name"]: entry["version"] for entry in json.loads(str(listed))}
    number = session.run(python, "-c", "import platform; print(platform.python_version())", silent=True)
    row = {
        "edge": edge,
        "python": str(number).strip(),
        "other_lightning": other_lightning,
        **{name: versions[name] for name in ("torch", "lightning")},
        "checks": checks,
        "engines": {name: versions[name] for name in ENGINES if name in versions},
        "packages": sorted(set(versions) & set(PROJECTS)),
    }
    path = ROOT / "docs" / "compatibility.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = [old for old in rows if identity(old) != identity(row)] + [row]
    path.write_text(json.dumps(sorted(rows, key=identity), indent=2) + "\n", encoding="utf-8")


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a row in the table: its edge, minor version of Python, and end of Lightning."""
    minor = tuple(map(int, row["python"].split(".")[:2]))
    return row["edge"] == "newest", minor, row["other_lightning"]


def find_tests_alone(session: nox.Session, names: Sequence[str]) -> None:
    """Let pytest find the tests of each where its folder is alone: they need nothing of the monorepo's."""
    for name in names:
        session.log(f"the tests of {name}, alone")
        with tempfile.TemporaryDirectory() as place:
            folder = Path(shutil.copytree(PROJECTS[name], Path(place) / name))
            with session.chdir(folder):
                run(session, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider")


def save_without_lightning(session: nox.Session, python: str, wheel: str) -> None:
    """Use checkpoints where nothing else of ours is, in Python and by the command."""
    install(session, python, wheel)
    expect_ours(session, installed(session, python), SHARED[:1])
    saved = os.fspath(Path(session.create_tmp()).resolve() / "bare.ckpt")
    shutil.rmtree(saved, ignore_errors=True)
    session.run(python, "-I", "-c", BARE_LOOP, saved, external=True)
    session.run(os.fspath(Path(python).with_name("nnx")), "ckpt", "verify", saved, external=True)


def read_without_the_engine(session: nox.Session, python: str, wheel: str) -> None:
    """Convert what DeepSpeed wrote, before and after its reader is installed, but never DeepSpeed itself."""
    nnx = os.fspath(Path(python).with_name("nnx"))
    source = os.fspath(PROJECTS["nnx-deepspeed"] / "tests/fixtures/deepspeed/zero2_world2_bf16")
    target = Path(session.create_tmp()).resolve() / "converted"
    shutil.rmtree(target, ignore_errors=True)
    convert = (nnx, "ckpt", "convert", source, os.fspath(target))
    session.run(*convert, external=True, success_codes=[1])
    pip(session, python, "install", "--no-deps", wheel)
    if "deepspeed" in installed(session, python):
        session.error("DeepSpeed is installed, where only its reader should be")
    session.run(*convert, external=True)
    pip(session, python, "uninstall", "--yes", "nnx-deepspeed")


def outlive_another_nnx(session: nox.Session, python: str, built: dict[str, str]) -> None:
    """Install a package that is called nnx after ours and before ours, and remove it again."""
    folder = Path(session.create_tmp()).resolve() / "another nnx"
    (folder / "nnx").mkdir(parents=True, exist_ok=True)
    (folder / "nnx" / "__init__.py").write_text("class Linear: pass\n")
    (folder / "pyproject.toml").write_text('[project]\nname = "nnx"\nversion = "9.0"\n')
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", os.fspath(folder / "dist")]
    with session.chdir(folder):
        session.run(*command, external=True, silent=True)
    (other,) = map(os.fspath, (folder / "dist").glob("*.whl"))
    nnx = os.fspath(Path(python).with_name("nnx"))

    def expect_all_to_work(*, is_whole: bool) -> None:
        session.run(python, "-I", "-c", CHOOSE, "fsdp_auto", "fsdp_manual", external=True)
        session.run(nnx, "list", external=True, silent=True)
        session.run(nnx, "doctor", external=True, silent=True, success_codes=[0 if is_whole else 1])

    for order in ([other], [other, built["nnx-core"]]):
        for wheel in order:
            pip(session, python, "install", "--no-deps", "--force-reinstall", wheel)
        expect_all_to_work(is_whole=order[-1] != other)
        pip(session, python, "uninstall", "--yes", "nnx")
        expect_all_to_work(is_whole=False)
        pip(session, python, "install", "--no-deps", "--force-reinstall", built["nnx-core"])
        expect_all_to_work(is_whole=True)


def run(session: nox.Session, *arguments: str, **variables: str) -> None:
    """Run the Python that runs nox, with environment variables."""
    session.run(sys.executable, *arguments, external=True, env={"PYTHONUNBUFFERED": "1", **variables})


def build(session: nox.Session, *kinds: str) -> list[str]:
    """Build every distribution, and nothing but them, into a fresh directory, whose name has spaces."""
    target = Path(session.create_tmp()).resolve() / "what was built"
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "-d", os.fspath(target)]
    for kind in kinds:
        command += ["-t", kind]
    for folder in PROJECTS.values():
        with session.chdir(folder):
            session.run(*command, external=True, silent=True)
    return sorted(os.fspath(path) for path in target.iterdir())


IMPORT_NAMES = {"nnx-checkpoint": "nnx_base,nnx_checkpoint", "nnx-core": "_nnx_autoload.py,nnx,nnx_core"}
"""The top-level names of the wheels that have more than one."""


def build_and_check(session: nox.Session) -> dict[str, str]:
    """Build all, look into it with tools that others publish for it, and return the wheels by their names."""
    session.install(*TOOLS_FOR_WHEELS)
    for folder in PROJECTS.values():
        session.run("validate-pyproject", os.fspath(folder / "pyproject.toml"), silent=True)
    built = build(session, "sdist", "wheel")
    session.run("twine", "check", "--strict", *built)
    wheels = {wheel_of(path): path for path in built if path.endswith(".whl")}
    for name, wheel in wheels.items():
        several = ("--toplevel", IMPORT_NAMES[name]) if name in IMPORT_NAMES else ()
        session.run("check-wheel-contents", *several, wheel)
    return wheels


def new_environment(session: nox.Session, name: str) -> str:
    """Make an empty virtual environment, whose path has a space, and return its Python."""
    folder = ROOT / ".nox" / f"{name} alone"
    shutil.rmtree(folder, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", os.fspath(folder), external=True)
    return os.fspath(folder / "bin" / "python")


def pip(session: nox.Session, python: str, *arguments: str) -> None:
    """Run the pip of an environment; what is never imported is never compiled either."""
    session.run(python, "-m", "pip", "-qq", *arguments, external=True, env={"PIP_NO_COMPILE": "1"})


def install(session: nox.Session, python: str, *wheels: str) -> None:
    """Install wheels, and whatever they need at the tested versions, in one resolver run."""
    pip(session, python, "install", "--constraint", os.fspath(ROOT / "constraints.txt"), *wheels)


def installed(session: nox.Session, python: str) -> set[str]:
    """The names of the distributions in an environment."""
    listed = session.run(python, "-m", "pip", "list", "--format", "json", external=True, silent=True)
    return {entry["name"] for entry in json.loads(str(listed))}


def expect_ours(session: nox.Session, found: set[str], expected: Sequence[str]) -> None:
    """Stop where an environment has others of our distributions than it should."""
    ours = found & set(PROJECTS)
    if ours != set(expected):
        session.error(f"there is {sorted(ours)}, where {sorted(expected)} should be")


def ask(session: nox.Session, python: str) -> dict[str, list[str]]:
    """Ask whether all is well, and Lightning for each strategy by its name; return them by distribution."""
    nnx = os.fspath(Path(python).with_name("nnx"))
    session.run(nnx, "--help", external=True, silent=True)
    session.run(nnx, "doctor", "--strict", external=True)
    listed = session.run(nnx, "list", "--json", external=True, silent=True)
    names: dict[str, list[str]] = {}
    for strategy in json.loads(str(listed))["strategies"]:
        if strategy["status"] == "installed":
            names.setdefault(strategy["provided_by"].split()[0], []).append(strategy["name"])
    every = [name for some in names.values() for name in some]
    session.run(python, "-I", "-c", CHOOSE, *every, external=True)
    return names


def try_each(
    session: nox.Session, python: str, plugins: Sequence[str], checks: Sequence[str] = QUICK_CHECKS
) -> None:
    """Ask for every strategy, and try the first of each plugin."""
    names = ask(session, python)
    for plugin in plugins:
        try_plugin(session, python, plugin, names.get(plugin, [])[:1], checks)


def try_plugin(
    session: nox.Session,
    python: str,
    plugin: str,
    names: Sequence[str],
    checks: Sequence[str] = QUICK_CHECKS,
) -> None:
    """Try a plugin in real processes: by its script, or its strategies by checks of conformance."""
    if plugin in SCRIPTS:
        # Ray's workers do not start where TMPDIR is inside of an environment of nox's
        away = {"TMPDIR": tempfile.gettempdir()}
        session.run(python, "-I", "-c", *SCRIPTS[plugin], external=True, env=away)
        return
    nnx = os.fspath(Path(python).with_name("nnx"))
    only = [argument for check in checks for argument in ("--only", check)]
    for name in names:
        session.run(nnx, "conformance", name, *only, "--verbose", external=True, env={"OMP_NUM_THREADS": "1"})


def wheel_of(path: str) -> str:
    """The distribution that a wheel is of, by its file name."""
    return Path(path).name.partition("-")[0].replace("_", "-")


# --- what the projects say of themselves ---


def version_of(folder: Path) -> str:
    """The version of a distribution."""
    return str(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def requirements(project: str) -> list[str]:
    """What a distribution says it needs, without its extras."""
    text = (PROJECTS[project] / "pyproject.toml").read_text(encoding="utf-8")
    declared: list[str] = tomllib.loads(text)["project"]["dependencies"]
    return declared


def needed(plugin: str) -> list[str]:
    """A plugin, and those of our other plugins that it needs."""
    ours = [name_of(requirement) for requirement in requirements(plugin)]
    return [plugin, *(other for name in ours if name in PLUGINS for other in needed(name))]


def floors() -> list[str]:
    """The lowest version that is accepted of everything that is not ours, as pins.

    A floor that two packages name differently is the higher of the two.
    """
    lowest: dict[str, tuple[int, ...]] = {}
    for project in PROJECTS:
        for requirement in requirements(project):
            found = re.search(r">=([\d.]+)", requirement)
            name = name_of(requirement)
            if found and name not in PROJECTS:
                floor = tuple(map(int, found[1].split(".")))
                lowest[name] = max(floor, lowest.get(name, ()))
    return [f"{name}=={'.'.join(map(str, floor))}" for name, floor in sorted(lowest.items())]


def name_of(requirement: str) -> str:
    """The distribution that a requirement is for."""
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


def with_version(text: str, new: str, *, own: bool) -> str:
    """A pyproject.toml with the bounds that go with a version of ours; one of our `own` gets it too."""
    major, minor, _ = new.split(".")
    bounds = f">={major}.{minor},<{major}.{int(minor) + 1}"
    text = re.sub(r'"(nnx-[a-z]+)>=[\d.]+,<[\d.]+"', rf'"\1{bounds}"', text)
    return re.sub(r'(?m)^version = "[^"]+"$', f'version = "{new}"', text) if own else text
