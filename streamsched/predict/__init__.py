"""Run times predicted from history. Imports the core alone."""
