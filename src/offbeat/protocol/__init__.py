"""The server's decisions: events in, commands out. No clock, no input or output, no arrays."""
