"""Errors a user can meet. Each is one clear line (what, where, what to do) and an exit code."""

EXIT_FAILED = 1
"""The command ran and its answer is "no": a check failed, a demo lost a job, topics differ."""
EXIT_UNUSABLE = 2
"""The command could not run: wrong usage, broker or Redis not reachable, unreadable file, a journal that cannot be
folded. To start it again does not help before somebody has acted."""
EXIT_FENCED = 3
"""A worker ended because another one has taken over its pool (see ARCHITECTURE.md, epochs)."""


EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C, as shells count it."""


class UserError(Exception):
    """Shown to the user as one line without a traceback; the process ends with `exit_code`."""

    exit_code = EXIT_UNUSABLE


class ServiceUnreachable(UserError):
    """A broker or Redis does not answer. The message names its address and what to do."""


class CheckFailed(UserError):
    """A check that the user asked for found something wrong."""

    exit_code = EXIT_FAILED


class MustRestart(UserError):
    """A worker cannot go on with the connections it has; one that starts anew can."""

    exit_code = EXIT_FAILED
