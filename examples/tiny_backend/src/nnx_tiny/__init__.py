"""A complete third-party plugin for nnx; read `plugin`, then `backend`."""
