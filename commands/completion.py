"""Prints a shell script that completes the subcommands, flags and values of `pagewire`."""

import argparse

_HELP = {
    "bash": 'eval "$(pagewire completion bash)", in ~/.bashrc',
    "zsh": "pagewire completion zsh > a file _pagewire in a folder of $fpath",
    "fish": "pagewire completion fish > ~/.config/fish/completions/pagewire.fish",
}
_FILES = ("input", "output", "chat_template", "config", "record_trace", "trace")
_FOLDERS = ("model",)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(_HELP), help="; ".join(_HELP.values()))


def main(parser: argparse.ArgumentParser, shell: str) -> int:
    """`parser`: of the whole command. Returns the exit code."""
    import shtab

    _complete_paths(parser)
    print(shtab.complete(parser, shell))
    return 0


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command)
        elif action.dest in _FILES or action.dest in _FOLDERS:
            action.complete = shtab.FILE if action.dest in _FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
