"""The command `selfspec` and the scripts in train/ and eval/: what can be said before anything slow is imported."""

from __future__ import annotations

import difflib
import io
import os
import select
import signal
import sys
import textwrap

from selfspec import __version__
from selfspec.cli.commands import COMMANDS
from selfspec.utils.errors import one_line_errors
from selfspec.utils.exactness import STORY


def main() -> None:
    """The command `selfspec`, and `python -m selfspec`."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
    elif arguments[0] == "--version":
        print(f"selfspec {__version__}")
    elif arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0], COMMANDS, 1)
        meant = f"selfspec {near[0]}" if near else f"selfspec complete {arguments[0]!r}"
        print(f"selfspec: there is no command {arguments[0]!r}; did you mean: {meant}", file=sys.stderr)
        sys.exit(2)
    else:
        sys.argv = [f"selfspec {arguments[0]}", *arguments[1:]]
        start(arguments[0])


def start(name: str) -> None:
    """A command with the arguments in sys.argv, as its script does it."""
    for stream in (sys.stdout, sys.stderr):  # a terminal of another encoding shows ? for what it lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        os.getcwd()
    except OSError as error:
        print(f"selfspec: the working directory can not be read ({error.strerror}); cd to another", file=sys.stderr)
        sys.exit(2)
    try:
        _start(name)
        sys.stdout.flush()
    except BrokenPipeError as error:
        screen = select.poll()
        screen.register(sys.stdout.fileno(), 0)
        if screen.poll(0):  # whoever read the output, such as head, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{os.path.basename(sys.argv[0])}: interrupted", file=sys.stderr)
        sys.exit(130)


def _start(name: str) -> None:
    command, arguments = COMMANDS[name], sys.argv[1:]
    if not command.config:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from selfspec.cli import servers, terminal

        called = name.replace("-", "_")
        with one_line_errors():
            getattr(terminal if hasattr(terminal, called) else servers, called)(arguments)
    elif "--help" in arguments or "-h" in arguments:
        from selfspec.cli.help import text

        print(text(name), end="")
    elif "--version" in arguments:
        print(f"selfspec {__version__}")
    else:
        from selfspec.cli.arguments import taken
        from selfspec.cli.precheck import miscomposed, misplaced

        why = misplaced(name, arguments) or miscomposed(name, arguments := taken(arguments))
        if why is not None and os.environ.get("HYDRA_FULL_ERROR") != "1":
            print(f"{os.path.basename(sys.argv[0])}: {why}", file=sys.stderr)
            sys.exit(2)
        from selfspec.cli.launch import launch

        launch(name, command.config, command.trains, arguments)


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.what}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "selfspec: self-speculative decoding in one frozen model.\n" + textwrap.fill(STORY, 100) + "\n",
            *lines,
            "\nselfspec COMMAND --help: its options, and an example. selfspec --version",
        ]
    )
