"""The heads. Each folder describes its head without torch (settings and costs); the torch module is beside it."""
