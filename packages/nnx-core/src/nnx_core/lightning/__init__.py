"""Connect nnx with Lightning: Trainer and Fabric adapters over the backend contract.

Lightning exists twice, as ``lightning`` and as ``pytorch_lightning`` / ``lightning_fabric``: two module
trees whose classes are unrelated. The adapters here are mixins that import neither;
`nnx_core.lightning.namespaces` puts them on the base class of each tree. Beside this package only
`nnx_lite` imports Lightning.
"""
