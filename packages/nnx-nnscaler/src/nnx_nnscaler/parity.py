"""Compare a program with the module that it was compiled from: outputs and every gradient, rank by rank.

The ranks are threads of this process, so any number of them runs anywhere. Each has its own random state,
which starts equal on all of them, as on the ranks of a unit.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nnx_core._torch_compat import TorchDispatchMode, tree_leaves, tree_map
from nnx_core.communicator import Communicator
from nnx_nnscaler.codegen.emit import Program, emit, load_program
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.ir.placement import Placement, R
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.plan.pipeline_plan import AnyPlan, PipelinePlan
from nnx_nnscaler.plan.planning import plan_program, replicated_plan
from nnx_nnscaler.runtime.functions import Conversions, Runtime, join_parts
from nnx_nnscaler.thread_ranks import run_as_ranks

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Parity:
    """The differences of a program from the module.

    Attributes:
        output: The largest difference of an output, relative to the output's largest value.
        gradient: The largest difference of a gradient, relative to the gradient's largest value.
        buffer: The largest difference of a buffer afterwards.
        worst: The place of the largest difference: ``"output 0"``, or the name of a parameter or buffer.
        source: The program.
        plan: The plan of the program.
    """

    output: float
    gradient: float
    buffer: float
    worst: str
    source: str
    plan: AnyPlan

    @property
    def error(self) -> float:
        """The largest of the differences."""
        return max(self.output, self.gradient, self.buffer)


def check_parity(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    size: int,
    plan: ProgramPlan | Callable[[Graph], ProgramPlan] | None = None,
    policy: str | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    call: Arguments | None = None,
    recompute: Sequence[str] = (),
) -> Parity:
    """Trace a module, plan and emit it for a unit, run it in threads, and compare with the module itself.

    Args:
        module: The module, which does not change.
        args: The sample inputs for the trace.
        kwargs: The sample inputs by name.
        size: The number of ranks of the unit.
        plan: The plan, or a function that makes it; by default the plan of `policy`.
        policy: The name of a policy; without plan and policy every rank replicates everything.
        dtype: The dtype that floating point parameters, buffers and inputs are converted to.
        seed: The seed of the random numbers.
        call: The inputs of the run, if they differ from the sample.
        recompute: Patterns of submodules that backward recomputes.
    """
    from nnx_nnscaler.trace import trace_forward

    module = copy.deepcopy(module).to(dtype)
    sample = _converted((tuple(args), dict(kwargs or {})), dtype)
    with precise(dtype):
        graph = trace_forward(module, *sample)
    if policy is not None:
        made = plan_program(graph, size=size, policy=policy)
    elif isinstance(plan, ProgramPlan):
        made = plan
    else:
        made = plan(graph) if plan is not None else replicated_plan(graph, size)
    return compare(
        module,
        graph,
        made,
        sample if call is None else _converted(call, dtype),
        seed=seed,
        recompute=recompute,
    )


def compare(
    module: nn.Module,
    graph: Graph,
    plan: AnyPlan,
    call: Arguments,
    *,
    seed: int = 0,
    recompute: Sequence[str] = (),
    program: Program | None = None,
) -> Parity:
    """Run one program and the module itself on the same call, and compare."""
    source = "" if isinstance(plan, PipelinePlan) else emit(graph, plan, recompute=recompute)
    with precise(next((p.dtype for p in module.parameters()), torch.float32)):
        expected = _run_module(copy.deepcopy(module), call, seed)
    found = run_ranks(program or source, graph, plan, module, call, seed=seed)
    errors = {
        "output": _worst(_outputs_differ(expected, found)),
        "gradient": _worst(_gradients_differ(expected, found, plan)),
        "buffer": _worst(_buffers_differ(expected, found)),
    }
    worst = max(errors.values())
    amounts = {kind: error for kind, (error, _) in errors.items()}
    return Parity(**amounts, worst=worst[1], source=source, plan=plan)


def run_ranks(
    source: str | Program,
    graph: Graph,
    plan: AnyPlan,
    module: nn.Module,
    call: Arguments,
    *,
    seed: int = 0,
) -> list[Run]:
    """Run a program on every rank of a unit, each with its own copy of the module; backward on request."""
    program = load_program(source) if isinstance(source, str) else source
    alone, gradients = threading.Lock(), torch.is_grad_enabled()

    def run(unit: Communicator) -> Run:
        with torch.set_grad_enabled(gradients):  # a new thread starts with gradients enabled
            return _run_program(program, graph, plan, copy.deepcopy(module), call, seed, unit, alone)

    return run_as_ranks(plan.size, run)


@dataclass(slots=True)
class Run:
    """The results of one run."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    parts: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def _run_module(module: nn.Module, call: Arguments, seed: int) -> Run:
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        outputs = _tensors(module(*call[0], **call[1]))
        _backward(outputs)
    finally:
        torch.random.set_rng_state(generator)
    gradients = {name: _gradient(parameter) for name, parameter in module.named_parameters()}
    return Run(outputs, gradients, {}, dict(module.named_buffers()))


def _run_program(
    program: Program,
    graph: Graph,
    plan: AnyPlan,
    module: nn.Module,
    call: Arguments,
    seed: int,
    unit: Communicator,
    alone: threading.Lock,
) -> Run:
    unit.drawn = _draw  # type: ignore[method-assign] # this thread has its own random state
    runtime = _runtime(unit)
    owners = dict(module.named_parameters(remove_duplicate=False))
    weights: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    parts = {
        name: _part(runtime, owners[name], plan.stored.get(name, R)) for name in graph.parameters.values()
    }
    weights.update(parts)
    leaves = tree_leaves((tuple(call[0]), dict(call[1])))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    with _RankRandom(seed, alone):
        outputs = _tensors(program(runtime, module, weights, graph.constants, *tensors))
        _backward(outputs)
    whole = {name: _gradient(parameter) for name, parameter in module.named_parameters()}
    of_parts = {name: _gradient(part) for name, part in parts.items()}
    return Run(outputs, whole, of_parts, dict(module.named_buffers()))


def _gradient(parameter: Tensor) -> Tensor | None:
    """Return a gradient whose elements can be compared: a sparse one becomes dense."""
    gradient = parameter.grad
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def _draw(draw: Callable[[], Tensor]) -> Tensor:
    return draw()


def _runtime(unit: Communicator) -> Conversions:
    return Runtime(unit)


def _part(runtime: Conversions, parameter: Tensor, stored: Placement) -> nn.Parameter:
    data = parameter.detach()
    if stored.is_shard:
        data = runtime.part(data, stored.dim, stored.groups)
    return nn.Parameter(data.clone(), requires_grad=parameter.requires_grad)


def precise(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context in which code that asks for float32 computes in float64, if `dtype` is float64."""
    return _Precise() if dtype == torch.float64 else nullcontext()


class _Precise(TorchFunctionMode):
    """Lets code that asks for float32 compute in float64, so that rounding hides no difference."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        swapped = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return function(*swapped, **named)


class _RankRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operators of one thread draw from the thread's own state, as if it were a process.

    Args:
        seed: The seed of the state.
        alone: A lock for the time in which the process's generator has the thread's state.
    """

    def __init__(self, seed: int, alone: threading.Lock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = torch.Generator().manual_seed(seed).get_state()
        self._alone = alone

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **(kwargs or {}))
        with self._drawing():
            return function(*args, **(kwargs or {}))

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        with self._alone:
            others = torch.random.get_rng_state()
            torch.random.set_rng_state(self._state)
            try:
                yield
            finally:
                self._state = torch.random.get_rng_state()
                torch.random.set_rng_state(others)


def _converted(call: Arguments, dtype: torch.dtype) -> Arguments:
    def converted(leaf: Any) -> Any:
        return leaf.detach().to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    result: Arguments = tree_map(converted, (tuple(call[0]), dict(call[1])))
    return result


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _backward(outputs: Sequence[Tensor]) -> None:
    """Run backward from a weighted sum of all outputs, with different weights for all elements."""
    losses = [
        (output * torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)).sum()
        for output in outputs
        if output.requires_grad
    ]
    if losses:
        torch.stack([loss.double() for loss in losses]).sum().backward()  # type: ignore[no-untyped-call]


_Difference = tuple[float, str]


def _worst(differences: Iterator[_Difference]) -> _Difference:
    return max(differences, default=(0.0, ""))


def _outputs_differ(expected: Run, found: list[Run]) -> Iterator[_Difference]:
    for run in found:
        if len(run.outputs) != len(expected.outputs):
            yield float("inf"), f"{len(run.outputs)} outputs instead of {len(expected.outputs)}"
        for index, (one, other) in enumerate(zip(expected.outputs, run.outputs, strict=False)):
            yield _relative(one.detach(), other.detach()), f"output {index}"


def _buffers_differ(expected: Run, found: list[Run]) -> Iterator[_Difference]:
    for run in found:
        for name, buffer in expected.buffers.items():
            yield _relative(buffer, run.buffers[name]), name


def _gradients_differ(expected: Run, found: list[Run], plan: AnyPlan) -> Iterator[_Difference]:
    scale = max(
        (_largest(gradient) for gradient in expected.gradients.values() if gradient is not None), default=0.0
    )
    for name, gradient in expected.gradients.items():
        for rank in range(len(found)):
            seen = _gradient_of(name, found, rank, plan)
            if seen is None and gradient is None:
                continue
            one = torch.zeros_like(seen) if gradient is None and seen is not None else gradient
            other = torch.zeros_like(gradient) if seen is None and gradient is not None else seen
            assert one is not None and other is not None
            yield _relative(one, other, floor=1e-3 * scale), name


def _gradient_of(name: str, runs: list[Run], rank: int, plan: AnyPlan) -> Tensor | None:
    """Return the unsharded gradient of a parameter as the backend would compute it on one rank."""
    parts = [run.parts.get(name) for run in runs]
    stored = plan.stored.get(name, R)
    gradient = parts[rank]
    if gradient is not None and name in plan.synchronized:
        gradient = torch.stack([part for part in parts if part is not None]).sum(dim=0)
    elif gradient is not None and stored.is_shard:
        gradient = join_parts([part for part in parts if part is not None], stored)
    elsewhere = runs[rank].gradients[name]  # from submodules in eager mode
    if gradient is None or elsewhere is None:
        return elsewhere if gradient is None else gradient
    return gradient + elsewhere


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _relative(expected: Tensor, found: Tensor, *, floor: float = 0.0) -> float:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if expected.numel() == 0 or torch.equal(expected, found):
        return 0.0
    difference = _largest(expected.double() - found.double())
    largest = max(_largest(expected.double()), floor)
    return difference / largest if largest else float("inf") if difference else 0.0
