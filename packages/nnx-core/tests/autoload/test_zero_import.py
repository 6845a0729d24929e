"""Features that work without `import nnx`, in fresh processes.

Importing Lightning takes seconds, so each process checks several of them.
"""

import os
import subprocess
import sys

import pytest

RAW = """
from nnx import StrategySpec, hookimpl

@hookimpl
def nnx_strategies():
    return [
        StrategySpec("probe_trainer", "probe_classes:TrainerProbe", description="for Trainer"),
        StrategySpec(
            "probe_fabric", "probe_classes:FabricProbe", init_params={"process_group_backend": "gloo"}
        ),
    ]
"""
CLASSES = """
import sys
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy as TrainerDDP

class TrainerProbe(TrainerDDP):
    pass

class FabricProbe(FabricDDP):
    pass
"""


@pytest.fixture
def probes(site):
    site.add("aa-probe", RAW, modules={"probe_classes": CLASSES})
    return site


def test_torch_imports_no_plugin_and_names_work_for_trainer_fabric_and_both_mirrors(probes, run_python):
    run_python(
        """
        import sys
        import torch
        assert "_nnx_autoload" in sys.modules
        late = {"lightning", "pytorch_lightning", "nnx", "pluggy", "aa_probe_plugin", "nnx_fsdp"}
        assert not late & set(sys.modules), late & set(sys.modules)
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import StrategyRegistry
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import STRATEGY_REGISTRY

        assert {"probe_trainer", "fsdp_auto"} <= set(StrategyRegistry.available_strategies())
        assert {"probe_fabric", "fsdp_auto"} <= set(STRATEGY_REGISTRY.available_strategies())
        assert "probe_classes" not in sys.modules and "nnx_fsdp.backend" not in sys.modules
        assert not {"deepspeed", "fairscale"} & set(sys.modules)
        quiet = dict(accelerator="cpu", devices=1, logger=False)
        assert type(Trainer(strategy="probe_trainer", **quiet).strategy).__name__ == "TrainerProbe"
        # Every Trainer asks nnx-core for callbacks, which must cost nothing where nnx is not in use.
        assert "nnx_core.lightning.callbacks" not in sys.modules
        fabric = Fabric(strategy="probe_fabric", accelerator="cpu", devices=1)
        assert type(fabric.strategy).__name__ == "FabricProbe"
        assert fabric.strategy.process_group_backend == "gloo"

        assert "pytorch_lightning" not in sys.modules
        from pytorch_lightning.strategies import StrategyRegistry as Mirror
        from lightning_fabric.strategies import STRATEGY_REGISTRY as FabricMirror
        assert "fsdp_auto" in Mirror and "fsdp_auto" in FabricMirror
        assert Mirror["fsdp_auto"]["strategy"].namespace == "pytorch_lightning"

        import importlib, inspect, _nnx_autoload
        for name in _nnx_autoload.TARGETS:
            module = sys.modules[name]
            assert "exec_module" not in vars(module.__loader__), name
            assert inspect.getsource(module)
        assert sys.meta_path.count(_nnx_autoload._FINDER) == 1
        _nnx_autoload.autoload()
        import nnx
        assert sys.meta_path.count(_nnx_autoload._FINDER) == 1
        assert _nnx_autoload.failures == []

        reloaded = importlib.reload(sys.modules["lightning_fabric.strategies"])
        assert "fsdp_auto" in reloaded.STRATEGY_REGISTRY
        """
    )


@pytest.mark.full
def test_names_are_known_in_a_spawned_child_that_never_imports_nnx(probes, run_python):
    run_python(
        """
        import torch.multiprocessing

        def child(rank, queue):
            from lightning.pytorch.strategies import StrategyRegistry
            queue.put(StrategyRegistry.available_strategies())

        if __name__ == "__main__":
            queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
            torch.multiprocessing.spawn(child, args=(queue,), nprocs=1)
            assert {"probe_trainer", "fsdp_auto"} <= set(queue.get())
        """
    )


@pytest.mark.full
def test_lightning_cli_takes_names_and_nnx_strategy_with_options(probes, run_python, tmp_path):
    probes.hide("nnx-fairscale")
    (tmp_path / "options.yaml").write_text(
        """
trainer:
  strategy:
    class_path: nnx.strategy
    init_args:
      name: probe_trainer
    dict_kwargs:
      static_graph: true
"""
    )
    run_python(
        """
        import sys
        from lightning.pytorch.cli import LightningCLI
        from lightning.pytorch.demos.boring_classes import BoringModel

        def parsed(*arguments):
            sys.argv = ["script.py", *arguments, "--trainer.accelerator=cpu", "--trainer.logger=false"]
            return LightningCLI(BoringModel, run=False, save_config_callback=None).trainer.strategy

        assert type(parsed("--trainer.strategy", "probe_trainer")).__name__ == "TrainerProbe"
        assert "nnx_core.lightning.factory" not in sys.modules
        strategy = parsed("--config", "options.yaml")
        assert type(strategy).__name__ == "TrainerProbe"
        assert strategy._ddp_kwargs == {"static_graph": True}
        try:
            parsed("--trainer.strategy", "fairscale_fsdp")
        except ImportError as error:
            assert "pip install nnx-fairscale" in str(error)
        else:
            raise AssertionError("no error")
        """
    )


@pytest.mark.full
def test_the_hook_can_be_turned_off_and_import_nnx_does_the_same_later(probes, run_python):
    run_python(
        """
        import sys
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import StrategyRegistry
        assert "nnx" not in sys.modules
        assert "probe_trainer" not in StrategyRegistry
        try:
            Trainer(strategy="probe_trainer")
        except ValueError as error:
            assert "Find a complete list of options" in str(error)

        import nnx
        assert "probe_trainer" in StrategyRegistry
        trainer = Trainer(strategy="probe_trainer", accelerator="cpu", devices=1)
        assert type(trainer.strategy).__name__ == "TrainerProbe"
        from pytorch_lightning.strategies import StrategyRegistry as Mirror
        assert "probe_trainer" in Mirror
        """,
        NNX_AUTOLOAD="0",
    )


@pytest.mark.full
def test_a_broken_nnx_breaks_neither_torch_nor_lightning_and_is_reported(site, run_python, tmp_path):
    (site.path / "nnx_core.py").write_text("raise SystemExit('nnx is broken')")
    done = run_python(
        """
        import torch
        from lightning.pytorch import Trainer
        Trainer(strategy="ddp", accelerator="cpu", devices=1)
        import _nnx_autoload
        assert len(_nnx_autoload.failures) == 2, _nnx_autoload.failures
        """
    )
    assert "nnx could not register its strategies in lightning.pytorch.strategies: SystemExit" in done.stderr
    assert "Run `nnx doctor`" in done.stderr


@pytest.mark.full  # `test_discovery.py` and `test_hostile_plugins.py` try broken plugins
def test_broken_plugins_break_neither_lightning_nor_the_other_plugins(probes, run_python):
    probes.add("bb-broken", "import sys; sys.exit(9)")
    probes.add("cc-heavy", "import lightning.pytorch\n" + RAW.replace("probe_", "heavy_"))
    run_python(
        """
        import warnings
        warnings.simplefilter("error", UserWarning)
        from lightning.pytorch.strategies import StrategyRegistry
        assert {"probe_trainer", "fsdp_auto"} <= set(StrategyRegistry)
        assert "heavy_trainer" not in StrategyRegistry

        from nnx_core.names.discovery import inventory
        details = {problem.plugin: problem.detail for problem in inventory().problems}
        assert details["bb_broken"] == "SystemExit: 9."
        assert details["cc_heavy"].startswith("it imports lightning."), details
        """
    )


@pytest.mark.full
def test_strict_mode_reaches_whoever_imports_lightning(site, run_python):
    site.add("bb-broken", "import does_not_exist")
    done = run_python("import lightning.pytorch", check=False, NNX_STRICT_PLUGINS="1")
    assert done.returncode == 1
    assert "nnx_base.errors.PluginError: plugin 'bb_broken' of bb-broken 1.0" in done.stderr


@pytest.mark.full  # `test_launching.py` trains under torchrun without an import
def test_names_are_known_under_torchrun(probes, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from lightning.pytorch import Trainer\n"
        "trainer = Trainer(strategy='probe_trainer', accelerator='cpu', devices=1, logger=False)\n"
        "print(type(trainer.strategy).__name__, trainer.strategy.cluster_environment.__class__.__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", str(script)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(probes.path), os.environ["PYTHONPATH"]]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "TrainerProbe TorchElasticEnvironment" in done.stdout


@pytest.mark.full
def test_a_script_that_uses_only_pytorch_lightning_gets_its_classes(site, run_python):
    run_python(
        """
        import sys
        import nnx
        from pytorch_lightning.cli import LightningCLI
        from pytorch_lightning.demos.boring_classes import BoringModel
        from pytorch_lightning.strategies import DDPStrategy

        assert type(nnx.strategy("ddp")) is DDPStrategy
        sys.argv = ["script.py", "--trainer.accelerator=cpu", "--trainer.logger=false",
                    "--trainer.strategy=nnx.strategy", "--trainer.strategy.name=ddp",
                    "--trainer.strategy.dict_kwargs.static_graph=true"]
        cli = LightningCLI(BoringModel, run=False, save_config_callback=None)
        assert type(cli.trainer.strategy) is DDPStrategy
        assert cli.trainer.strategy._ddp_kwargs == {"static_graph": True}
        assert "lightning" not in sys.modules
        """
    )
