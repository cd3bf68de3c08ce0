"""Floor 1: raw text becomes K-aligned token shards with a manifest, and is read back without a copy."""
