"""What a run works on: data, split, frozen model and the bank of its masks."""
