"""Faults of the scheduler itself. Bad input is never an exception: it is a `Refuse` or `Absorb` instruction."""

from __future__ import annotations


class BrokenInvariant(Exception):
    """Something that must never be true is true; the message carries the job's story."""


class InvalidTransition(BrokenInvariant):
    """A transition that `lifecycle.py` does not have."""
