"""Floor 2: checkpoints that are complete or absent, never half there."""
