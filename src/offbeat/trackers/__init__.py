"""Other people's trackers: what a run's ledger says, shown in TensorBoard and MLflow."""
