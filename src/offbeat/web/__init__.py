"""The page: a run's folder in, HTML and JSON out; it never looks at the coordinator."""
