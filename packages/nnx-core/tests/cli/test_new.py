"""``nnx new``: its questions and refusals; the project that it renders is a working plugin."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import copier
import pytest

from nnx_checkpoint.cli.command import main
from nnx_conformance import Subject
from nnx_conformance.check import Reference
from nnx_conformance.runner import Session, select_checks
from nnx_core.cli.new import Given, run
from nnx_core.names.spec import API_VERSION
from nnx_test_helpers.repository import from_repository

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parents[2]
LONGEST = "a" * 15 + "-" + "b" * 16
PROJECTS = {
    "nnx-mine": Given(distribution="nnx-mine", strategy="mine", kind="backend", author=""),
    "acme": Given(distribution="acme", strategy="acme_zero", kind="lightning", author="Ä. Me"),
    LONGEST: Given(distribution=LONGEST, strategy="m" * 32, kind="backend", description="x" * 80),
}
QUICK = ("losses_float32", "accumulation", "clip_by_norm", "weights_resume")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """A folder with a project of each kind, and one with the longest names that are allowed."""
    folder = tmp_path_factory.mktemp("rendered")
    for name, given in PROJECTS.items():
        assert run(folder / name, given, defaults=True, as_json=True) == 0
    return folder


@pytest.fixture(scope="module")
def site(rendered):
    """The wheels of both kinds, unpacked as pip would install them."""
    folder = rendered / "site"
    for name in ("nnx-mine", "acme"):
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(rendered / "wheels")]
        subprocess.run(build, cwd=rendered / name, check=True, capture_output=True, timeout=60)
    for wheel in (rendered / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


@pytest.fixture
def command(capsys, monkeypatch):
    """Run `nnx new` in this process; returns exit code, standard output and error."""

    def run(*arguments, answers=""):
        monkeypatch.setattr(sys, "argv", ["nnx", "new", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code or 0, captured.out, captured.err

    return run


def ruff(*arguments, project):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "."],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def git(directory, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, timeout=60)


@pytest.fixture
def import_from(monkeypatch):
    """Let this process, and jobs of the pool, import from a folder, and forget the imports afterwards."""
    before = set(sys.modules)
    yield lambda folder: monkeypatch.syspath_prepend(str(folder))
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("nnx_mine", "acme", "nnx_wrong", "nnx_followed"):
            del sys.modules[name]


def verdicts(pool, tmp_path, target, checks, **options):
    """Return the verdicts of some conformance checks, from the workers that all tests share."""
    session = Session(Subject(target, options=options), pool=pool, reference=Reference(pool))
    found = {}
    for check in select_checks(checks):
        directory = tmp_path / check.name
        directory.mkdir()
        result = session.try_check(check, directory)
        found[check.name] = (result.verdict, result.detail)
    return found


def test_module(path):
    spec = importlib.util.spec_from_file_location(f"rendered_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


test_module.__test__ = False


# --- what it renders ---


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", PROJECTS)
def test_a_rendered_project_is_clean_and_complete(rendered, name):
    project = rendered / name
    ruff("check", "--no-cache", project=project)
    ruff("format", "--no-cache", "--check", project=project)
    files = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    module = name.replace("-", "_")
    engine = {"strategy.py"} if name == "acme" else {"backend.py", "averaging.py", "options.py"}
    assert files == {
        *(".copier-answers.yml", ".gitignore", ".github/workflows/tests.yml", "README.md", "pyproject.toml"),
        *(f"catalog/{name}.toml", "tests/test_conformance.py", "tests/test_gradients.py"),
        *(f"src/{module}/{file}" for file in {"__init__.py", "plugin.py", "py.typed", *engine}),
    }
    for file in files:
        text = (project / file).read_text(encoding="utf-8")
        assert "{%" not in text
        assert "{{" not in text.replace("${{ matrix.python }}", "")
        assert str(HERE) not in text and str(Path.cwd()) not in text


def test_the_rendered_dependency_is_this_minor_version_of_the_core(rendered):
    core = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    major, minor, _ = core["version"].split(".")
    project = tomllib.loads((rendered / "nnx-mine/pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"nnx-core>={major}.{minor},<{major}.{int(minor) + 1}"]
    assert project["requires-python"] == core["requires-python"]


def test_the_catalog_takes_the_rendered_entry(rendered, tmp_path):
    if sys.version_info < (3, 11):
        pytest.skip("the build script needs Python 3.11")
    build_index = test_module(from_repository(__file__, "registry/build_index.py"))
    for name in PROJECTS:
        shutil.copy(rendered / name / "catalog" / f"{name}.toml", tmp_path)
    index = build_index.build(tmp_path)
    assert all(f'"{given.strategy}"' in index for given in PROJECTS.values())
    assert {plugin["api"] for plugin in json.loads(index)["plugins"]} == {"{}.{}".format(*API_VERSION)}


LIST = """
import sys
from nnx_checkpoint.cli.command import main

sys.argv = ["nnx", "list", "--json"]
try:
    main()
finally:
    heavy = {"torch", "lightning", "copier"} & set(sys.modules)
    assert not heavy, heavy
"""


def test_installed_both_kinds_are_listed_without_importing_torch_or_copier(run_python, site, monkeypatch):
    monkeypatch.setenv("NNX_LOAD_PLUGINS", "mine,acme_zero")
    listed = json.loads(run_python(LIST, PYTHONPATH=str(site)).stdout)
    assert listed["problems"] == []
    found = {entry["name"]: entry["provided_by"] for entry in listed["strategies"]}
    assert found == {"mine": "nnx-mine 0.1.0", "acme_zero": "acme 0.1.0"}
    assert (site / "nnx_mine/py.typed").is_file()


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("target", ["nnx_mine.backend:MineBackend", "acme.strategy:AcmeZeroStrategy"])
def test_both_kinds_keep_promises(pool, tmp_path, import_from, site, target):
    import_from(site)
    assert verdicts(pool, tmp_path, target, QUICK) == dict.fromkeys(QUICK, ("passed", ""))


def test_a_fault_in_the_rendered_backend_would_be_seen(pool, tmp_path, import_from, site):
    broken = shutil.copytree(site / "nnx_mine", tmp_path / "nnx_wrong")
    for file in broken.glob("*.py"):
        text = file.read_text().replace("nnx_mine", "nnx_wrong")
        file.write_text(text.replace("mean / dist.get_world_size()", "mean"))
    import_from(tmp_path)
    found = verdicts(pool, tmp_path, "nnx_wrong.backend:MineBackend", ["losses_float32"])
    assert found["losses_float32"][0] == "failed"


def test_the_tests_of_the_rendered_backend_pass(rendered, site, import_from):
    import_from(site)
    module = test_module(rendered / "nnx-mine/tests/test_gradients.py")
    (test,) = [getattr(module, name) for name in dir(module) if name.startswith("test_")]
    ((mark,),) = [test.pytestmark]
    assert len(mark.args[1]) == 2
    for case in mark.args[1]:
        test(*case)


# --- the tutorial ---


def page():
    return from_repository(__file__, "docs/writing-a-backend.md").read_text()


def follow_the_page(project):
    """Make the changes of the tutorial, in the files that the titles of its blocks name."""
    blocks = re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', page(), re.MULTILINE | re.DOTALL)
    for title, text in blocks:
        name, _, place = title.partition(", ")
        file = project / name
        if not place:
            file.write_text(text)
        elif place == "at the top":
            head = "from __future__ import annotations\n"
            assert head in file.read_text()
            file.write_text(file.read_text().replace(head, head + text))
        else:
            method = re.search(r"in place of (\w+)", place)[1]
            old = re.search(rf"    def {method}\(.*?(?=\n    def |\n    @|\Z)", file.read_text(), re.DOTALL)
            _, _, new = text.partition("    ...\n\n")
            file.write_text(file.read_text().replace(old[0], new))
    return [title for title, _ in blocks]


@pytest.fixture(scope="module")
def followed(rendered):
    project = shutil.copytree(rendered / "nnx-mine", rendered / "followed")
    assert len(follow_the_page(project)) == 7
    ruff("check", "--no-cache", "--fix", project=project)
    ruff("format", "--no-cache", project=project)
    # Another name, because the workers keep the module that the test before has imported.
    shutil.move(project / "src/nnx_mine", project / "src/nnx_followed")
    for file in project.rglob("*.py"):
        file.write_text(file.read_text().replace("nnx_mine", "nnx_followed"))
    return project


@pytest.mark.full
@pytest.mark.parametrize("megabytes", [25.0, 0.0001])
def test_the_backend_of_the_tutorial_keeps_promises(pool, tmp_path, import_from, followed, megabytes):
    import_from(followed / "src")
    checks = (*QUICK[:3], "parameters_used_sometimes")
    found = verdicts(pool, tmp_path, "nnx_followed.backend:MineBackend", checks, bucket_megabytes=megabytes)
    assert found == dict.fromkeys(checks, ("passed", ""))


def test_the_test_of_the_tutorial_passes(followed, import_from):
    import_from(followed / "src")
    module = test_module(followed / "tests/test_overlap.py")
    tests = [getattr(module, name) for name in dir(module) if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_the_lines_that_the_tutorial_prints_are_those_of_the_command(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, _ = command("nnx-mine", "--defaults")
    assert code == 0
    assert output in page()


# --- what it asks and refuses ---


def test_it_asks_what_it_was_not_told_and_asks_again_after_an_impossible_answer(command, tmp_path):
    answers = "nnx-mine\nFast Zero\nfast_offload\n\nZero, but fast.\nMe\n"
    code, output, error = command(tmp_path / "new", answers=answers)
    assert code == 0
    assert "error: 'Fast Zero' is not a valid name" in error
    assert "remedy: Choose another name, for example 'fast_zero'." in error
    assert "remark: `fabric run` does not offer names that contain 'offload'" in error
    assert output.startswith(f"nnx-mine: 14 files in {tmp_path / 'new'}. Next:\n  cd ")
    assert 'description="Zero, but fast",' in (tmp_path / "new/src/nnx_mine/plugin.py").read_text()


def test_without_anybody_to_ask_it_says_so(command, tmp_path):
    code, output, error = command(tmp_path / "new", "--name", "nnx-mine")
    assert (code, output) == (2, "")
    assert "error: there is no answer to 'Name of the strategy" in error
    assert "remedy: Pass it as an option, or pass --defaults." in error
    assert list(tmp_path.iterdir()) == []


def test_json_asks_nothing_and_names_every_file(command, tmp_path):
    code, output, _ = command(tmp_path / "nnx-mine", "--kind", "lightning", "--author", "Me", "--json")
    content = json.loads(output)
    assert code == 0
    assert (content["distribution"], content["strategy"], content["kind"]) == (
        "nnx-mine",
        "mine",
        "lightning",
    )
    assert "src/nnx_mine/strategy.py" in content["files"]
    assert all((tmp_path / "nnx-mine" / file).is_file() for file in content["files"])
    assert content["next"][2:] == ["nnx conformance mine", "pytest"]


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "ddp"}, "the strategy 'ddp' already exists: it is one of Lightning's own."),
        ({"strategy": "fsdp_auto"}, "'fsdp_auto' already exists: the catalog has it from nnx-fsdp."),
        ({"strategy": "horovod"}, "'horovod' already exists: old scripts mean "),
        ({"strategy": "acme"}, "the strategy 'acme' already exists: acme 1.0 provides it here."),
        ({"strategy": "Mine"}, "'Mine' is not a valid name"),
        ({"strategy": "m" * 33}, "which has 33 characters: expected at most 32."),
        ({"name": "nnx_mine"}, "the distribution cannot be called 'nnx_mine'"),
        ({"name": "3d"}, "the distribution cannot be called '3d'"),
        ({"name": "nnx-fsdp"}, "'nnx-fsdp' is a distribution of nnx's catalog."),
        ({"name": "nnx-core"}, "'nnx-core' is a distribution of nnx's catalog."),
        ({"name": "json"}, "would be imported as 'json', which is taken."),
        ({"name": "class"}, "would be imported as 'class', which is taken."),
        ({"name": "torch"}, "would be imported as 'torch', which is taken."),
        ({"name": "nnx"}, "would be imported as 'nnx', which is taken."),
        ({"kind": "fabric"}, "kind='fabric' is not allowed."),
        ({"description": 'the "best"'}, "the description 'the \"best\"' is not a plain line"),
        ({"description": "two\nlines"}, "is not a plain line"),
        ({"description": "{{ strategy }}"}, "is not a plain line"),
        ({"description": " "}, "the description is empty."),
        ({"author": "\\"}, "the author '\\\\' is not a plain line"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    command, tmp_path, clean_names, monkeypatch, options, message
):
    from nnx_core.names.registry import StrategyRegistry

    monkeypatch.setattr(type(StrategyRegistry), "owner", lambda self, name: "acme 1.0")
    StrategyRegistry.register("acme", "acme:Acme")
    given = {"name": "nnx-mine", "author": "Me", **options}
    arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
    code, output, error = command(tmp_path / "new", "--defaults", *arguments)
    assert (code, output) == (2, "")
    assert message in error
    assert "\nremedy: " in error
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_taken_is_refused_and_an_empty_one_is_not(command, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    code, _, error = command(tmp_path, "--defaults")
    assert code == 2
    assert f"error: {str(tmp_path)!r} is not empty.\nremedy: Name a directory that is new or empty." in error
    code, _, error = command(tmp_path / "file", "--defaults")
    assert code == 2
    assert "exists and is not a directory." in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "nnx-mine").mkdir()
    monkeypatch.chdir(tmp_path / "nnx-mine")
    assert command("--defaults")[0] == 0
    assert Path("src/nnx_mine/plugin.py").is_file()
    assert not list(Path().glob(".nnx-new-*"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("error", "message"), [(OSError(28, "No space left"), "No space left"), (RuntimeError("odd"), "odd")]
)
def test_an_error_while_rendering_leaves_nothing_behind(command, tmp_path, monkeypatch, error, message):
    real = copier.run_copy

    def fail(*arguments, **options):
        real(*arguments, **options)
        raise error

    monkeypatch.setattr(copier, "run_copy", fail)
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "new", tmp_path / "empty"):
        if isinstance(error, OSError):
            code, _, printed = command(place, "--name", "nnx-mine", "--defaults")
            assert code == 1
            assert f"the project cannot be written to {str(place)!r}: No space left." in printed
            assert "remedy: Choose a directory that you may write to." in printed
        else:
            with pytest.raises(RuntimeError, match=message):
                run(place, PROJECTS["nnx-mine"], defaults=True, as_json=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_without_copier_it_says_what_to_install(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "copier", None)
    code, output, error = command(tmp_path / "new")
    assert (code, output) == (1, "")
    assert error == (
        "error: `nnx new` renders projects with copier, which is not installed.\n"
        "remedy: Run `pip install 'nnx-core[new]'`.\n"
    )


# --- later ---


def test_an_update_renders_the_frame_again_and_leaves_the_users_work_alone(command, rendered, tmp_path):
    project = shutil.copytree(rendered / "nnx-mine", tmp_path / "project")
    workflow, backend = project / ".github/workflows/tests.yml", project / "src/nnx_mine/backend.py"
    new = workflow.read_text()
    workflow.write_text("name: as an older nnx wrote it\n")
    backend.write_text("# all my own\n")
    (project / "src/nnx_mine/options.py").unlink()
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "x")
    code, output, _ = command(project, "--update")
    assert (code, output) == (0, "Changed: .github/workflows/tests.yml. `git diff` shows how.\n")
    assert workflow.read_text() == new
    assert backend.read_text() == "# all my own\n"
    assert not (project / "src/nnx_mine/options.py").exists()
    code, _, error = command(project, "--update")
    assert code == 2
    assert "is not a git repository in which everything is committed." in error
    git(project, "commit", "-qam", "x")
    assert command(project, "--update") == (0, "Nothing has changed.\n", "")
    assert json.loads(command(project, "--update", "--json")[1])["changed"] == []


def test_an_update_of_anything_else_is_refused(command, tmp_path):
    for text in (None, "just text", "distribution: a"):
        if text:
            (tmp_path / ".copier-answers.yml").write_text(text)
        code, _, error = command(tmp_path, "--update")
        assert code == 2
        assert "does not hold the answers to `nnx new`" in error
        assert "remedy: Name the directory of a project that `nnx new` rendered." in error


def test_a_name_that_no_file_system_takes_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["nnx", "new", str(tmp_path / ("a" * 300)), "--defaults"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (1, 2)
    assert "cannot be a directory: File name too long" in " ".join(capsys.readouterr().err.split())
