"""A page to try a model, a prompt policy and a reward network in the browser."""
