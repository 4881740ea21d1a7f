"""Measures Offbeat beside the limit of the machine, the plain code that a user would write, and the peers."""
