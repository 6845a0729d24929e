"""The errors of every front end for a name that is misspelt, not installed or removed."""

from __future__ import annotations

from typing import Any

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning

import nnx
from nnx_core.errors import StrategyNotFoundError, StrategyNotInstalledError
from nnx_core.names.catalog import historical, known

QUIET = {"logger": False, "enable_progress_bar": False}
TREES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lightning.pytorch": (lightning.pytorch.Trainer, QUIET),
    "pytorch_lightning": (pytorch_lightning.Trainer, QUIET),
    "lightning.fabric": (lightning.fabric.Fabric, {}),
    "lightning_fabric": (lightning_fabric.Fabric, {}),
}
each_tree = pytest.mark.parametrize("tree", TREES)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def no_plugins(clean_names: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only nnx-core is installed."""
    monkeypatch.setattr("importlib.metadata.EntryPoints.select", lambda self, **_: ())
    nnx.StrategyRegistry.synchronize()


def choose(tree: str, name: str) -> None:
    front_end, options = TREES[tree]
    front_end(strategy=name, accelerator="cpu", devices=1, **options)


def test_no_plugin_is_installed() -> None:
    assert nnx.StrategyRegistry.names() == []


@each_tree
@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", ["colossalai", "fsdp_auto", "nnscaler", "tiny"])
def test_a_name_of_the_catalog_says_what_to_install(tree: str, name: str) -> None:
    if "fabric" in tree and "fabric" in known()[name].lacks:
        pytest.skip("not for Fabric")
    with pytest.raises(StrategyNotInstalledError) as caught:
        choose(tree, name)
    assert str(caught.value) == (
        f"the strategy {name!r} is provided by the package "
        f"{known()[name].distribution}, which is not installed. Run `{known()[name].install}`."
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("fspd_auto", "'fsdp_auto'? It comes with `pip install nnx-fsdp`."),
        ("colosalai", "'colossalai'? It comes with `pip install nnx-colossalai`."),
        ("ddp_spwan", "'ddp_spawn'?"),
        ("fsdp_ofload", "'fsdp_offload'? It comes with `pip install nnx-fsdp`."),
        ("horovodd", "'horovod'?"),
    ],
)
def test_a_misspelt_name_suggests_the_likest_and_how_to_get_it(name: str, meant: str) -> None:
    with pytest.raises(StrategyNotFoundError) as caught:
        nnx.strategy(name)
    assert str(caught.value) == f"no strategy is called {name!r}. Did you mean {meant}"


@each_tree
def test_every_name_of_the_past_explains_itself_in_one_line(tree: str) -> None:
    for name, old in historical().items():
        if name == "dp" and "fabric" in tree:
            continue  # Fabric still has it
        with pytest.raises(StrategyNotFoundError) as caught:
            choose(tree, name)
        message = str(caught.value)
        start = f"the strategy {name!r} no longer exists; it was {old.was}. "
        assert message.startswith(f"{start}Use {old.successor!r} instead.")
        assert "\n" not in message
        assert old.how in message
        assert ("pip install nnx-fsdp" in message) == old.successor.startswith("fsdp_")


def test_nnx_strategy_says_the_same() -> None:
    with pytest.raises(StrategyNotInstalledError, match="Run `pip install nnx-colossalai`"):
        nnx.strategy("colossalai")
    with pytest.raises(StrategyNotFoundError, match="Did you mean 'fsdp_auto'"):
        nnx.strategy("fspd_auto")
    with pytest.raises(StrategyNotFoundError, match=r"Use 'ddp' instead\. Start it with torchrun"):
        nnx.strategy("horovod")


def test_lightning_cli_says_the_same() -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    for name, said in (("colossalai", "pip install nnx-colossalai"), ("bagua", "pip install nnx-comm")):
        arguments = ["--trainer.strategy", name, "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
        with pytest.raises((StrategyNotInstalledError, StrategyNotFoundError), match=said):
            LightningCLI(BoringModel, run=False, args=arguments)
