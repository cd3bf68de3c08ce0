"""Floor 4: BrierLM, likelihood-free evaluation."""
