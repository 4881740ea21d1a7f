"""Handwritten digits on Flower: the ClientApp is as in Flower's quickstart, the ServerApp has one line of ours."""
