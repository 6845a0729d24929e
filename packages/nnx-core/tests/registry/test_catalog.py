import importlib.util
import json
import sys
from pathlib import Path

import pytest

from nnx.catalog import historical, known
from nnx.plugins import inventory
from nnx.spec import LIGHTNING_NAMES

CATALOG = Path(__file__).parents[4] / "registry"
OFFICIAL = """
distribution = "acme"
tier = "community"
summary = "x"
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


def test_the_shipped_catalog_is_built_from_the_registry_folder(build_index):
    assert build_index.INDEX.read_text() == build_index.build(), "run: python registry/build_index.py"
    assert build_index.main(["--check"]) == 0


def test_a_stale_catalog_is_noticed(build_index, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build_index, "INDEX", tmp_path / "index.json")
    assert build_index.main(["--check"]) == 1
    assert "stale: run python registry/build_index.py" in capsys.readouterr().out
    assert build_index.main([]) == 0
    assert build_index.main(["--check"]) == 0


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
        (("tier =", "teir ="), "lacks 'tier'"),
        (('"community"', '"friends"'), "tier is 'friends', not one of"),
        (('name = "acme"', 'name = "Acme"'), r"strategies\[0\].name is 'Acme', which does not match"),
        (('use_when = "x"', ""), r"strategies\[0\] lacks 'use_when'"),
        (('use_when = "x"', 'use_when = ""'), r"strategies\[0\].use_when has 0 characters"),
        (('use_when = "x"', "use_when = 3"), r"use_when is not of type string"),
        (('use_when = "x"', 'use_when = "x"\nspeed = "high"'), "has an unknown key 'speed'"),
        (('distribution = "acme"', 'distribution = "other"'), "not named after its distribution"),
        (
            ('summary = "x"\n[', 'summary = "x"\nurl = "http://x"\n['),
            "url is 'http://x', which does not match",
        ),
        (("[[strategies]]", "[[strategy]]"), "lacks 'strategies'"),
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


@pytest.mark.usefixtures("clean_names")
def test_an_installed_distribution_of_the_catalog_provides_exactly_its_names():
    installed = {plugin.distribution: set(plugin.strategies) for plugin in inventory().plugins}
    for distribution in {entry.distribution for entry in known().values()} & set(installed):
        names = {entry.name for entry in known().values() if entry.distribution == distribution}
        assert installed[distribution] == names


def test_no_catalogued_name_is_one_of_lightnings():
    assert not set(known()) & LIGHTNING_NAMES
    # Trainer has lost the name that Fabric still has.
    assert set(historical()) & LIGHTNING_NAMES == {"dp"}
