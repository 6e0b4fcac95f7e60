"""The cluster around the workers: command line, launch, front door, state, telemetry."""
