"""The published files: wheels and sdists are built, and their content is checked.

`nox -s wheels isolation` tests that they install and work in an empty environment.
"""

from __future__ import annotations

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
PROJECTS = [*PACKAGES, ROOT / "examples/tiny_backend"]
BUILT = ("nnx-checkpoint", "nnx-core", "tiny_backend")
"""Projects that README's test command builds; `nox -s full` and `nox -s contents` build all."""
OLD_AND_NEW = [("0.1.0", "0.2.0", ">=0.2,<0.3"), ("0.9.4", "1.0.0", ">=1.0,<1.1")]


def build(project: Path, target: Path, *kinds: str) -> list[Path]:
    chosen = [argument for kind in kinds for argument in ("-t", kind)]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", target, *chosen],
        cwd=project,
        check=True,
        capture_output=True,
        timeout=120,
    )
    return sorted(target.iterdir())


@pytest.fixture(
    scope="module",
    params=[path if path.name in BUILT else pytest.param(path, marks=pytest.mark.full) for path in PROJECTS],
    ids=lambda path: path.name,
)
def project(request):
    return request.param


@pytest.fixture(scope="module")
def built(project, tmp_path_factory) -> tuple[Path, Path]:
    """A project's sdist and wheel."""
    sdist, wheel = sorted(
        build(project, tmp_path_factory.mktemp("what was built"), "sdist", "wheel"),
        key=lambda path: path.suffix != ".gz",
    )
    return sdist, wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def unpack(sdist: Path, target: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (folder,) = target.iterdir()
    return folder


def metadata(wheel: Path) -> Message:
    (text,) = [data for name, data in contents(wheel).items() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(text)


def sources(project: Path) -> dict[str, bytes]:
    """Return the tracked and trackable files below src, with all kinds of names."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src"],
        cwd=project,
        check=True,
        capture_output=True,
        timeout=60,
    )
    paths = [project / name for name in os.fsdecode(listed.stdout).split("\0") if name]
    return {
        path.relative_to(project / "src").as_posix(): path.read_bytes() for path in paths if path.exists()
    }


def modules(wheel: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(wheel).items() if ".dist-info/" not in name}


def test_a_wheel_holds_just_the_files_below_src(project, built):
    _, wheel = built
    assert modules(wheel) == sources(project)


def test_a_wheel_that_is_built_from_the_sdist_holds_the_same(built, tmp_path):
    sdist, wheel = built
    (again,) = build(unpack(sdist, tmp_path / "a folder with spaces"), tmp_path / "again", "wheel")
    assert contents(again) == contents(wheel)


def test_a_wheel_is_typed_and_has_no_tests(built):
    names = set(modules(built[1]))
    packages = {name.partition("/")[0] for name in names if name.endswith("/__init__.py")}
    assert packages
    assert all(f"{package}/py.typed" in names for package in packages)
    ours = [name for name in names if "/template/" not in name]  # which renders a project that has tests
    assert [name for name in ours if re.search(r"(^|/)(tests?|conftest\.py|test_[^/]*)(/|$)", name)] == []


def test_the_core_ships_its_catalog_and_its_template(project, built):
    if project.name != "nnx-core":
        return
    names = set(modules(built[1]))
    assert [name for name in names if re.search(r"^nnx_core/.*catalog.*\.json$", name)]
    assert {"nnx_core/template/copier.yml", "nnx_core/template/project/.gitignore.jinja"} <= names


def test_metadata_says_what_a_stranger_wants_to_know(project, built):
    about = metadata(built[1])
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.10"
    assert 20 < len(about["Summary"]) <= 120
    assert about.get_payload().strip() == (project / "README.md").read_text().strip()
    if project in PACKAGES:
        expected = {"pytorch", "distributed-training"}
        if project.name != "nnx-checkpoint":  # which needs no Lightning
            expected |= {"lightning", "strategy"}
        assert expected <= set(about["Keywords"].split(","))
        assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(about.get_all("Classifier"))


def test_a_package_ships_the_license_of_the_repository(project, built):
    if project not in PACKAGES:
        return
    (shipped,) = [data for name, data in contents(built[1]).items() if name.endswith("/licenses/LICENSE")]
    assert shipped == (ROOT / "LICENSE").read_bytes()


def test_what_a_package_index_shows_of_a_readme_links_to_nothing_in_the_repository(project):
    if project not in PACKAGES:
        return
    targets = re.findall(r"\]\(([^)#\s]+)", (project / "README.md").read_text())
    assert [target for target in targets if "://" not in target] == []


# --- versions ---


@pytest.fixture(scope="module")
def noxfile():
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("old", "new", "bounds"), OLD_AND_NEW)
def test_a_new_version_comes_with_its_bounds(noxfile, old, new, bounds):
    text = (
        f'version = "{old}"\ndependencies = ["nnx-core>=0.1,<0.2", "torch>=2.11,<3", "nnx-fsdp>=0.1,<0.2"]\n'
    )
    assert noxfile.with_version(text, new, own=True) == (
        f'version = "{new}"\ndependencies = ["nnx-core{bounds}", "torch>=2.11,<3", "nnx-fsdp{bounds}"]\n'
    )
    assert f'version = "{old}"' in noxfile.with_version(text, new, own=False)


def test_every_bound_on_a_package_of_ours_goes_with_the_version(noxfile):
    projects = [project / "pyproject.toml" for project in PROJECTS]
    templates = sorted(ROOT.glob("packages/*/src/**/pyproject.toml.jinja"))
    assert templates
    version = re.search(r'(?m)^version = "(.*)"$', projects[0].read_text())[1]
    for path in [*projects, *templates]:
        text = path.read_text()
        assert noxfile.with_version(text, version, own=path in projects) == text, path


def test_the_oldest_versions_are_those_that_the_packages_name(noxfile):
    assert {"torch==2.11", "lightning==2.6.4"} <= set(noxfile.floors())
    assert not [pin for pin in noxfile.floors() if pin.startswith("nnx-")]


def test_a_plugin_is_installed_with_those_of_ours_that_it_needs(noxfile):
    assert noxfile.needed("nnx-fsdp") == ["nnx-fsdp"]
    assert noxfile.needed("nnx-colossalai") == ["nnx-colossalai", "nnx-fsdp"]
