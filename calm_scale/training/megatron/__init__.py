"""The language model's engine: Megatron-core under tensor, pipeline and data parallelism."""
