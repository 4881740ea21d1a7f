"""An app that takes no time to import: x follows what the nodes make of it."""
