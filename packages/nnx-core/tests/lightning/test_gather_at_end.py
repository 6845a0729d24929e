"""The weights at the end of a run: on every rank, on rank 0 or on no rank, and their uses."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nnx
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import NnxError
from nnx_core.view.modules import move_states
from nnx_test_helpers.training import Net, Run, digest_of, make_trainer

STRATEGIES = ["fsdp_auto", "nnx_deepspeed_3", "nnscaler_zero", "colossalai", "tiny", "fairscale_fsdp"]


def _trainer(strategy: str, gather: str, **settings: Any) -> Any:
    return make_trainer(Run(strategy, {"gather_at_end": gather}, **settings))


def _attempt(action: Any) -> Any:
    try:
        return action()
    except NnxError as error:
        return str(error)


def run(strategy: str, gather: str, folder: str) -> dict[str, Any]:
    """Fit, then save, test, test with a checkpoint and fit again; return the result of each."""
    module = Net(Run(strategy))
    trainer = _trainer(strategy, gather, steps=3)
    trainer.fit(module)
    left = [parameter.is_meta for parameter in module.parameters()]
    weights = {name: value for name, value in module.state_dict().items() if not value.is_meta}
    report = {
        "left": sum(left),
        "all": len(left),
        "digest": "" if any(left) else digest_of(weights),
        "tied": module.head.weight is module.back.weight,
        "save": _attempt(lambda: trainer.save_checkpoint(f"{folder}/after")),
    }

    def test(path: str | None) -> float:
        other = _trainer(strategy, gather)
        loss: float = other.test(module, ckpt_path=path, verbose=False)[0]["test_loss"]
        return loss

    report["test"] = _attempt(lambda: test(None))
    report["with checkpoint"] = _attempt(lambda: test(f"{folder}/of_all"))
    losses = len(module.losses)

    def fit_again() -> list[float]:
        _trainer(strategy, gather, steps=2).fit(module)
        return module.losses[losses:]

    report["again"] = _attempt(fit_again)
    return report


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_where_they_were_asked_for_and_runs_follow(
    pool: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "all").mkdir()
    everywhere = pool.run(run, strategy, "all", str(tmp_path / "all"), world_size=2)
    (tmp_path / "all/after").rename(tmp_path / "of_all")
    assert [report["left"] for report in everywhere] == [0, 0]

    first, second = pool.run(run, strategy, "rank0", str(tmp_path), world_size=2)
    assert (first["left"], first["digest"]) == (0, everywhere[0]["digest"])
    assert second["left"] == second["all"]
    assert second["tied"]
    for report in (first, second):
        assert report["save"] is None
        assert report["test"] == pytest.approx(everywhere[0]["test"], rel=1e-6)
        assert report["with checkpoint"] == report["test"]
        assert report["again"] == pytest.approx(everywhere[0]["again"], rel=1e-5)
    saved, expected = (nnx.checkpoint.open_checkpoint(str(tmp_path / name)) for name in ("after", "of_all"))
    assert list(saved.tensors) == list(expected.tensors)
    for name in expected.tensors:
        assert torch.equal(saved.read(name), expected.read(name)), name


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_nobody_holds_come_from_a_checkpoint_only(
    pool: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "all").mkdir()
    everywhere = pool.run(run, strategy, "all", str(tmp_path / "all"), world_size=2)
    (tmp_path / "all/after").rename(tmp_path / "of_all")
    for report in pool.run(run, strategy, "none", str(tmp_path), world_size=2):
        assert report["left"] == report["all"]
        assert "gather_at_end='rank0'" in report["test"]
        assert "gather_at_end='rank0'" in report["again"]
        assert report["with checkpoint"] == pytest.approx(everywhere[0]["test"], rel=1e-6)
        assert "gather_at_end" in report["save"]
    assert not (tmp_path / "after").exists()


def test_an_unknown_choice_is_refused_with_the_others() -> None:
    with pytest.raises(nnx.OptionError, match="'all', 'rank0'"):
        nnx.strategy("fsdp_auto", gather_at_end="rank1")


# --- how much lives at once -----------------------------------------------------------------------


def _plain(values: Any) -> list[Tensor]:
    leaves = tree_leaves(values)
    return [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, DTensor) and not t.is_meta]


class Living(TorchDispatchMode):
    """Counts the bytes of new tensors that are alive at once, each memory once."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage()._cdata for tensor in _plain((args, kwargs))}
        for tensor in _plain(result):
            if tensor.untyped_storage()._cdata not in known:  # a view, or an argument
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, key, None)
            self.peak = max(self.peak, sum(self._sizes.values()))


class Wide(Net):
    """Twenty-four layers of a megabyte each."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.wide = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(24)))
        self.into = nn.Linear(6, 512)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.wide(self.into(x))[..., :6]


def peak_of_teardown(strategy: str, gather: str) -> tuple[float, int]:
    """Bytes that come to life in the engine's part of teardown, in layers."""
    trainer = _trainer(strategy, gather, steps=2)
    backend, living = trainer.strategy.backend, Living()
    own = backend.unparallelize

    def counted(module: nn.Module) -> Any:
        with living:
            return own(module)

    backend.unparallelize = counted
    trainer.fit(Wide(Run(strategy)))
    return living.peak / (512 * 512 * 4)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp_auto", "nnx_deepspeed_3", "colossalai"])
def test_a_rank_that_keeps_no_weights_holds_few_layers_at_once(pool: WorkerPool, strategy: str) -> None:
    first, second = pool.run(peak_of_teardown, strategy, "rank0", world_size=2)
    assert first >= 24  # the count counts
    assert second <= 8  # the buffers of gloo are freed a little later
    assert max(pool.run(peak_of_teardown, strategy, "none", world_size=2)) <= 4


# --- the state of optimizers ----------------------------------------------------------------------


def test_states_are_moved_once_with_what_describes_them() -> None:
    from nnx_base.shard import shard_of
    from nnx_checkpoint.reading.state import describe_optimizer

    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    described = {optimizer: describe_optimizer(module, optimizer, lambda t, parameter=None: shard_of(t))}

    move_states([optimizer], described, torch.device("meta"))

    moments = optimizer.state[module.weight]
    assert all(value.is_meta for value in moments.values())
    shard = described[optimizer]["state"]["weight"]["exp_avg"]
    assert shard.data[0] is moments["exp_avg"]
    assert shard.shape == (2, 3)
