"""The loss of the rollouts of a micro-batch."""
