"""A task: how it is found and loaded, and how it lives in another process than the one that needs it."""
