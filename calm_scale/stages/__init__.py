"""Floor 5: the stages of a run, wired: prep, autoencoder, language model, evaluation, generation, demo."""
