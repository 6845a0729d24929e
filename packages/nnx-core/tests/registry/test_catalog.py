import importlib.util
import json
import re
import sys

import pytest

from nnx_core.names.catalog import historical, known
from nnx_core.names.discovery import inventory
from nnx_core.names.spec import LIGHTNING_NAMES
from nnx_test_helpers.repository import from_repository

CATALOG = from_repository(__file__, "registry")
OFFICIAL = """
distribution = "acme"
tier = "community"
summary = "x"
api = "1.0"
[[strategies]]
name = "acme"
summary = "x"
use_when = "x"
"""
OLD = """
tier = "historical"
[[strategies]]
name = "ancient"
was = "x"
successor = "acme"
"""


@pytest.fixture(scope="module")
def build_index():
    if sys.version_info < (3, 11):
        pytest.skip("the build script needs Python 3.11")
    spec = importlib.util.spec_from_file_location("build_index", CATALOG / "build_index.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shipped_catalog_and_its_page_are_built_from_the_registry_folder(build_index):
    assert build_index.INDEX.read_text() == build_index.build(), "run: python registry/build_index.py"
    assert build_index.PAGE.read_text() == build_index.page(build_index.build())
    assert build_index.main(["--check"]) == 0


@pytest.mark.parametrize("made", ["INDEX", "PAGE"])
def test_a_stale_catalog_is_noticed(build_index, monkeypatch, tmp_path, capsys, made):
    monkeypatch.setattr(build_index, made, tmp_path / "made")
    assert build_index.main(["--check"]) == 1
    assert capsys.readouterr().out == "made is stale: run python registry/build_index.py\n"
    monkeypatch.setattr(build_index, "INDEX", tmp_path / "index")
    monkeypatch.setattr(build_index, "PAGE", tmp_path / "page")
    assert build_index.main([]) == 0
    assert build_index.main(["--check"]) == 0


def test_the_page_has_every_name_with_what_to_install_and_what_replaced_it(build_index, tmp_path):
    written(tmp_path, acme=OFFICIAL, old=OLD.replace('was = "x"', 'was = "x"\nuntil = "1.9"\nhow = "So."'))
    page = build_index.page(build_index.build(tmp_path))
    assert "pip install acme" in page
    assert "| `acme` | x | x |  |" in page
    assert "| `ancient` | x | 1.9 | `acme` | So. |" in page
    shipped = build_index.PAGE.read_text()
    assert all(f"| `{name}` |" in shipped for name in {*known(), *historical()})


def written(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


def test_a_valid_catalog_is_built(build_index, tmp_path):
    index = json.loads(build_index.build(written(tmp_path, acme=OFFICIAL, old=OLD)))
    assert index["plugins"][0]["distribution"] == "acme"
    assert index["historical"][0]["successor"] == "acme"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tier =", "teir ="), "'tier' is a required property"),
        (('"community"', '"friends"'), r"\$.tier: 'friends' is not one of"),
        (('name = "acme"', 'name = "Acme"'), r"strategies\[0\].name: 'Acme' does not match"),
        (('use_when = "x"', ""), r"strategies\[0\]: 'use_when' is a required property"),
        (('use_when = "x"', 'use_when = ""'), r"strategies\[0\].use_when: '' should be non-empty"),
        (('use_when = "x"', "use_when = 3"), r"use_when: 3 is not of type 'string'"),
        (('use_when = "x"', 'use_when = "x"\nspeed = "high"'), "'speed' was unexpected"),
        (('distribution = "acme"', 'distribution = "other"'), "not named after its distribution"),
        (('api = "1.0"', 'api = "new"'), r"\$.api: 'new' does not match"),
        (('api = "1.0"', 'api = "1.0"\nurl = "http://x"'), r"\$.url: 'http://x' does not match"),
        (("[[strategies]]", "[[strategy]]"), "'strategies' is a required property"),
    ],
)
def test_a_file_that_breaks_the_schema_is_refused(build_index, tmp_path, change, message):
    assert change[0] in OFFICIAL
    written(tmp_path, acme=OFFICIAL.replace(*change))
    with pytest.raises(ValueError, match=message):
        build_index.build(tmp_path)


def test_a_historical_name_needs_a_successor_that_exists(build_index, tmp_path):
    written(tmp_path, acme=OFFICIAL, old=OLD.replace('"acme"', '"nobody"'))
    with pytest.raises(ValueError, match="ancient: its successor 'nobody' does not exist"):
        build_index.build(tmp_path)


def test_two_files_cannot_claim_one_name(build_index, tmp_path):
    written(tmp_path, acme=OFFICIAL, old=OLD.replace('"ancient"', '"acme"'))
    with pytest.raises(ValueError, match="claimed twice: acme"):
        build_index.build(tmp_path)


def test_the_successors_that_the_script_allows_are_lightnings(build_index):
    assert build_index.LIGHTNING_SUCCESSORS <= LIGHTNING_NAMES


@pytest.fixture
def installed(clean_names):
    """The plugins that are installed and in the catalog."""
    distributions = {entry.distribution for entry in known().values()}
    found = [plugin for plugin in inventory().plugins if plugin.distribution in distributions]
    assert found
    return found


def test_an_installed_distribution_of_the_catalog_provides_exactly_its_names(installed):
    for plugin in installed:
        names = {entry.name for entry in known().values() if entry.distribution == plugin.distribution}
        assert set(plugin.strategies) == names, "run: python registry/build_index.py"


def _plugin_of(project):
    """Return the source of a distribution's entry point; empty if it has none."""
    found = re.search(r"^\[project.entry-points.nnx\]\n\w+ = \"([\w.]+)\"", project.read_text(), re.MULTILINE)
    if found is None:
        return ""
    return (project.parent / "src" / f"{found[1].replace('.', '/')}.py").read_text()


def test_every_plugin_of_this_repository_is_in_the_catalog():
    projects = [
        *CATALOG.parent.glob("packages/*/pyproject.toml"),
        *CATALOG.parent.glob("examples/*/pyproject.toml"),
    ]
    plugins = [path for path in projects if "def nnx_strategies" in _plugin_of(path)]
    assert len(plugins) >= 4
    names = {re.search(r'^name = "(.+)"', path.read_text(), re.MULTILINE)[1] for path in plugins}
    assert names <= {entry.distribution for entry in known().values()}


@pytest.mark.parametrize("name", sorted({entry.docs for entry in known().values()} - {""}))
def test_the_page_that_the_catalog_names_exists(name):
    assert (CATALOG.parent / name).is_file()


def test_no_catalogued_name_is_one_of_lightnings():
    assert not set(known()) & LIGHTNING_NAMES
    # Trainer has lost the name that Fabric still has.
    assert set(historical()) & LIGHTNING_NAMES == {"dp"}


def test_editors_complete_the_names_of_our_own_packages():
    from typing import get_args

    from nnx_core.lightning.factory import KnownName

    ours = [name for name, entry in known().items() if entry.tier == "official"]
    assert list(get_args(KnownName)) == sorted(ours)
