"""The paper's mathematics: pure functions on scalars, and coefficients applied to flat buffers.

No clock, no input or output, no logging and no global randomness in here.
"""
