"""Floor 3: the CALM language model on Megatron-core and its autoregressive baseline."""
