"""The live scheduler: wiring, the runner that executes the core's instructions, stacks, telemetry."""
