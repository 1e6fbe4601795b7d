"""Training of policies in simulation: the only place for torch. Never imported by the live service."""
