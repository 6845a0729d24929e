"""Private names of torch: only compat modules use them, their tables list them all, and torch has them."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
COMPAT = sorted(ROOT.glob("packages/*/src/*/_torch_compat.py"))
OTHERS = sorted({*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/**/*.py")}.difference(COMPAT))
NEWEST = "2.14"
OURS = {"_hooks", "_nnx_wait", "_part"}
"""Strings in compat modules that look like private names but are not torch's."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def names_of_torch(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that begins at something imported from torch, and has a private component."""
    imported: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            for alias in node.names:
                top = alias.name.partition(".")[0]
                imported[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found |= {*imported.values()}
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):  # outer attributes come before those within them
        if isinstance(node, ast.Attribute) and node not in inner:
            parts, base = [node.attr], node.value
            while isinstance(base, ast.Attribute):
                inner.add(base)
                parts.append(base.attr)
                base = base.value
            if isinstance(base, ast.Name) and base.id in imported:
                found.add(".".join([imported[base.id], *reversed(parts)]))
    for name in found:
        top, *parts = name.split(".")
        if top == "torch" and any(map(is_private, parts)):
            yield name


def attributes_of_objects(tree: ast.AST) -> set[str]:
    """Private attributes that a module uses by name or by string, and does not define itself."""
    own: set[str] = set()
    used: set[Any] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            is_of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "sys")
            (own if is_of_self else used).add(node.attr)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_[A-Za-z]\w*", str(node.value)):
            used.add(node.value)
    return {name for name in used - own - OURS if is_private(name)}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def compat_module(path: Path) -> ModuleType:
    return importlib.import_module(f"{path.parent.name}._torch_compat")


def is_covered(name: str, table: dict[str, Any]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in table)


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def test_a_private_name_is_found_however_it_is_reached() -> None:
    source = """
import torch.distributed as dist
import torch
from torch.utils import _pytree as pytree
from torch._ops import OpOverload
from torch.optim import optimizer as base
import other
import torch._dynamo
other._x.y, dist.distributed_c10d._world.pg_map, torch._C._nn.f(1).z, base._hooks, torch.ones(1).shape
"""
    assert sorted(names_of_torch(ast.parse(source))) == [
        "torch._C._nn.f",
        "torch._dynamo",
        "torch._ops.OpOverload",
        "torch.distributed.distributed_c10d._world.pg_map",
        "torch.optim.optimizer._hooks",
        "torch.utils._pytree",
    ]
    assert attributes_of_objects(ast.parse("a._b, getattr(c, '_d'), self._e, x._e")) == {"_b", "_d"}


def test_private_names_of_torch_are_used_in_compat_modules_only() -> None:
    used = {f"{path.relative_to(ROOT)}: {name}" for path in OTHERS for name in names_of_torch(parsed(path))}
    assert not used, f"move these to a _torch_compat.py: {sorted(used)}"


@pytest.mark.parametrize("path", COMPAT, ids=lambda path: path.parent.name)
def test_the_table_of_a_compat_module_has_what_it_uses_and_nothing_else(path: Path) -> None:
    tree, table = parsed(path), compat_module(path).PRIVATE_NAMES
    tables = [
        node for node in tree.body if isinstance(node, ast.Assign) and "PRIVATE_NAMES" in ast.dump(node)
    ]
    tree.body = [node for node in tree.body if node not in tables]
    names, attributes = set(names_of_torch(tree)), attributes_of_objects(tree)
    missing = {name for name in names if not is_covered(name, table)}
    parts = {part for entry in table for part in entry.split(".")}
    assert not missing | (attributes - parts)
    used = names | {f".{name}" for name in attributes}
    stale = {
        entry
        for entry in table
        if not any(name == entry or name.startswith(f"{entry}.") for name in names)
        and f".{entry.rpartition('.')[2]}" not in used
    }
    assert not stale


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, Any]:
    """Return objects of torch as in a run, by their names in the tables."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from nnx_checkpoint._torch_compat import load_structure
    from nnx_core._torch_compat import param_groups, state_of

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(module)
    module(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step()
    scheduler.step()
    torch.save(torch.ones(3), tmp_path / "saved")
    loaded, _ = load_structure(tmp_path / "saved")
    world = dist.group.WORLD
    assert world is not None
    state = state_of(module)
    (group,) = param_groups(state)
    assert isinstance(group, FSDPParamGroup)
    return {
        "Backend.Options": world._get_backend(torch.device("cpu")).options,
        "CompiledFunction": torch.compile(nn.Linear(1, 1).forward),
        "DataLoader": torch.utils.data.DataLoader([0]),
        "FSDPModule": module,
        "FSDPParam": group.fsdp_params[0],
        "FSDPParamGroup": group,
        "FSDPState": state,
        "FakeStorage": loaded.untyped_storage(),
        "Module": nn.Linear(1, 1),
        "OpOverload": torch.ops.aten.add.Tensor,
        "Optimizer": optimizer,
        "ProcessGroup": world,
        "UntypedStorage": torch.ones(1).untyped_storage(),
    }


def looked_up(name: str, objects: dict[str, Any]) -> Any:
    """Return the object of a table's name."""
    kind, _, attribute = name.rpartition(".")
    if kind in objects:
        return getattr(objects[kind], attribute)
    path, found = "torch", importlib.import_module("torch")
    for part in name.split(".")[1:]:
        path, owner = f"{path}.{part}", found
        try:  # a module may have the name of a function in it, which hides it
            found = importlib.import_module(path)
        except ModuleNotFoundError:
            found = getattr(owner, part)
    return found


def test_torch_has_every_private_name_that_nnx_uses(objects: dict[str, Any]) -> None:
    here, missing = version(torch.__version__), []
    for path in COMPAT:
        for name, private in compat_module(path).PRIVATE_NAMES.items():
            ended = private.last != NEWEST and here > version(private.last)
            if ended or here < version(private.first):
                continue
            try:
                looked_up(name, objects)
            except AttributeError:
                missing.append(f"{path.parent.name}: {name}; {private.without}")
    assert not missing, f"torch {torch.__version__} lacks: {missing}"
