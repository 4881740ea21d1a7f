"""Simulating on a Ray cluster: trainings of one run, or runs of a comparison, on any number of nodes."""
