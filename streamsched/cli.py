"""The command line. Exit codes: 0 done, 1 the answer is no (a check failed), 2 could not run, 3 fenced, 130 Ctrl-C."""

from __future__ import annotations

import logging
import os
import sys

# Before NumPy is there: products of small matrices gain nothing by several threads, and these wait by spinning on cores
# that the solver wants.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import typer

from streamsched import __version__
from streamsched.errors import EXIT_INTERRUPTED, UserError

app = typer.Typer(
    help="A streaming scheduler for shared GPU clusters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and end."),
) -> None:
    if version:
        typer.echo(f"streamsched {__version__}")
        raise typer.Exit


def _mount() -> None:
    from streamsched.commands import demo, history, models, paper, simulate, solve, status, topics, train, up, worker

    app.add_typer(topics.topics_app, name="topics")
    app.add_typer(train.train_app, name="train")
    app.add_typer(models.models_app, name="models")
    app.command("status")(status.status_command)
    app.command("worker")(worker.worker)
    app.command("up")(up.up)
    app.command("demo")(demo.demo)
    app.command("replay")(history.replay_command)
    app.command("rebuild")(history.rebuild_command)
    app.command("solve")(solve.solve_command)
    app.command("simulate")(simulate.simulate)
    app.command("compare")(simulate.compare)
    app.command("report-paper")(paper.report_paper)


def main() -> None:
    """Entry point: errors a user can meet become one line on stderr and an exit code."""
    _mount()
    try:
        app()
    except UserError as error:
        typer.echo(f"streamsched: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output is gone: say nothing more, also not at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        logging.shutdown()


if __name__ == "__main__":
    main()
