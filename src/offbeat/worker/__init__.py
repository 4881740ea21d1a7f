"""The worker: a process that pulls a model, trains it on its device's data and pushes what came of it."""
