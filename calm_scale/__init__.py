"""calm-scale: pretrain Continuous Autoregressive Language Models (CALM) at scale."""

__version__ = "0.1.0"
