"""The autoencoder's engine: DeepSpeed ZeRO 0 to 3."""
