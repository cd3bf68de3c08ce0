"""Floor 4: weights that travel: the published checkpoint layout, read and written."""
