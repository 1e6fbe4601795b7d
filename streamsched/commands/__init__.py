"""The sub-commands of `streamsched`; `cli.py` mounts them and turns a UserError into one line and an exit code."""
