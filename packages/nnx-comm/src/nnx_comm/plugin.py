"""List the strategies of the plugin, as data."""

from __future__ import annotations

from dataclasses import replace

from nnx_core import Capabilities, StrategySpec, hookimpl
from nnx_fsdp.plugin import CAPABILITIES as _FSDP

_EQUAL = Capabilities(
    precisions=("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"),
    refuses=(
        *("sparse_gradients", "sparse_gradients_of_a_function"),
        *("loss_backward_called_directly", "gradient_surgery", "pipeline_split_backward"),
    ),
)
_NEAR = replace(_EQUAL, exact=False)

_REPLICA = replace(_NEAR, multiple_optimizers=False, refuses=_EQUAL.refuses[:2])
_HYBRID = replace(_FSDP, exact=False, refuses=(*_FSDP.refuses, "loss_backward_called_directly"))


def _strategy(
    name: str,
    engine: str,
    description: str,
    use_when: str,
    *,
    options: str = "",
    memory: str = "Gradient",
    capabilities: Capabilities = _NEAR,
    **init_params: object,
) -> StrategySpec:
    module = {_REPLICA: "replicas", _HYBRID: "hybrid"}.get(capabilities, "gradients")
    return StrategySpec(
        name=name,
        target=f"nnx_comm.{module}:{engine}Backend",
        options=f"nnx_comm.options:{options or engine}Options",
        description=description,
        use_when=use_when,
        docs_url="docs/backends/slow-links.md",
        memory=f"nnx_comm.memory:{memory}Memory",
        capabilities=capabilities,
        init_params=init_params,
    )


_GRADIENTS = (
    _strategy(
        "bagua",
        "Bagua",
        "Gradients averaged in each step through a codec; without one, the numbers of ddp",
        "links are slow and you would use ddp: give it codec='bf16' or codec='int8'",
        capabilities=_EQUAL,
    ),
    _strategy(
        "bagua_bytegrad",
        "Bagua",
        "Gradients averaged as bytes, a quarter of ddp's, with error feedback",
        "links are slow and the loss must stay near ddp's",
        algorithm="bytegrad",
    ),
    _strategy(
        "bagua_qadam",
        "QAdam",
        "Momenta of nnx_comm.QAdam averaged as bytes, after a warm-up with exact gradients",
        "you come from Bagua, and train with Adam for thousands of steps",
        options="Codec",
        codec="int8",
    ),
    _strategy(
        "powersgd",
        "PowerSGD",
        "Gradients averaged as products of thin matrices, by torch's PowerSGD",
        "links are slow, and the model has large matrices",
        capabilities=replace(_NEAR, multiple_optimizers=False),
    ),
    _strategy(
        "fsdp_hybrid_compressed",
        "Hybrid",
        "FSDP2 within a node; gradients averaged over the nodes through a codec",
        "fsdp_hybrid waits for slow links between the nodes",
        memory="Hybrid",
        capabilities=_HYBRID,
        hybrid=True,
        codec="bf16",
    ),
)
_WEIGHTS = (
    _strategy(
        "localsgd",
        "LocalSGD",
        "Ranks train alone, and average their weights every 20 steps",
        "links are so slow that gradients cannot travel in each step",
        memory="Weight",
        capabilities=_REPLICA,
    ),
    _strategy(
        "bagua_decentralized",
        "Decentralized",
        "Ranks step alone, then average their weights with all ranks or with one",
        "you come from Bagua, or each rank should talk to one other rank at a time",
        memory="Weight",
        capabilities=_REPLICA,
    ),
    _strategy(
        "bagua_low_precision_decentralized",
        "LowPrecision",
        "Ranks step alone, then average their weights with two neighbours, by changes sent as bytes",
        "you come from Bagua, or many ranks should talk to two neighbours only",
        memory="LowPrecision",
        capabilities=_REPLICA,
    ),
    _strategy(
        "bagua_async",
        "Async",
        "Ranks train while their weights travel, and add the average 10 steps later",
        "an exchange takes as long as several steps, and ranks need not wait for it",
        memory="Async",
        capabilities=_REPLICA,
    ),
    _strategy(
        "diloco",
        "DiLoCo",
        "Ranks train alone; every 20 steps an outer SGD steps on the average change",
        "links are so slow that gradients cannot travel in each step, as between sites",
        memory="DiLoCo",
        capabilities=_REPLICA,
    ),
    _strategy(
        "diloco_streaming",
        "DiLoCo",
        "DiLoCo in fragments of the model, each exchanged at its own step",
        "one exchange of the whole model in diloco takes too long at once",
        memory="DiLoCo",
        capabilities=_REPLICA,
        fragments=4,
    ),
)


@hookimpl
def nnx_strategies() -> list[StrategySpec]:
    """Return the strategies."""
    return [*_GRADIENTS, *_WEIGHTS]
