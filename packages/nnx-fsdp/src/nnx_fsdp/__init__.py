"""FSDP2 strategies."""
