"""Connect nnx with Lightning: Trainer and Fabric adapters over the backend contract.

Lightning exists twice, as ``lightning`` and as ``pytorch_lightning`` / ``lightning_fabric``: two module
trees whose classes are unrelated. The adapters here are mixins that import neither;
`nnx_core.lightning.namespaces` combines them with the base class of each tree. Of the other packages only
`nnx_lite` imports Lightning.
"""
