"""Floor 4: likelihood-free temperature sampling and generation."""
