"""Step 1: train a reward network, calibrate it, and measure how far it can be trusted."""
