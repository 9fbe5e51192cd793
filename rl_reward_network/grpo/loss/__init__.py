"""From groups of rollouts to one number."""
