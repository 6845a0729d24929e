"""Names of strategies, launchers and formats: declarations of plugins, the catalog, and the registry."""
