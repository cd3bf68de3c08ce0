"""Floor 1: raw text → tokens → packed, K-aligned shards with a manifest; and the readers that train from them."""
