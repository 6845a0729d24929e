"""What operators and collectives cost, measured once."""
