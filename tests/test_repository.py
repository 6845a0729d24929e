"""Ratchets: measured limits and invariants of the repository itself."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx
import pytest
import yaml
from packaging.requirements import Requirement

from nnx_core.cli.choose import QUESTIONS

if sys.version_info >= (3, 11):
    import tomllib
else:  # tomli is what pytest itself needs below 3.11
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
SOURCES = sorted(path for package in PACKAGES for path in package.glob("src/**/*.py"))
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])

FILE_LINES = 800
FUNCTION_LINES = 60


def project(package: Path) -> dict:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(markdown: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of one language, each with the line it starts on."""
    found, fence, start = [], None, 0
    for number, line in enumerate(markdown.read_text().splitlines(), start=1):
        opening = re.match(r"\s*```(\w*)", line)
        if fence is None and opening:
            fence, start, body = opening[1], number, []
        elif fence is not None and line.strip() == "```":
            if fence == language:
                found.append((start, "\n".join(body)))
            fence = None
        elif fence is not None:
            body.append(line)
    return found


def readme_commands() -> list[str]:
    """The commands of the README's first two shell blocks: the main job, then all tests."""
    return [text.strip() for _, text in blocks(ROOT / "README.md", "bash")[:2]]


def test_the_first_readme_command_makes_an_environment_and_runs_the_main_job():
    main_job, _ = readme_commands()
    assert main_job == (
        "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt"
        " && .venv/bin/python examples/train_gpt.py"
    )


def test_ci_runs_the_very_command_by_which_the_readme_runs_the_tests_and_a_share_of_those_marked_full():
    _, tests = readme_commands()
    assert tests == (
        "python3 -m venv .venv && .venv/bin/pip install -r requirements-dev.txt"
        " && .venv/bin/python -m pytest -n 3 --dist loadfile"
    )
    script = (ROOT / ".ci/run").read_text().splitlines()
    assert tests in script
    assert any(line.endswith('-m full "$@"') for line in script[script.index(tests) :])


def test_the_readme_is_short_and_asks_the_questions_of_nnx_choose_before_its_table_of_strategies():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for page in (text, (ROOT / "docs/index.md").read_text()):
        above = " ".join(page[: page.index("\n|")].split())
        assert [question.text for question in QUESTIONS if question.text not in above] == []


def test_ci_can_be_executed_and_stops_at_the_first_failure():
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_the_form_that_github_reads(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow.keys() <= {"name", True, "permissions", "concurrency", "env", "jobs"}  # YAML 1.1's `on`
    assert workflow[True].keys() <= {"push", "pull_request", "schedule", "workflow_dispatch"}
    for job in workflow["jobs"].values():
        assert job.keys() >= {"runs-on", "timeout-minutes", "steps"}
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])


def test_a_workflow_runs_what_ci_is_with_the_python_that_it_names():
    (steps,) = [
        job["steps"]
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        if any(step.get("run") == ".ci/run" for step in job["steps"])
    ]
    (python,) = [step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")]
    assert f"Needs Python {python} and pip" in (ROOT / ".ci/run").read_text()
    assert f"with Python {python} and pip" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_names_the_pythons_that_the_compat_session_tries(package):
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project(package)["classifiers"]))
    tried = re.search(r"^PYTHONS = \[(.*)\]$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert named == re.findall(r"3\.\d+", tried[1])
    assert project(package)["requires-python"] == f">={named[0]}"
    assert "Development Status :: 3 - Alpha" in project(package)["classifiers"]  # until CUDA is measured


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_package_needs_matplotlib(package):
    assert not any(line.startswith("matplotlib") for line in project(package)["dependencies"])


def test_every_package_has_the_same_version():
    versions = {project(package)["name"]: project(package)["version"] for package in PACKAGES}
    assert len(set(versions.values())) == 1, versions


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_plugin_accepts_just_the_cores_of_its_own_minor_version(package):
    if package.name == "nnx-checkpoint":
        return
    major, minor, _ = project(package)["version"].split(".")
    below = "nnx-checkpoint" if package.name == "nnx-core" else "nnx-core"
    wanted = f"{below}>={major}.{minor},<{major}.{int(minor) + 1}"
    assert wanted in project(package)["dependencies"]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_is_typed_and_introduces_itself(package):
    modules = [path.parent for path in package.glob("src/*/__init__.py")]
    assert modules
    assert all((module / "py.typed").is_file() for module in modules)
    readme = (package / "README.md").read_text()
    assert f"pip install {package.name}" in readme
    assert len(readme.splitlines()) > 5


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_is_listed_in_the_requirements_and_searched_for_tests(package):
    files = [ROOT / "requirements.txt", ROOT / "requirements-dev.txt"]
    assert f"-e packages/{package.name}" in [line for file in files for line in file.read_text().splitlines()]
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    assert f"packages/{package.name}/tests" in paths


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_the_tests_of_a_package_use_jobs_of_its_own_and_no_others(package):
    own = {path.stem for path in package.glob("tests/jobs/*.py")}
    used = set()
    for path in package.glob("tests/**/*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        for node in imports:
            if node.module == "jobs":
                used |= {alias.name for alias in node.names}
            elif node.module and node.module.startswith("jobs."):
                used.add(node.module.removeprefix("jobs."))
    assert used <= own


def test_the_changelog_has_an_entry_for_the_version():
    version = project(PACKAGES[0])["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_no_source_file_grows_beyond_what_one_reads_at_a_sitting():
    lines = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_no_file_is_divided_by_banners() -> None:
    found = [path for path in SOURCES if re.search(r"^ *# -{3}", path.read_text(), re.MULTILINE)]
    assert found == [], "a file has one subject; with two it is two files"


def test_no_modules_import_one_another_in_circles_not_even_in_functions_or_for_types():
    names = [folder.parent.name for package in PACKAGES for folder in package.glob("src/*/__init__.py")]
    found = grimp.build_graph(names[0], *names[1:], cache_dir=None)
    imports = networkx.DiGraph(
        (module, other)
        for module in found.modules
        for other in found.find_modules_directly_imported_by(module)
    )
    assert len(imports) > 100
    assert [circle for circle in networkx.strongly_connected_components(imports) if len(circle) > 1] == []


def test_no_function_grows_beyond_what_fits_on_a_screen():
    found = {relative(path): long_functions(path.read_text(), limit=FUNCTION_LINES) for path in SOURCES}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_a_long_function_would_be_found():
    body = "\n".join("    x = 1" for _ in range(FUNCTION_LINES))
    assert long_functions(f"def f():\n{body}", limit=FUNCTION_LINES) == [f"f: {FUNCTION_LINES + 1} lines"]


def long_functions(source: str, *, limit: int) -> list[str]:
    sizes = ((node.name, node.end_lineno - node.lineno + 1) for node in functions(ast.parse(source)))
    return [f"{name}: {size} lines" for name, size in sizes if size > limit]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_import_contracts_hold():
    script = Path(sysconfig.get_path("scripts")) / "lint-imports"
    finished = subprocess.run([script, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_what_import_torch_runs_needs_only_the_standard_library_and_nnx():
    tree = ast.parse((ROOT / "packages/nnx-core/src/_nnx_autoload.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    tops = {name.partition(".")[0] for name in imported}
    assert tops - {"nnx_core"} <= sys.stdlib_module_names
    at_import = {name for node in tree.body if isinstance(node, ast.ImportFrom) for name in [node.module]}
    assert not any(name.startswith("nnx") for name in at_import)


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = [pin for pin in parsed if pin.marker is None or pin.marker.evaluate()]
    assert len({pin.name for pin in here}) == len(here), "a pin counts twice"
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in here}


def test_what_is_installed_is_what_the_constraints_pin():
    # torch says 2.13.0+cpu
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in pins()}
    expected = pins()
    expected["torch"] = os.environ.get("NNX_TORCH", expected["torch"])  # to try another torch, name it
    assert installed == expected, "run: pip install -r requirements-dev.txt"


def test_python_in_the_documentation_compiles():
    for path in MARKDOWN:
        for line, text in blocks(path, "python"):
            compile(text, f"{relative(path)}:{line}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_files_that_the_documentation_links_to_exist():
    dead = []
    for path in MARKDOWN:
        targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
        local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
        dead += [(relative(path), target) for target in local if not (path.parent / target).exists()]
    assert dead == []


def places_in_the_tour() -> list[str]:
    return sorted(set(re.findall(r"`(\w+(?:\.\w+)*:\w+(?:\.\w+)*)`", (ROOT / "docs/tour.md").read_text())))


def test_every_place_that_the_tour_visits_exists():
    for place in places_in_the_tour():
        if place != "module:name":
            expect_place(*place.split(":"))


def expect_place(module: str, name: str) -> None:
    sources = [package / "src" / module.replace(".", "/") for package in PACKAGES]
    files = [
        file for path in sources for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()
    ]
    assert len(files) == 1, f"no module {module}"
    body = ast.parse(files[0].read_text()).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{module} does not define {name}"
        body = getattr(found[0], "body", [])
