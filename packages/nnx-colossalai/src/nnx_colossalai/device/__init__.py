"""Memory and copies of the device that a rank computes on."""
