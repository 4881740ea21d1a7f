"""Tasks that come with Offbeat."""
