"""The server: the coordinator on real time, behind a ledger that never forgets what was acknowledged."""
