"""What stays on disk: the run folder, its ledger, its models, and what can be exported from it."""
