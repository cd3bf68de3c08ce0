"""Floor 3: the patch autoencoder: model, objective, metrics."""
