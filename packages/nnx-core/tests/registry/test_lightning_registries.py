"""The names in the registries of Trainer and Fabric, in all four module trees of Lightning."""

import importlib
import pickle

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import StrategyRegistry as Lightnings

import nnx
from nnx_core.errors import OptionError, PluginError, StrategyNotFoundError, StrategyNotInstalledError
from nnx_core.lightning.factory import default_namespace
from nnx_core.lightning.registration import StrategyFactory
from nnx_core.names.catalog import historical, known
from nnx_core.names.spec import LIGHTNING_NAMES

pytestmark = [
    pytest.mark.usefixtures("clean_names"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
Registry = nnx.StrategyRegistry
TREES = {
    "lightning.pytorch": lightning.pytorch.Trainer,
    "pytorch_lightning": pytorch_lightning.Trainer,
    "lightning.fabric": lightning.fabric.Fabric,
    "lightning_fabric": lightning_fabric.Fabric,
}
DDP = {tree: f"{tree}.strategies:DDPStrategy" for tree in TREES}
each_tree = pytest.mark.parametrize("tree", TREES)


class MyDDP(DDPStrategy):
    pass


class MyIO(TorchCheckpointIO):
    pass


def registry_of(tree):
    module = importlib.import_module(f"{tree}.strategies")
    return module.STRATEGY_REGISTRY if "fabric" in tree else module.StrategyRegistry


def chosen(tree, strategy):
    quiet = {} if "fabric" in tree else {"logger": False, "enable_progress_bar": False}
    user = TREES[tree](strategy=strategy, accelerator="cpu", devices=1, **quiet)
    return user.strategy


@each_tree
def test_a_registration_is_visible_at_once_and_its_removal_too(tree):
    Registry.register("mine", DDP[tree], description="my own", process_group_backend="gloo")
    assert "mine" in registry_of(tree).available_strategies()
    assert registry_of(tree)["mine"]["description"] == "my own"
    assert type(chosen(tree, "mine")).__module__ == f"{tree}.strategies.ddp"
    assert chosen(tree, "mine").process_group_backend == "gloo"
    Registry.remove("mine")
    assert "mine" not in registry_of(tree).available_strategies()


@each_tree
def test_every_known_name_is_in_lightnings_registry_and_lightnings_are_untouched(tree):
    registry = registry_of(tree)
    assert {*Registry.names(), *known(), *historical()} <= set(registry)
    own = {name for name in registry if not isinstance(registry[name]["strategy"], StrategyFactory)}
    assert own <= LIGHTNING_NAMES
    assert "ddp" in own


def test_the_names_that_we_leave_to_lightning_are_all_that_it_has():
    theirs = {
        name
        for tree in TREES
        for name, data in registry_of(tree).items()
        if not isinstance(data["strategy"], StrategyFactory)
    }
    assert theirs <= LIGHTNING_NAMES
    # The rest are aliases that nobody lists, and combinations that only some versions have.
    assert LIGHTNING_NAMES - theirs <= {
        "auto",
        *(name for name in LIGHTNING_NAMES if name.startswith("ddp_")),
    }


def test_a_class_of_this_process_can_be_chosen_by_name():
    Registry.register("mine", MyDDP, static_graph=True)
    assert type(chosen("lightning.pytorch", "mine")) is MyDDP
    assert chosen("lightning.pytorch", "MINE")._ddp_kwargs == {"static_graph": True}


def test_a_strategy_class_of_another_tree_is_refused_with_the_reason():
    Registry.register("mine", MyDDP)
    with pytest.raises(OptionError, match="not a pytorch_lightning strategy"):
        chosen("pytorch_lightning", "mine")


@pytest.mark.parametrize("given", [MyIO, MyIO(), lambda: MyIO()], ids=["class", "instance", "function"])
def test_a_strategy_can_be_registered_with_its_own_checkpoint_io(given):
    Registry.register("mine", MyDDP, checkpoint_io=given)
    assert type(chosen("lightning.pytorch", "mine").checkpoint_io) is MyIO
    other = TorchCheckpointIO()
    assert nnx.strategy("mine", checkpoint_io=other).checkpoint_io is other


def test_overriding_a_name_of_lightnings_lasts_until_it_is_removed():
    Registry.register("ddp", MyDDP, override=True)
    assert type(chosen("lightning.pytorch", "ddp")) is MyDDP
    Registry.synchronize()
    Registry.remove("ddp")
    assert type(chosen("lightning.pytorch", "ddp")) is DDPStrategy


def test_a_name_that_somebody_else_gave_to_lightning_is_not_taken_and_nothing_is_half_registered():
    Lightnings.register("theirs", MyDDP)
    try:
        with pytest.raises(PluginError) as caught:
            Registry.register("theirs", "a:B")
        assert "the registry of lightning.pytorch already provides that name" in str(caught.value)
        assert "theirs" not in Registry
        assert not any("theirs" in registry_of(tree) for tree in TREES if tree != "lightning.pytorch")
        assert Lightnings["theirs"]["strategy"] is MyDDP
        assert type(nnx.strategy("theirs", static_graph=True)) is MyDDP
    finally:
        Lightnings.remove("theirs")


def test_a_strategy_for_one_front_end_is_not_offered_to_the_other(site):
    site.add(
        "aa-fabric",
        """
        from nnx import Capabilities, StrategySpec, hookimpl

        @hookimpl
        def nnx_strategies():
            return [StrategySpec("only_fabric", "a:B", capabilities=Capabilities(trainer=False))]
        """,
    )
    Registry.synchronize()
    with pytest.raises(ValueError, match=r"'only_fabric' does not support Trainer\. Use it with Fabric"):
        chosen("lightning.pytorch", "only_fabric")


@each_tree
def test_a_mistyped_name_is_lightnings_own_error(tree):
    with pytest.raises(ValueError, match="You selected an invalid strategy name: `strategy='fspd_auto'`"):
        chosen(tree, "fspd_auto")


@each_tree
def test_a_name_whose_package_is_missing_says_what_to_install(site, tree):
    site.hide("nnx-fairscale")
    Registry.synchronize()
    with pytest.raises(StrategyNotInstalledError) as caught:
        chosen(tree, "Fairscale_FSDP")
    assert str(caught.value).endswith("Run `pip install nnx-fairscale`.")


@each_tree
def test_a_name_of_the_past_says_what_to_use(tree):
    with pytest.raises(ValueError, match=r"it was fairscale's ShardedDDP\. Use 'fsdp_auto' instead"):
        chosen(tree, "ddp_sharded")


def test_fabric_still_has_the_name_that_trainer_lost():
    assert chosen("lightning.fabric", "dp") is not None
    with pytest.raises(ValueError, match="it was torch's DataParallel"):
        chosen("lightning.pytorch", "dp")


@each_tree
def test_strategy_objects_of_the_right_tree_pass(tree):
    strategy = nnx.strategy("ddp", namespace=tree)
    assert chosen(tree, strategy) is strategy


def test_something_that_is_no_strategy_gets_lightnings_own_message():
    with pytest.raises(ValueError, match="It must be either a string or an instance of"):
        chosen("lightning.pytorch", 3)


def test_a_name_of_the_past_can_be_taken_in_lightnings_registry_and_overridden_by_nnx():
    Lightnings.register("horovod", MyDDP, override=True)
    try:
        assert type(chosen("lightning.pytorch", "horovod")) is MyDDP
        Registry.register("horovod", MyDDP, override=True, static_graph=True)
        assert chosen("lightning.pytorch", "horovod")._ddp_kwargs == {"static_graph": True}
        Registry.remove("horovod")
        assert chosen("lightning.pytorch", "horovod")._ddp_kwargs == {}
    finally:
        Lightnings.remove("horovod")
        Registry.synchronize()


@each_tree
def test_the_factories_are_picklable(tree):
    for name in set(Registry.names()) & set(registry_of(tree)):
        factory = registry_of(tree)[name]["strategy"]
        assert pickle.loads(pickle.dumps(factory)) == factory


def test_nnx_strategy_builds_any_name_with_options():
    Registry.register("mine", MyDDP, static_graph=True, find_unused_parameters=True)
    built = nnx.strategy("mine", find_unused_parameters=False)
    assert built._ddp_kwargs == {"static_graph": True, "find_unused_parameters": False}
    own = nnx.strategy("ddp_find_unused_parameters_true", static_graph=True)
    assert own._ddp_kwargs == {"find_unused_parameters": True, "static_graph": True}


@each_tree
def test_nnx_strategy_builds_for_the_tree_that_is_asked_for(tree):
    module = importlib.import_module(f"{tree}.strategies")
    assert isinstance(nnx.strategy("ddp", namespace=tree), module.DDPStrategy)
    assert default_namespace() == "lightning.pytorch"


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("FSDP_AUTO", {}, StrategyNotFoundError, "Did you mean 'fsdp_auto'?"),
        ("fairscale_fsdp", {}, StrategyNotInstalledError, "pip install nnx-fairscale"),
        ("ddp", {"namespace": "lightning"}, OptionError, "namespace='lightning' is unknown."),
        ("mine", {}, StrategyNotFoundError, "no strategy is called 'mine'"),
    ],
)
def test_nnx_strategy_explains_what_it_cannot_build(site, name, options, error, message):
    site.hide("nnx-fairscale")
    with pytest.raises(error) as caught:
        nnx.strategy(name, **options)
    assert message in str(caught.value)
