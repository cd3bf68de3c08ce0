"""Floor 4: one training loop, which knows no engine, and two engines that know neither it nor each other."""
