"""Floor 2: process groups, devices, noise, signals, watchdog and telemetry."""
