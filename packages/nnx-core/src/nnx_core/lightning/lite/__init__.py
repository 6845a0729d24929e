"""Lite: LightningLite's flags and methods on today's Fabric. Users import it from `nnx` or `nnx.lite`."""
