"""Names of strategies, launchers and formats: what plugins declare, the catalog of all, and the registry."""
