"""List the strategies of the plugin, as data."""

from __future__ import annotations

from dataclasses import replace

from nnx_core import Capabilities, StrategySpec, hookimpl

_EQUAL = Capabilities(
    precisions=("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"),
    refuses=(
        *("sparse_gradients", "sparse_gradients_of_a_function"),
        *("loss_backward_called_directly", "gradient_surgery", "pipeline_split_backward"),
    ),
)
_NEAR = replace(_EQUAL, exact=False)

_REPLICAS = replace(_NEAR, multiple_optimizers=False, refuses=_EQUAL.refuses[:2])


def _of_replicas(
    name: str, engine: str, memory: str, description: str, use_when: str, **init_params: object
) -> StrategySpec:
    return StrategySpec(
        name=name,
        target=f"nnx_comm.replicas:{engine}Backend",
        options=f"nnx_comm.options:{engine}Options",
        description=description,
        use_when=use_when,
        docs_url="docs/backends/slow-links.md",
        memory=f"nnx_comm.memory:{memory}Memory",
        capabilities=_REPLICAS,
        init_params=init_params,
    )


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """Return the strategies."""
    return [
        StrategySpec(
            name="bagua",
            target="nnx_comm.gradients:BaguaBackend",
            options="nnx_comm.options:BaguaOptions",
            description="Gradients averaged in each step through a codec; without one, the numbers of ddp",
            use_when="links are slow and you would use ddp: give it codec='bf16' or codec='int8'",
            docs_url="docs/backends/slow-links.md",
            memory="nnx_comm.memory:GradientMemory",
            capabilities=_EQUAL,
        ),
        StrategySpec(
            name="bagua_bytegrad",
            target="nnx_comm.gradients:BaguaBackend",
            options="nnx_comm.options:BaguaOptions",
            description="Gradients averaged as bytes, a quarter of ddp's, with error feedback",
            use_when="links are slow and the loss must stay near ddp's",
            docs_url="docs/backends/slow-links.md",
            memory="nnx_comm.memory:GradientMemory",
            capabilities=_NEAR,
            init_params={"algorithm": "bytegrad"},
        ),
        StrategySpec(
            name="bagua_qadam",
            target="nnx_comm.gradients:QAdamBackend",
            options="nnx_comm.options:CodecOptions",
            description="Momenta of nnx_comm.QAdam averaged as bytes, after a warm-up with exact gradients",
            use_when="links are slow, and you would train with Adam for thousands of steps",
            docs_url="docs/backends/slow-links.md",
            memory="nnx_comm.memory:GradientMemory",
            capabilities=_NEAR,
            init_params={"codec": "int8"},
        ),
        StrategySpec(
            name="powersgd",
            target="nnx_comm.gradients:PowerSGDBackend",
            options="nnx_comm.options:PowerSGDOptions",
            description="Gradients averaged as products of thin matrices, by torch's PowerSGD",
            use_when="links are slow, and the model has large matrices",
            docs_url="docs/backends/slow-links.md",
            memory="nnx_comm.memory:GradientMemory",
            capabilities=replace(_NEAR, multiple_optimizers=False),
        ),
        _of_replicas(
            "localsgd",
            "LocalSGD",
            "Weight",
            "Ranks train alone, and average their weights every 20 steps",
            "links are so slow that gradients cannot travel in each step",
        ),
        _of_replicas(
            "bagua_decentralized",
            "Decentralized",
            "Weight",
            "Ranks step alone, then average their weights with all ranks or with one",
            "you come from Bagua, or each rank should talk to one other rank at a time",
        ),
        _of_replicas(
            "bagua_low_precision_decentralized",
            "LowPrecision",
            "LowPrecision",
            "Ranks step alone, then average their weights with two neighbours, by changes sent as bytes",
            "you come from Bagua, or many ranks should talk to two neighbours only",
        ),
        _of_replicas(
            "bagua_async",
            "Async",
            "Async",
            "Ranks train while their weights travel, and add the average 10 steps later",
            "an exchange takes as long as several steps, and ranks need not wait for it",
        ),
        _of_replicas(
            "diloco",
            "DiLoCo",
            "DiLoCo",
            "Ranks train alone; every 20 steps an outer SGD steps on the average change",
            "links are so slow that gradients cannot travel in each step, as between sites",
        ),
        _of_replicas(
            "diloco_streaming",
            "DiLoCo",
            "DiLoCo",
            "DiLoCo in fragments of the model, each exchanged at its own step",
            "one exchange of the whole model in diloco takes too long at once",
            fragments=4,
        ),
    ]
