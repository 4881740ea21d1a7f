"""Training under a virtual clock."""
