"""From the rollouts of a micro-batch to one number, the loss."""
