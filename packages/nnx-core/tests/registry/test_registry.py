import pytest

import nnx
from nnx_core.errors import PluginError, StrategyNotFoundError, StrategyNotInstalledError

pytestmark = pytest.mark.usefixtures("clean_names")
Registry = nnx.StrategyRegistry


class Something:
    pass


def test_a_registered_strategy_can_be_looked_up_described_and_removed():
    Registry.register("mine", "pkg.module:Class", description="my own", size=3)
    assert Registry.get("mine").target == "pkg.module:Class"
    assert Registry.get("mine").init_params == {"size": 3}
    assert "mine" in Registry
    assert "mine" in Registry.names()
    assert list(Registry) == sorted(Registry.names())
    assert len(Registry) == len(Registry.names())
    assert "mine" in repr(Registry)
    assert Registry.owner("mine") == "this process"
    assert Registry.describe("mine") == "mine: my own\nprovided by: this process (pkg.module:Class)"
    Registry.remove("mine")
    assert "mine" not in Registry


def test_a_class_of_this_process_can_be_registered():
    Registry.register("mine", Something)
    assert Registry.get("mine").resolve() is Something
    assert Registry.get("mine").reference.endswith(":Something")


def test_a_registration_may_declare_what_the_strategy_promises():
    Registry.register("most", Something)
    Registry.register("mine", Something, capabilities=nnx.Capabilities(fabric=False))
    assert Registry.get("most").capabilities == nnx.Capabilities()
    assert not Registry.get("mine").capabilities.fabric
    assert Registry.get("mine").init_params == {}


def test_the_description_shows_what_a_plugin_declares(site):
    site.add(
        "aa-full",
        """
        from nnx import StrategySpec, hookimpl

        @hookimpl
        def nnx_strategies():
            return [StrategySpec("full", "a:B", description="does it", use_when="in need", docs_url="https://x.y")]
        """,
    )
    assert Registry.describe("full").splitlines() == [
        "full: does it",
        "use when: in need",
        "provided by: aa-full 1.0 (a:B)",
        "docs: https://x.y",
    ]


def test_a_name_is_taken_only_once_unless_overridden(site):
    site.provide("aa-owner", "taken", version="4.2")
    with pytest.raises(
        PluginError, match=r"'taken' cannot be registered: aa-owner 4\.2 already provides"
    ) as caught:
        Registry.register("taken", Something)
    assert caught.value.remedy == "Choose another name, or pass override=True."
    assert Registry.get("taken").target == "does_not:matter"
    Registry.register("taken", Something, override=True)
    assert Registry.get("taken").target is Something
    with pytest.raises(PluginError, match="this process already provides"):
        Registry.register("taken", Something)


@pytest.mark.parametrize("name", ["ddp", "auto", "deepspeed_stage_3"])
def test_lightnings_own_names_are_not_taken_by_accident(name):
    with pytest.raises(
        PluginError, match=f"'{name}' cannot be registered: Lightning itself already provides"
    ):
        Registry.register(name, Something)
    assert name not in Registry


@pytest.mark.parametrize(("name", "target"), [("Upper", "a:B"), ("fine", "no reference"), ("fine", 3)])
def test_an_invalid_registration_leaves_nothing_behind(name, target):
    before = Registry.names()
    with pytest.raises(PluginError):
        Registry.register(name, target)
    assert Registry.names() == before


def test_a_removed_plugin_name_stays_away_until_it_is_registered_again(site):
    site.provide("aa-owner", "taken")
    Registry.remove("taken")
    assert "taken" not in Registry
    Registry.register("taken", Something)
    assert Registry.get("taken").target is Something


def test_removing_what_is_not_there_is_an_error():
    with pytest.raises(StrategyNotFoundError, match="no strategy is called 'nothing'"):
        Registry.remove("nothing")


def test_a_name_of_the_catalog_says_what_to_install(site):
    site.hide("nnx-fairscale")
    with pytest.raises(StrategyNotInstalledError) as caught:
        Registry.get("fairscale_fsdp")
    assert isinstance(caught.value, ImportError)
    assert str(caught.value) == (
        "the strategy 'fairscale_fsdp' is provided by the package nnx-fairscale, which is not installed. "
        "Run `pip install nnx-fairscale`."
    )


@pytest.mark.parametrize(
    ("name", "was", "remedy"),
    [
        ("ddp_sharded", "fairscale's ShardedDDP", "Use 'fsdp_auto' instead."),
        ("horovod", "Horovod's data parallelism", "Use 'ddp' instead."),
        ("tpu_spawn", "several TPU cores, now called xla", "Use 'xla' instead."),
    ],
)
def test_a_name_of_the_past_says_what_it_was_and_what_to_use(name, was, remedy):
    with pytest.raises(StrategyNotFoundError) as caught:
        Registry.get(name)
    assert str(caught.value).startswith(f"the strategy {name!r} no longer exists; it was {was}. {remedy}")


def test_the_successor_of_an_old_name_comes_with_its_package(site, monkeypatch):
    monkeypatch.setattr("importlib.metadata.EntryPoints.select", lambda self, **_: ())
    with pytest.raises(StrategyNotFoundError) as caught:
        Registry.get("fsdp_native")
    assert caught.value.remedy == "Use 'fsdp_auto' instead. It comes with `pip install nnx-fsdp`."


@pytest.mark.parametrize(
    ("asked", "suggested"),
    [
        ("fspd_auto", "'fsdp_auto'"),
        ("FSDP_AUTO", "'fsdp_auto'"),
        ("Mien", "'mine'"),
        ("dpp", "'ddp'"),
        ("fairscale_fspd", "'fairscale_fsdp'? It comes with `pip install nnx-fairscale`."),
    ],
)
def test_a_mistyped_name_suggests_the_nearest_one(site, asked, suggested):
    site.hide("nnx-fairscale")
    Registry.register("mine", Something)
    with pytest.raises(StrategyNotFoundError) as caught:
        Registry.get(asked)
    assert isinstance(caught.value, ValueError)
    assert caught.value.message == f"no strategy is called {asked!r}."
    assert caught.value.remedy.startswith(f"Did you mean {suggested}")


def test_a_name_like_nothing_else_points_to_the_list():
    with pytest.raises(StrategyNotFoundError, match=r"no strategy is called 'banana'\. Run `nnx list`"):
        Registry.get("banana")


def test_an_unknown_name_mentions_plugins_that_could_not_be_loaded(site):
    site.add("bb-broken", "import does_not_exist", version="0.3")
    with pytest.raises(StrategyNotFoundError) as caught:
        Registry.get("banana")
    assert caught.value.remedy.endswith("Some plugins could not be loaded (bb-broken 0.3): see `nnx doctor`.")


def test_a_name_whose_plugin_is_broken_says_why(site):
    site.add("nnx-colossalai", "import does_not_exist", version="0.9")
    with pytest.raises(StrategyNotFoundError) as caught:
        Registry.get("colossalai_cpu")
    assert caught.value.message == (
        "the strategy 'colossalai_cpu' is provided by nnx-colossalai, but the installed nnx-colossalai 0.9 "
        "cannot be used: ModuleNotFoundError: No module named 'does_not_exist'."
    )
    assert "Reinstall or upgrade nnx-colossalai" in caught.value.remedy


def test_a_name_whose_plugin_is_switched_off_says_so(site, monkeypatch):
    site.provide("nnx-colossalai", "colossalai")
    monkeypatch.setenv("NNX_DISABLE_PLUGINS", "nnx-colossalai")
    with pytest.raises(StrategyNotFoundError) as caught:
        Registry.get("colossalai")
    assert str(caught.value) == (
        "the strategy 'colossalai' is provided by nnx-colossalai, which is switched off here. "
        "Change NNX_DISABLE_PLUGINS or NNX_LOAD_PLUGINS."
    )


def test_a_name_that_an_older_version_lacks_asks_for_an_upgrade(site):
    site.provide("nnx-colossalai", "colossalai", version="0.1")
    with pytest.raises(StrategyNotFoundError) as caught:
        Registry.get("colossalai_cuda")
    assert "but not by the installed version 0.1" in caught.value.message
    assert caught.value.remedy == "Run `pip install --upgrade nnx-colossalai`."


def test_a_plugin_whose_collision_cost_it_another_name_is_not_blamed_for_this_one(site):
    site.provide("nnx-colossalai", "colossalai", "ddp")
    with pytest.raises(StrategyNotFoundError, match="but not by the installed version"):
        Registry.get("colossalai_cpu")


def test_strict_mode_makes_the_registry_raise(site, monkeypatch):
    site.add("bb-broken", "import does_not_exist")
    monkeypatch.setenv("NNX_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match="No module named 'does_not_exist'"):
        Registry.names()


def test_nnx_lists_what_it_exports_and_knows_its_version():
    from importlib.metadata import version

    assert set(nnx.__all__) <= set(dir(nnx))
    assert nnx.__version__ == version("nnx-core")
    with pytest.raises(AttributeError, match="module 'nnx' has no attribute 'nonsense'"):
        _ = nnx.nonsense


@pytest.mark.parametrize("name", nnx.__all__)
def test_everything_that_nnx_exports_exists(name):
    assert getattr(nnx, name) is not None
