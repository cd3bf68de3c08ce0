"""Floor 6: the command line; every command is a thin call."""
