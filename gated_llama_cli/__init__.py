"""
The command line `gated-llama`.

Kept apart from `gated_llama`, whose import brings PyTorch and Transformers: modules here import them inside commands,
so that `--help` and a mistyped option answer at once. A command is a module with `register(app)`, named in `COMMANDS`.
"""

import os
import signal
import threading
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from .console import INTERRUPTED, err, quiet, report_error


COMMANDS = (
    *("convert", "verify", "inspect", "diagnose", "export"),
    *("extend_context", "convert_adapter", "eval", "train", "demo"),
)
DEBUG_VARIABLE = "GATED_LLAMA_DEBUG"

app = typer.Typer(
    help="Gated Attention for Hugging Face Transformers: convert checkpoints, prove them equal, look inside, "
    "train on, evaluate, export.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables break the names of choices, and lines of a pipe
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool):
    if wanted:
        typer.echo(version("gated-llama"))
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar=DEBUG_VARIABLE, help="Show tracebacks and library messages.")
    ] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
):
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"
    else:
        quiet()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


for _name in COMMANDS:
    import_module(f"{__name__}.{_name}").register(app)


STOPPING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def stop_cleanly():
    """
    What schedulers and lost terminals send ends a command as Ctrl-C does, with nothing left behind.

    A signal that is ignored, as nohup has it, stays so.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler)


def stop_at_once():
    """
    For forked workers, such as those of lm-eval's bootstrap.

    A pool ends them with SIGTERM and waits for them, and one that is about to wait for a lock would not come to a
    handler of Python's any more.
    """
    for number in STOPPING:
        if signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=stop_at_once)


def main(arguments: list[str] | None = None) -> int:
    """
    Runs the command line and returns its exit code.

    0 success; 1 a check that answered no; 2 bad input, told in one line on stderr; 130 interrupted. Anything else that
    escapes is a defect of this package and keeps its traceback.
    """
    stop_cleanly()
    try:
        code = app(args=arguments, prog_name="gated-llama", standalone_mode=False) or 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE) or not report_error(error):
            raise
        return 2
    if code == INTERRUPTED:
        err.print("Interrupted.")
    return code
