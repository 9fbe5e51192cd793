"""Native Sa2VA: configuration, checkpoints, processing, model, decoding, prediction, mask losses."""
