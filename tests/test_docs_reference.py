"""The reference has every public name, and the site's menu has every page."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
NOT_TO_BE_DESCRIBED = {"__version__", "StrategyRegistry", "LightningLite", "DeepSpeedPlugin"}
"""A string, the one instance of a class that is described, and second names."""
MODULES = {
    "nnx.md": "nnx-core/src/nnx_core",
    "checkpoint.md": "nnx-checkpoint/src/nnx_checkpoint",
    "testing.md": "nnx-conformance/src/nnx_conformance",
    "fsdp.md": "nnx-fsdp/src/nnx_fsdp",
    "nnscaler.md": "nnx-nnscaler/src/nnx_nnscaler",
    "colossalai.md": "nnx-colossalai/src/nnx_colossalai",
    "deepspeed.md": "nnx-deepspeed/src/nnx_deepspeed",
    "fairscale.md": "nnx-fairscale/src/nnx_fairscale",
    "torchft.md": "nnx-torchft/src/nnx_torchft",
    "comm.md": "nnx-comm/src/nnx_comm",
    "hivemind.md": "nnx-hivemind/src/nnx_hivemind",
    "ray.md": "nnx-ray/src/nnx_ray",
    "lite.md": "nnx-lite/src/nnx_lite",
}


def public(module: Path) -> set[str]:
    """The names in a package's `__all__`."""
    return set(importlib.import_module(module.name).__all__)


def described() -> set[str]:
    """The last parts of all names on the pages of the reference."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    return {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}


@pytest.mark.parametrize(("page", "module"), MODULES.items())
def test_the_reference_describes_every_public_name(page: str, module: str) -> None:
    assert (DOCS / "reference" / page).is_file()
    assert public(ROOT / "packages" / module) - described() - NOT_TO_BE_DESCRIBED == set()


def pages_of(menu: Any) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    for entry in menu.values() if isinstance(menu, dict) else menu if isinstance(menu, list) else ():
        yield from pages_of(entry)


def test_the_menu_has_every_page_once_and_no_other() -> None:
    assert sorted(pages_of(SITE["nav"])) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )


def test_nothing_is_fetched_by_a_reader_of_the_site() -> None:
    assert SITE["strict"] is True
    assert SITE["theme"]["font"] is False
    assert "docs/site_checks.py" in SITE["hooks"], "it looks at the built pages"
