import json
import os
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, requires, version

import pytest

from nnx_checkpoint.cli.command import main
from nnx_core.machine.notes import leave_note
from nnx_core.names.registry import StrategyRegistry

FULL = """
from nnx import Capabilities, StrategySpec, hookimpl

@hookimpl
def nnx_strategies():
    return [
        StrategySpec(
            "acme_full",
            "acme_backend:Backend",
            init_params={"size": 7},
            description="does everything [really]",
            use_when="nothing else will do",
            docs_url="https://acme.example/full",
            capabilities=Capabilities(offload=True, precisions=("32-true", "bf16-mixed")),
            options="acme_options:Options",
        )
    ]
"""
OPTIONS = """
from dataclasses import dataclass, field

@dataclass(frozen=True)
class Options:
    mode: str = field(default="fast", metadata={"help": "how it goes", "choices": ("fast", "slow")})
    size: int = field(default=3, metadata={"help": "how large"})
    layers: list = field(default_factory=list)
    needed: int = field(kw_only=True)
    timeout: float = field(default=5.0, metadata={"help": "of its own"})
"""


@pytest.fixture
def nnx_command(capsys, monkeypatch):
    """Run the command in this process; returns exit code, standard output and error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["nnx", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def acme(site):
    site.add("acme", FULL, version="3.1", modules={"acme_options": OPTIONS})
    site.hide("nnx-fairscale")
    return site


def rows(output):
    return {line.split()[0]: line for line in output.splitlines() if line.strip()}


def test_list_shows_what_is_installed_and_nothing_else(acme, nnx_command):
    code, output, error = nnx_command("list")
    assert (code, error) == (0, "")
    assert output.splitlines()[:2] == ["acme 3.1", f"  {'acme_full':<24}does everything [really]"]
    assert "fairscale_fsdp" not in rows(output)


def test_list_all_shows_what_could_be_installed_what_is_broken_and_the_past(site, nnx_command, monkeypatch):
    site.hide("nnx-deepspeed")
    site.add("nnx-nnscaler", "import does_not_exist")
    site.provide("nnx-fairscale", "fairscale_fsdp")
    site.provide("nnx-colossalai", "colossalai")
    monkeypatch.setenv("NNX_DISABLE_PLUGINS", "nnx-colossalai")
    code, output, error = nnx_command("list", "--all")
    assert code == 0
    found = rows(output)
    titles = {
        name: title
        for title, *names in map(str.splitlines, output.split("\n\n"))
        for name in rows("\n".join(names))
    }
    assert titles["nnx_deepspeed_1"] == "nnx-deepspeed (not installed: pip install nnx-deepspeed)"
    assert titles["nnscaler"] == "nnx-nnscaler (broken: run `nnx doctor`)"
    assert titles["fairscale_fsdp"].startswith("nnx-fairscale ") and "(" not in titles["fairscale_fsdp"]
    assert titles["fairscale_oss"] == "nnx-fairscale (missing: run `nnx doctor`)"
    assert titles["colossalai"] == "nnx-colossalai (disabled: run `nnx doctor`)"
    assert titles["ddp_sharded"] == "removed names"
    assert found["ddp_sharded"].split(maxsplit=1)[1] == "use fsdp_auto; it was fairscale's ShardedDDP"
    assert error == (
        "problem: plugin 'nnx_nnscaler': ModuleNotFoundError: No module named 'does_not_exist'.\n"
        "1 problem(s) with plugins: run `nnx doctor`.\n"
    )


def test_list_as_json_is_complete_and_alone_on_standard_output(acme, nnx_command):
    acme.add("bb-broken", "import does_not_exist")
    code, output, _ = nnx_command("list", "--all", "--json")
    assert code == 0
    content = json.loads(output)
    strategies = {entry["name"]: entry for entry in content["strategies"]}
    assert strategies["acme_full"]["provided_by"] == "acme 3.1"
    assert strategies["acme_full"]["capabilities"]["precisions"] == ["32-true", "bf16-mixed"]
    assert strategies["fairscale_fsdp"]["status"] == "not installed"
    assert strategies["ddp_sharded"]["successor"] == "fsdp_auto"
    assert [problem["kind"] for problem in content["problems"]] == ["import"]


def test_list_without_any_strategy_says_where_to_find_some(site, nnx_command, monkeypatch):
    monkeypatch.setenv("NNX_DISABLE_PLUGINS", "nnx-fsdp")
    for name in StrategyRegistry.names():
        StrategyRegistry.remove(name)
    assert nnx_command("list") == (0, "", "No strategy is installed. `nnx list --all` shows what could be.\n")


def test_show_prints_everything_that_is_declared(acme, nnx_command):
    code, output, error = nnx_command("show", "acme_full")
    assert (code, error) == (0, "")
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for expected in (
        "name: acme_full",
        "use when: nothing else will do",
        "provided by: acme 3.1",
        "docs: https://acme.example/full",
        "check it: nnx conformance acme_full",
        "can: offload (states can live in host memory while the device computes)",
        "mode: 'fast' | 'slow' = 'fast'",
        "how it goes",
        "size: int = 7",
        "layers: list = []",
        "needed: int = required",
        "timeout: float = 5.0",
        "of its own",
    ):
        assert expected in lines, expected
    assert not any("pipeline" in line for line in lines)
    assert [line for line in lines if line.startswith("timeout: ")] == ["timeout: float = 5.0"]
    assert any(line.startswith("state_dict_type: ") for line in lines)
    assert lines.index("Options") < lines.index("Capabilities")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "command", [("list",), ("list", "--all"), ("show", "fsdp_auto"), ("search", "memory")]
)
def test_lines_fit_a_terminal_and_names_stay_whole(nnx_command, monkeypatch, width, command):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("nnx_checkpoint.cli.output._on_terminal", lambda: True)
    _, output, _ = nnx_command(*command)
    assert max(map(len, output.splitlines())) <= width
    whole = {"list": "fsdp_auto", "show": "  activation_checkpointing: ", "search": "fsdp_offload"}[
        command[0]
    ]
    assert whole in output


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "verb", ["", "list", "show", "search", "choose", "doctor", "new", "schema", "ckpt", "ckpt merge"]
)
def test_help_fits_a_terminal(nnx_command, monkeypatch, width, verb):
    monkeypatch.setenv("COLUMNS", str(width))
    code, output, _ = nnx_command(*verb.split(), "--help")
    assert code == 0
    assert "--help" in output
    assert max(map(len, output.splitlines())) <= width


def test_a_list_is_one_line_for_each_strategy_under_its_package(nnx_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("nnx_checkpoint.cli.output._on_terminal", lambda: True)
    groups = [group.splitlines() for group in nnx_command("list")[1].split("\n\n")]
    (fsdp,) = [lines for title, *lines in groups if title.startswith("nnx-fsdp ")]
    assert [line.split()[0] for line in fsdp] == ["fsdp_auto", "fsdp_hybrid", "fsdp_manual", "fsdp_offload"]
    assert not any(line.endswith("\u2026") for line in fsdp)


def test_a_list_folds_names_that_are_options_of_another_unless_it_is_asked_for_all(site, nnx_command):
    spec = "StrategySpec('acme_{}', 'acme:A', description='does it'{})"
    names = ", ".join(spec.format(name, more) for name, more in [
        ("one", ""), ("two", ", option_of='acme_one'"), ("three", ", option_of='gone'"),
    ])  # fmt: skip
    site.add(
        "acme",
        f"from nnx import StrategySpec, hookimpl\n@hookimpl\ndef nnx_strategies():\n return [{names}]\n",
    )
    found = rows(nnx_command("list")[1])
    assert found["acme_one"].endswith("does it (1 more with --all)")
    assert "acme_two" not in found
    assert found["acme_three"].endswith("does it")
    everything = rows(nnx_command("list", "--all")[1])
    assert everything["acme_one"].endswith("does it")
    assert everything["acme_two"].endswith("does it")
    entries = {entry["name"]: entry for entry in json.loads(nnx_command("list", "--json")[1])["strategies"]}
    assert entries["acme_two"]["option_of"] == "acme_one"


def test_show_as_json_has_the_options_and_remarks(acme, nnx_command):
    code, output, _ = nnx_command("show", "acme_full", "--json")
    assert code == 0
    content = json.loads(output)
    assert content["options"][0] == {
        "name": "mode",
        "type": "'fast' | 'slow'",
        "default": "'fast'",
        "help": "how it goes",
    }
    assert content["remarks"] == []


def test_show_warns_of_what_lightning_does_to_parts_of_a_name(site, nnx_command):
    site.provide("acme", "acme_offload")
    _, output, _ = nnx_command("show", "acme_offload")
    assert "remark:       `fabric run` does not offer names that contain 'offload'" in output


def test_show_explains_a_name_that_could_be_installed(nnx_command, site):
    site.hide("nnx-fairscale")
    code, output, _ = nnx_command("show", "fairscale_fsdp")
    assert code == 0
    assert "Run `pip install nnx-fairscale`." in output
    code, output, _ = nnx_command("show", "fairscale_fsdp", "--json")
    assert code == 0
    assert json.loads(output)["status"] == "not installed"


def test_show_explains_a_name_of_the_past_and_one_of_lightnings(nnx_command, clean_names):
    code, output, _ = nnx_command("show", "horovod", "--json")
    assert code == 0
    assert json.loads(output)["remedy"].startswith("Use 'ddp' instead. Start it with torchrun")
    code, output, _ = nnx_command("show", "ddp")
    assert code == 0
    assert "Lightning itself" in output


@pytest.mark.full
def test_show_of_a_strategy_whose_plugin_is_broken_finds_fault(site, nnx_command):
    site.add("nnx-nnscaler", "import does_not_exist")
    code, output, _ = nnx_command("show", "nnscaler")
    assert code == 1
    assert "No module named 'does_not_exist'" in output


def test_show_of_an_unknown_name_is_wrong_usage_with_a_suggestion(nnx_command, clean_names):
    assert nnx_command("show", "fspd_auto") == (
        2,
        "",
        "error: no strategy is called 'fspd_auto'.\nremedy: Did you mean 'fsdp_auto'?\n",
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("not_there:Options", "the options of strategy 'acme_full' is declared as 'not_there:Options'"),
        ("acme_options:OPTIONS", "which is not a dataclass"),
    ],
)
def test_show_of_options_that_cannot_be_read_finds_fault(site, nnx_command, options, message):
    site.add("acme", FULL.replace("acme_options:Options", options), modules={"acme_options": "OPTIONS = 3"})
    code, _, error = nnx_command("show", "acme_full")
    assert code == 1
    assert message in error
    assert "\nremedy: " in error


@pytest.mark.full
def test_doctor_is_content_with_healthy_plugins(acme, nnx_command, monkeypatch):
    monkeypatch.delenv("NNX_AUTOLOAD", raising=False)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    code, output, _ = nnx_command("doctor")
    assert code == 0
    assert output.endswith("All is well.\n")
    assert rows(output)["acme"].split() == ["acme", "acme", "3.1", "ok", "acme_full"]
    code, output, _ = nnx_command("doctor", "--json")
    content = json.loads(output)
    assert (code, content["ok"], content["findings"]) == (0, True, [])
    assert set(content["versions"]) == {
        "python",
        "nnx-core",
        "nnx-checkpoint",
        "torch",
        "lightning",
        "pytorch-lightning",
    }
    assert {plugin["name"]: plugin["status"] for plugin in content["plugins"]}["acme"] == "ok"


@pytest.mark.full
def test_doctor_prints_the_notes_of_running_processes_alone(acme, nnx_command, monkeypatch, tmp_path):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    remove = leave_note("another peer joins with PL_INITIAL_PEERS=/ip4/10.0.0.1")
    (folder,) = place.iterdir()
    (folder / str(2**22 + 1)).write_text("of a process that is gone")  # above the largest id of Linux
    line = f"running: process {os.getpid()}: another peer joins with PL_INITIAL_PEERS=/ip4/10.0.0.1\n"
    output = nnx_command("doctor")[1]
    assert line in output and "gone" not in output
    assert json.loads(nnx_command("doctor", "--json")[1])["running"].keys() == {str(os.getpid())}
    remove()
    assert "running:" not in nnx_command("doctor")[1]
    assert list(place.iterdir()) == []


def test_doctor_names_each_broken_plugin_with_its_remedy(site, nnx_command):
    site.add("bb-broken", "raise SystemExit(4)", version="0.2")
    code, output, _ = nnx_command("doctor")
    assert code == 1
    assert (
        "problem: plugin bb_broken of bb-broken 0.2: [import] SystemExit: 4.\n  remedy: Reinstall" in output
    )
    code, output, _ = nnx_command("doctor", "--json")
    assert code == 1
    assert json.loads(output)["ok"] is False


def test_doctor_remarks_on_a_hook_that_is_turned_off_and_strictly_objects(site, nnx_command, monkeypatch):
    monkeypatch.setenv("NNX_AUTOLOAD", "0")
    monkeypatch.setenv("NNX_DISABLE_PLUGINS", "nnx-fsdp")
    code, output, _ = nnx_command("doctor")
    assert code == 0
    assert "remark: zero-import hook: NNX_AUTOLOAD=0 turns it off" in output
    assert nnx_command("doctor", "--strict")[0] == 1


def test_doctor_notices_that_the_zero_import_hook_is_missing(nnx_command, clean_names, monkeypatch):
    monkeypatch.setattr("nnx_core.cli.doctor.entry_points", lambda group: ())
    code, output, _ = nnx_command("doctor")
    assert code == 1
    assert "the entry point of nnx-core is missing" in output
    assert "pip install --force-reinstall --no-deps nnx-core" in output


def test_doctor_warns_of_versions_that_were_malicious(nnx_command, clean_names, monkeypatch):
    monkeypatch.setattr("nnx_core.cli.doctor.version", lambda name: "2.6.3")
    code, output, _ = nnx_command("doctor")
    assert code == 1
    assert "problem: lightning: version 2.6.3 was a malicious upload" in output


def test_doctor_finds_fault_where_torch_or_lightning_is_missing(nnx_command, clean_names, monkeypatch):
    def absent(name):
        if name in ("torch", "lightning", "pytorch-lightning"):
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("nnx_core.cli.doctor.version", absent)
    code, output, _ = nnx_command("doctor")
    assert code == 1
    assert "All is well" not in output
    torch = next(each for each in requires("nnx-checkpoint") or () if each.startswith("torch"))
    lightning = next(each for each in requires("nnx-core") or () if each.startswith("lightning"))
    assert f"problem: torch: nnx-checkpoint needs {torch}, and it is not installed." in output
    assert f"problem: lightning: nnx-core needs {lightning}, and it is not installed." in output
    assert f"\n  remedy: Run `pip install '{torch}'`.\n" in output


def test_doctor_finds_fault_with_what_a_plugin_needs_and_has_not(acme, nnx_command):
    (metadata,) = acme.path.glob("acme-3.1.dist-info/METADATA")
    needs = ("not-there>=1", "torch>=99", "numpy", "absent; python_version < '3'", "absent; extra == 'more'")
    metadata.write_text(metadata.read_text() + "".join(f"Requires-Dist: {each}\n" for each in needs))
    code, output, _ = nnx_command("doctor", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(output)["findings"]}
    assert code == 1
    assert findings.keys() == {"not-there", "torch"}
    assert findings["not-there"]["detail"] == "acme needs not-there>=1, and it is not installed."
    assert (
        findings["torch"]["detail"] == f"acme needs torch>=99, and version {version('torch')} is installed."
    )


@pytest.mark.full
def test_strict_doctor_imports_every_target(acme, nnx_command, monkeypatch):
    monkeypatch.setenv("NNX_LOAD_PLUGINS", "acme")
    assert nnx_command("doctor")[0] == 0
    code, output, _ = nnx_command("doctor", "--strict")
    assert code == 1
    assert "problem: strategy acme_full: strategy 'acme_full' is declared as 'acme_backend:Backend'" in output
    acme.module("acme_backend", "class Backend: pass")
    assert nnx_command("doctor", "--strict")[0] == 0


def test_strict_plugins_make_every_verb_fail_with_the_remedy(site, nnx_command, monkeypatch):
    site.add("bb-broken", "import does_not_exist")
    monkeypatch.setenv("NNX_STRICT_PLUGINS", "1")
    code, output, error = nnx_command("list")
    assert (code, output) == (1, "")
    assert error.endswith("remedy: Mend or remove the plugin, or unset NNX_STRICT_PLUGINS.\n")


@pytest.mark.parametrize("arguments", [["bogus"], ["list", "--bogus"], ["show"], ["show", "a", "b"]])
def test_wrong_usage_is_exit_code_two(nnx_command, clean_names, arguments):
    code, output, error = nnx_command(*arguments)
    assert (code, output) == (2, "")
    assert "Usage: nnx" in error


def test_help_names_every_verb(nnx_command):
    code, output, _ = nnx_command("--help")
    assert code == 0
    assert all(verb in output for verb in ("list", "show", "doctor", "ckpt"))


def test_the_verbs_on_checkpoints_are_reached_through_the_same_command(nnx_command, tmp_path):
    code, output, _ = nnx_command("ckpt", "--help")
    assert code == 0
    assert "inspect" in output
    assert "verify" in output
    code, output, error = nnx_command("ckpt", "inspect", str(tmp_path / "nothing"))
    assert (code, output) == (1, "")
    assert error.startswith("error: ")
    assert "\nremedy: " in error


@pytest.mark.full
def test_on_a_terminal_tables_have_no_box_and_brackets_are_not_markup(acme, nnx_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("nnx_checkpoint.cli.output._on_terminal", lambda: True)
    assert "does everything [really]" in nnx_command("list")[1]
    table = nnx_command("doctor")[1]
    assert table.startswith("package ")
    assert "\u2501" not in table


def test_versions_are_printed_without_importing_torch(nnx_command):
    code, output, _ = nnx_command("--version")
    own = version("nnx-core")
    assert code == 0
    assert output.splitlines()[:3] == [f"nnx-{name} {own}" for name in ("checkpoint", "core", "conformance")]
