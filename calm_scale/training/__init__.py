"""Floor 4: one engine-agnostic training loop and its two engines."""
