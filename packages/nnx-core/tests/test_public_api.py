"""`import nnx` is the public API; internal code never imports it."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import nnx
import nnx_core
from nnx_core.cli import doctor
from nnx_core.errors import PackageNotInstalledError

FOREIGN = "class Linear: pass\n"


def test_the_modules_that_it_shows_are_those_of_the_packages() -> None:
    import nnx.lite
    import nnx_checkpoint
    import nnx_conformance

    assert (nnx.checkpoint, nnx.testing) == (nnx_checkpoint, nnx_conformance)
    assert nnx.lite.LightningLite is nnx_core.LightningLite


def test_type_checkers_see_the_names_that_are_there() -> None:
    stub = Path(nnx_core.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    assert set(re.findall(r"as (\w+)", stub)) == {*nnx_core.__all__} - {"__version__"}


def test_what_the_core_offers_is_there_without_another_import() -> None:
    assert set(nnx_core.__all__) <= set(dir(nnx))
    assert nnx.strategy is nnx_core.strategy
    assert nnx.checkpoint.save.__module__ == "nnx_checkpoint.loop"
    assert nnx.testing.StrategyConformance is not None


def test_a_name_that_never_was_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"nnx\.nonsense"):
        importlib.import_module("nnx.nonsense")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = nnx.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["Module", "Linear", "Rngs", "jit", "value_and_grad", "Param"])
def test_a_name_of_flax_is_answered_with_where_it_is(name: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"no attribute '{name}'\..*which this is not: `from flax import nnx`"
    ):
        getattr(nnx, name)
    assert not hasattr(nnx, name)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        AttributeError, match=r"'load_from_checkpoints'\. Did you mean 'load_from_checkpoint'\?"
    ):
        _ = nnx.load_from_checkpoints


def test_what_is_shown_is_what_is_offered() -> None:
    assert dir(nnx) == sorted([*nnx_core.__all__, "checkpoint", "lite", "testing"])
    assert dir(nnx_core) == sorted(nnx_core.__all__)


ASKED_FOR_LITE = (
    "nnx.Lite",
    "nnx.LightningLite",
    "nnx_core.Lite",
    "nnx.lite",
    "importlib.import_module('nnx.lite')",
)


@pytest.mark.parametrize("asked", ASKED_FOR_LITE)
def test_lite_without_its_package_says_what_to_install(monkeypatch, asked: str) -> None:
    lack_lite(monkeypatch)
    with pytest.raises(PackageNotInstalledError) as caught:
        eval(asked)
    assert re.fullmatch(
        r"nnx\.\w+ is in the package nnx-lite, which is not installed\. Run `pip install nnx-lite`, or in a "
        r"clone of nnx `pip install packages/nnx-lite`\.",
        str(caught.value),
    )
    assert isinstance(caught.value, ImportError)


def lack_lite(monkeypatch) -> None:
    """Let nothing find nnx_lite, which may have been imported before."""
    for module, name in ((nnx, "Lite"), (nnx, "LightningLite"), (nnx, "lite"), (nnx_core, "Lite")):
        monkeypatch.delitem(vars(module), name, raising=False)
    monkeypatch.delitem(vars(nnx_core), "LightningLite", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nnx_lite" or name == "nnx.lite"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(nnx_core, "find_spec", lambda name: None if name == "nnx_lite" else find_spec(name))


@pytest.mark.full
def test_all_names_can_be_imported_without_lite_and_none_but_its_own_imports_its_package(run_python) -> None:
    run_python(
        """
        import importlib.util, sys
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "nnx_lite" else find_spec(name, *rest)
        from nnx import *
        import nnx, nnx_core
        assert strategy is nnx.strategy
        assert "Lite" not in dir(nnx) and "Lite" not in globals()
        importlib.util.find_spec = nnx_core.find_spec = find_spec
        for name in nnx_core.__all__:
            if "Lite" not in name:
                getattr(nnx, name)
        assert "nnx_lite" not in sys.modules
        assert nnx.Lite is nnx.LightningLite is sys.modules["nnx_lite"].Lite
        """
    )


@pytest.mark.full
def test_another_package_of_the_same_name_disturbs_nothing(site, run_python) -> None:
    (site.path / "nnx").mkdir()
    (site.path / "nnx" / "__init__.py").write_text(FOREIGN)
    run_python(
        """
        import sys
        import torch
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import StrategyRegistry

        import nnx
        assert nnx.Linear
        assert {"fsdp_auto", "nnscaler_dp", "colossalai"} <= set(StrategyRegistry)
        for name in ("fsdp_auto", "nnscaler_dp", "colossalai"):
            Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)

        import nnx_checkpoint
        from nnx_base.shard import shard_of
        nnx_checkpoint.save("a.ckpt", tensors={"w": shard_of(torch.ones(2))}, objects={})
        assert nnx_checkpoint.open_checkpoint("a.ckpt").read("w").tolist() == [1, 1]

        from nnx_checkpoint.cli.command import main
        sys.argv = ["nnx", "doctor"]
        try:
            main()
        except SystemExit as end:
            assert end.code == 1
        """
    )


def test_the_doctor_names_another_package_of_the_same_name(tmp_path, monkeypatch) -> None:
    assert doctor._check_face() == []
    other = tmp_path / "__init__.py"
    other.write_text(FOREIGN)
    monkeypatch.setattr(doctor, "find_spec", lambda name: importlib.util.spec_from_file_location(name, other))
    (finding,) = doctor._check_face()
    assert str(other) in finding.detail and "--force-reinstall" in finding.remedy
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert "finds nothing" in doctor._check_face()[0].detail


@pytest.mark.parametrize("missing", ["pluggy", "nnx_conformance"])
def test_the_command_survives_what_is_missing(run_python, missing: str) -> None:
    command = "doctor" if missing == "pluggy" else "conformance"
    done = run_python(
        f"""
        import sys
        sys.modules[{missing!r}] = None
        from nnx_checkpoint.cli.command import main
        sys.argv = ["nnx", {command!r}]
        main()
        """,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert {"pluggy": "pip install pluggy", "nnx_conformance": "pip install nnx-conformance"}[
        missing
    ] in done.stderr
