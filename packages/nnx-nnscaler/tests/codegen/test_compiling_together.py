"""One rank compiles for all: every rank has the same program, and gets its errors."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from jobs.nnscaler_codegen_models import GPT, tokens
from nnx_core.backend import ParallelContext
from nnx_core.communicator import GroupCommunicator
from nnx_core.errors import NnxError, PlanError
from nnx_nnscaler.backend import NnScalerBackend
from nnx_nnscaler.compile.compiler import Compiler, ModelCall, ProgramForm, compile_together
from nnx_nnscaler.compile.programs import Programs
from nnx_nnscaler.ir.placement import R
from nnx_nnscaler.options import NnScalerOptions
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.runtime.functions import Runtime
from nnx_nnscaler.trace import forward

CPU = torch.device("cpu")


def planned(graph, layout):
    fixed = {} if layout is None else {"stored": layout.stored, "synchronized": layout.synchronized}
    return plan_program(graph, size=2, policy="tp", **fixed)


def build():
    torch.manual_seed(7)
    return GPT(layers=1).double()


def train_and_evaluate():
    """Return outputs of sharded programs, in training and in evaluation, and the results of one process."""
    torch.set_num_threads(1)
    module, own, group = build(), build(), dist.group.WORLD
    runtime = Runtime(GroupCommunicator(group))
    made = Programs(
        module,
        compiler=Compiler(form=ProgramForm(planned), size=2),
        runtime=runtime,
        device=CPU,
        unit=group,
        world=group,
    )
    made.prepare(ModelCall((tokens(), tokens(seed=1)), {}))
    weights = {}
    for name, parameter in module.named_parameters():
        stored = made.layout.stored.get(name, R)
        part = runtime.part(parameter.detach(), stored.dim, stored.groups) if stored.is_shard else parameter
        weights[name] = nn.Parameter(part.detach().clone())
    made.attach(weights)
    results = [(float(module(tokens(b), tokens(b, 1))), float(own(tokens(b), tokens(b, 1)))) for b in (4, 6)]
    module.eval()
    own.eval()
    with torch.no_grad():
        results.append((float(module(tokens()).sum()), float(own(tokens()).sum())))
    sources = [compiled.source for compiled in made.variants]
    sharded = sum(placement.is_shard for placement in made.layout.stored.values())
    return results, sources, sharded


@pytest.mark.full
def test_every_rank_runs_the_program_that_the_first_one_compiled(pool):
    outcomes = pool.run(train_and_evaluate, world_size=2, init="gloo")
    for results, sources, sharded in outcomes:
        for mine, its in results:
            assert mine == pytest.approx(its, abs=1e-12)
        assert sources == outcomes[0][1]
        assert len(sources) == 2
        assert sharded > 4


class Hooked(nn.Module):
    """A layer that has to be replicated, between two that are sharded."""

    def __init__(self):
        super().__init__()
        self.first, self.kept, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.kept.register_forward_hook(lambda module, args, output: None)
        self.shift = torch.ones(16)  # no buffer, and so on the device that it was made on

    def forward(self, x):
        x = self.kept(torch.relu(self.first(x)) + self.shift)
        return self.last(x)


def evaluate_in_parts(folder):
    """Return programs of a unit whose device has no memory for a second unsharded model."""
    torch.manual_seed(0)
    module, x = Hooked(), torch.randn(4, 8)
    with torch.no_grad():
        expected = module(x)
    backend = NnScalerBackend(NnScalerOptions(policy="tp", plan_ngpus=2, gen_savedir=folder))
    rank = dist.get_rank()
    backend.setup(ParallelContext(device=CPU, rank=rank, local_rank=rank, world_size=2, local_world_size=2))
    backend.parallelize(module, lambda: ((x,), {}))
    with (
        mock.patch.object(forward, "_WITH_VALUES", "none"),
        mock.patch.object(forward, "_with_values", side_effect=AssertionError("memory was taken")),
        torch.no_grad(),
    ):
        found = backend.run_step(module.eval(), module, x)
    torch.testing.assert_close(found, expected)
    programs = backend._laid_out[module].programs
    backend.unparallelize(module)
    return programs.causes, [program.plan for program in programs.variants]


def test_evaluation_is_planned_in_parts_where_there_is_no_memory_for_the_whole(pool, tmp_path):
    for causes, plans in pool.run(evaluate_in_parts, str(tmp_path), world_size=2, init="gloo"):
        assert causes == []
        assert len(plans) == 2
        assert all(any(placement.is_shard for placement in plan.stored.values()) for plan in plans)


def fail(where):
    """Return the error of each rank if compilation fails, or if the modules differ."""
    module = build()
    if where == "module" and dist.get_rank() == 1:
        module.blocks[0].mlp[1] = nn.ReLU()
    if where == "fingerprint" and dist.get_rank() == 1:
        module = None

    def planner(graph, layout):
        assert dist.get_rank() == 0, "only the first rank compiles"
        if where == "plan":
            raise PlanError("no plan fits.", remedy="Use more ranks.")
        raise ZeroDivisionError("a mistake in the planner")

    try:
        compile_together(
            Compiler(form=ProgramForm(planner), size=2),
            module,
            ModelCall((tokens(),), {}),
            group=dist.group.WORLD,
            device=CPU,
        )
    except NnxError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        ("plan", "PlanError", "no plan fits. Use more ranks."),
        ("mistake", "UnsupportedError", "a mistake in the planner"),
        ("module", "PlanError", "rank 0 has another one than rank 1 (code, shapes"),
        ("fingerprint", "NnxError", "reading the module failed on rank 1"),
    ],
)
def test_an_error_of_one_rank_reaches_all(pool, where, kind, message):
    outcomes = pool.run(fail, where, world_size=2, init="gloo", timeout=60)
    for outcome in outcomes:
        assert outcome is not None
        assert outcome[0] == kind
        assert message in outcome[1]
