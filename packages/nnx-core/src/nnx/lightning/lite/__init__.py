"""Lite: LightningLite's flags and methods on today's Fabric. `nnx.lite` is where users import it from."""
