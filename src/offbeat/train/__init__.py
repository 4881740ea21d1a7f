"""Local training with PyTorch: the paper's proximal problem, solved by SGD on flat buffers."""
