"""The machine: its devices and links."""
