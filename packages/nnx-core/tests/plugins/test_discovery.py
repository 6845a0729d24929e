import sys
import threading

import pytest

from nnx_core.errors import PluginError
from nnx_core.names.discovery import checkpoint_formats, inventory, refresh

HOOK = "from nnx import StrategySpec, hookimpl\n@hookimpl\ndef nnx_strategies():\n    "
FORMATS = (
    "from nnx import hookimpl\nfrom nnx_core.names.spec import CheckpointFormatSpec\n"
    "@hookimpl\ndef nnx_checkpoint_formats():\n    "
)
GOOD = "StrategySpec('fine', 'somewhere:Something')"


def only_problem(plugin):
    found = [problem for problem in inventory().problems if problem.plugin == plugin]
    assert len(found) == 1, found
    return found[0]


def plugin_called(name):
    (found,) = [plugin for plugin in inventory().plugins if plugin.name == name]
    return found


def test_the_strategies_of_an_installed_plugin_are_found_with_their_owner(site):
    site.provide("acme-plugin", "acme_a", "acme_b", version="2.3")
    assert {"acme_a", "acme_b"} <= set(inventory().specs)
    assert inventory().owners["acme_a"] == "acme-plugin 2.3"
    assert plugin_called("acme_plugin").strategies == ("acme_a", "acme_b")


BROKEN = {
    "missing import": ("import does_not_exist", "import", "No module named 'does_not_exist'"),
    "syntax error": ("def oops(:", "import", "SyntaxError"),
    "exit at import": ("raise SystemExit(3)", "import", "SystemExit: 3"),
    "process-ending exception": ("class Stop(BaseException): pass\nraise Stop('no')", "import", "Stop: no"),
    "raises in its hook": (HOOK + "return 1 / 0", "hook", "ZeroDivisionError: division by zero"),
    "exits in its hook": (HOOK + "import sys; sys.exit('bye')", "hook", "SystemExit: bye"),
    "imports an engine": ("import torch._nothing", "import", "it imports torch"),
    "forgets to return": (HOOK + "pass", "result", "nnx_strategies() returned None"),
    "returns text": (HOOK + "return 'fine'", "result", "returned 'fine': expected a list of StrategySpec"),
    "returns names": (HOOK + "return ['fine']", "result", "returned ['fine']: expected a list"),
    "returns much rubbish": (HOOK + "return ['x' * 500]", "result", "xxx...: expected a list"),
    "one bad among good": (HOOK + f"return [{GOOD}, 3]", "result", "expected a list of StrategySpec"),
    "declares a class": (HOOK + "return [StrategySpec('fine', dict)]", "result", "the class <class 'dict'>"),
    "upper-case name": (HOOK + "return [StrategySpec('Fine', 'a:B')]", "hook", "'Fine' is not a valid name"),
    "newer minor API": (
        HOOK + "return [StrategySpec('fine', 'a:B', api_version=(1, 9))]",
        "api",
        "'fine' is written for API 1.9 of nnx; this is 1.0",
    ),
    "newer major API": (HOOK + "return [StrategySpec('fine', 'a:B', api_version=(2, 0))]", "api", "API 2.0"),
    "older major API": (HOOK + "return [StrategySpec('fine', 'a:B', api_version=(0, 5))]", "api", "API 0.5"),
    "unknown hook": (
        "from nnx import hookimpl\n@hookimpl\ndef nnx_strategy(): return []",
        "api",
        "it implements nnx_strategy, which nnx 1.0 does not have",
    ),
    "hook with an argument": (
        "from nnx import hookimpl\n@hookimpl\ndef nnx_strategies(wrong): return []",
        "hook",
        "PluginValidationError",
    ),
    "no hook": ("x = 1", "result", "it implements no hook of nnx"),
    "an error that cannot be shown": (
        "class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute",
        "import",
        "Mute: (its message cannot be shown)",
    ),
    "takes importers away": (
        "import sys; sys.meta_path.clear()\n" + HOOK + f"return [{GOOD}]",
        "import",
        "it takes importers out of sys.meta_path",
    ),
    "a result that cannot be shown": (
        "class Mute:\n    def __repr__(self): raise KeyboardInterrupt\n" + HOOK + "return Mute()",
        "result",
        "returned a Mute that cannot be shown",
    ),
    "a long description": (
        HOOK + "return [StrategySpec('fine', 'a:B', description='x' * 50_000_000)]",
        "result",
        "declares a description of 50000000 characters",
    ),
    "a description that is no text": (
        HOOK + "return [StrategySpec('fine', 'a:B', description=5)]",
        "result",
        "declares a description of 5",
    ),
    "alters the list of importers": (
        "import sys; sys.meta_path = [*sys.meta_path[1:]]; raise RuntimeError('altered')",
        "import",
        "RuntimeError: altered",
    ),
}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(("source", "kind", "detail"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_becomes_a_problem_and_leaves_the_others_alone(site, source, kind, detail):
    site.provide("aa-before", "before")
    site.add("bb-broken", source, version="0.7")
    site.provide("cc-after", "after")

    problem = only_problem("bb_broken")
    assert (problem.kind, problem.distribution) == (kind, "bb-broken 0.7")
    assert detail in problem.detail
    assert problem.remedy
    assert str(problem).startswith("plugin 'bb_broken' of bb-broken 0.7: ")
    assert {"before", "after"} <= set(inventory().specs)
    assert "fine" not in inventory().specs
    assert plugin_called("bb_broken").status == "broken"
    assert not inventory()._manager.has_plugin("bb-broken:bb_broken")


REMEDIES = {
    "missing import": "Reinstall or upgrade bb-broken, or set NNX_DISABLE_PLUGINS=bb_broken.",
    "upper-case name": "Choose another name, for example 'fine'.",
    "newer minor API": "Run `pip install --upgrade nnx-core`.",
    "older major API": "Upgrade the plugin.",
    "imports an engine": "Its authors should declare targets as text, and import engines in those modules.",
    "no hook": "Decorate its function `nnx_strategies` with nnx.hookimpl, or remove the entry point.",
}


@pytest.mark.parametrize("case", REMEDIES)
def test_the_remedy_fits_what_is_wrong(site, case):
    site.add("bb-broken", BROKEN[case][0])
    assert only_problem("bb_broken").remedy == REMEDIES[case]


def test_importers_that_a_plugin_adds_are_asked_last_and_those_of_a_broken_one_not_at_all(site):
    adds = "import sys\nclass Added:\n    def find_spec(*_): return None\nsys.meta_path.insert(0, Added)\n"
    before = [*sys.meta_path]
    site.add("aa-fine", adds + HOOK + f"return [{GOOD}]")
    site.add("bb-broken", adds + "raise RuntimeError")
    try:
        assert "fine" in inventory().specs
        assert sys.meta_path == [*before, sys.modules["aa_fine_plugin"].Added]
    finally:
        sys.meta_path[:] = before


def test_an_interrupt_by_the_user_is_not_swallowed(site):
    site.add("aa-slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        inventory()


def test_two_owners_of_one_name_are_both_named_and_the_first_keeps_it(site):
    site.provide("zz-late", "shared", "only_late", version="3.0")
    site.provide("aa-early", "shared", version="1.5")
    assert inventory().owners["shared"] == "aa-early 1.5"
    assert inventory().owners["only_late"] == "zz-late 3.0"
    problem = only_problem("zz_late")
    assert (problem.kind, problem.distribution) == ("collision", "zz-late 3.0")
    assert "'shared' is not available: aa-early 1.5 already provides that name" in problem.detail
    assert plugin_called("zz_late").status == "ok"


def test_a_name_of_the_catalog_belongs_to_its_distribution(site):
    site.provide("aa-evil", "fsdp_auto", "own")
    assert "own" in inventory().specs
    assert not inventory().owners.get("fsdp_auto", "").startswith("aa-evil")
    assert "nnx-fsdp, by nnx's catalog, already provides that name" in only_problem("aa_evil").detail


def test_a_plugin_cannot_take_a_name_of_lightnings(site):
    site.provide("aa-greedy", "ddp", "greedy")
    assert "ddp" not in inventory().specs
    assert "greedy" in inventory().specs
    assert "Lightning itself already provides that name" in only_problem("aa_greedy").detail


@pytest.mark.parametrize("written", ["leaves_a_mark", "leaves-a-mark", "other, Leaves.A.Mark ,"])
def test_a_disabled_plugin_is_not_even_imported(site, monkeypatch, tmp_path, written):
    site.add("leaves-a-mark", f"open({str(tmp_path / 'mark')!r}, 'w')")
    monkeypatch.setenv("NNX_DISABLE_PLUGINS", written)
    assert plugin_called("leaves_a_mark").status == "disabled"
    assert not (tmp_path / "mark").exists()
    assert not [problem for problem in inventory().problems if problem.plugin == "leaves_a_mark"]


def test_only_the_plugins_of_the_allow_list_are_imported(site, monkeypatch, tmp_path):
    site.add("leaves-a-mark", f"open({str(tmp_path / 'mark')!r}, 'w')")
    site.provide("wanted-one", "wanted")
    monkeypatch.setenv("NNX_LOAD_PLUGINS", "wanted-one")
    assert list(inventory().specs) == ["wanted"]
    assert not (tmp_path / "mark").exists()


def test_a_plugin_on_both_lists_is_disabled(site, monkeypatch):
    site.provide("torn-one", "torn")
    monkeypatch.setenv("NNX_LOAD_PLUGINS", "torn-one")
    monkeypatch.setenv("NNX_DISABLE_PLUGINS", "torn-one")
    assert plugin_called("torn_one").status == "disabled"


def test_an_allow_list_that_names_nothing_installed_is_a_problem(site, monkeypatch):
    monkeypatch.setenv("NNX_LOAD_PLUGINS", "tpyo")
    (problem,) = inventory().problems
    assert (problem.kind, problem.plugin) == ("selection", "tpyo")
    assert (
        problem.detail
        == "NNX_LOAD_PLUGINS names 'tpyo', but no plugin or distribution of that name is installed."
    )
    assert problem.remedy == "Run `pip install tpyo`, or correct the variable."


def test_strict_mode_raises_with_every_problem_and_its_remedy(site, monkeypatch):
    site.add("bb-broken", "import does_not_exist")
    site.provide("aa-greedy", "ddp")
    monkeypatch.setenv("NNX_STRICT_PLUGINS", "1")
    for _ in range(2):  # also where the result is remembered
        with pytest.raises(PluginError) as caught:
            inventory()
        assert "No module named 'does_not_exist'" in str(caught.value)
        assert "'ddp' is not available" in str(caught.value)
        assert caught.value.remedy == "Mend or remove the plugin, or unset NNX_STRICT_PLUGINS."


def test_discovery_runs_once_and_refresh_sees_what_was_installed_since(site):
    site.provide("aa-first", "first")
    assert inventory() is inventory()
    site.provide("bb-second", "second")
    assert "second" not in inventory().specs
    assert {"first", "second"} <= set(refresh().specs)


def test_threads_that_ask_at_once_get_one_answer(site):
    site.add("aa-slow", "import time; time.sleep(0.2)\n" + HOOK + f"return [{GOOD}]")
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(inventory())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(answers) == 4
    assert all(answer is answers[0] for answer in answers)
    assert "fine" in answers[0].specs


def test_a_plugin_that_asks_for_the_inventory_while_it_is_loaded_gets_what_is_there(site):
    site.provide("aa-first", "first")
    site.add(
        "bb-curious",
        "from nnx_core.names.discovery import inventory\nanswer = inventory()\nseen = sorted(answer.specs)\n"
        + HOOK
        + f"return [{GOOD}]",
    )
    assert {"first", "fine"} <= set(inventory().specs)
    import bb_curious_plugin

    assert "first" in bb_curious_plugin.seen
    assert "fine" not in bb_curious_plugin.seen
    assert bb_curious_plugin.answer is inventory()


def test_an_entry_point_that_is_declared_twice_does_not_disturb_the_first(site):
    site.provide("aa-double", "double")
    (site.path / "aa_double-1.0.dist-info" / "entry_points.txt").write_text(
        "[nnx]\naa_double = aa_double_plugin\naa_double = zz_other\n"
    )
    site.module("zz_other", HOOK + f"return [{GOOD}]")
    assert "double" in inventory().specs
    assert "declares this entry point twice" in only_problem("aa_double").detail


def test_checkpoint_formats_of_all_plugins_are_listed_and_a_failing_one_is_recorded_once(site):
    site.add("aa-formats", FORMATS + "return [CheckpointFormatSpec('zipped', 'a.b:C', description='x')]")
    site.add("bb-formats", FORMATS + "raise RuntimeError('no formats today')")
    assert checkpoint_formats()["zipped"].target == "a.b:C"
    checkpoint_formats()
    assert only_problem("bb_formats").detail == "RuntimeError: no formats today."


def test_discovery_and_listing_import_neither_torch_nor_lightning(site, run_python):
    site.provide("aa-light", "light")
    run_python(
        """
        import sys
        import nnx
        assert "light" in nnx.StrategyRegistry.names()
        assert "light" in nnx.StrategyRegistry.describe("light")
        heavy = {"torch", "lightning", "pytorch_lightning", "numpy"} & set(sys.modules)
        assert not heavy, heavy
        """
    )


def test_a_plugin_without_metadata_is_still_visited(site):
    site.provide("aa-damaged", "damaged")
    (site.path / "aa_damaged-1.0.dist-info" / "METADATA").unlink()
    site.provide("bb-fine", "healthy")
    assert {"damaged", "healthy"} <= set(inventory().specs)
    assert inventory().owners["damaged"] == "unknown"


def test_a_malformed_entry_point_is_a_problem_of_its_own(site):
    site.provide("aa-malformed", "malformed")
    (site.path / "aa_malformed-1.0.dist-info" / "entry_points.txt").write_text("[nnx]\nodd = a b c\n")
    site.provide("bb-fine", "healthy")
    assert "healthy" in inventory().specs
    assert only_problem("odd").kind == "import"


def test_what_a_plugin_prints_goes_to_standard_error(site, capsys):
    site.add("aa-chatty", "print('hello')\n" + HOOK + f"print('again'); return [{GOOD}]")
    assert "fine" in inventory().specs
    assert capsys.readouterr() == ("", "hello\nagain\n")
