"""Handwritten digits on Flower: Flower's quickstart, with one mod in the ClientApp and another strategy."""
