"""Reference tables made from the program itself: commands and flags, exit codes, recipe keys, estimates. The site's build
calls them; server limits are written into `serving.md` by `make figures`.

python docs/references.py cli|exit_codes|recipe|planning        # prints one as Markdown
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def commands() -> dict[str, Any]:
    """All commands of `fledge` by name, as click has them."""
    import typer.main

    from fledge.cli import main

    if not main.app.registered_commands:
        main._register()
    return dict(typer.main.get_command(main.app).commands)


def serve_flags() -> list[argparse._ArgumentGroup]:
    from fledge.serving.flag_parser import parser

    return list(parser()._action_groups)


def shown(default: object) -> str:
    """A default as code; flags that are off, and values that are found at run time, have none to show."""
    if default is None or isinstance(default, bool) or default in ("", (), [], argparse.SUPPRESS) or callable(default):
        return ""
    return f"`{cell(default)}`"


def options(command: Any) -> Iterator[tuple[str, str, str]]:
    """Names, default and help of a click command's arguments and options."""
    for parameter in command.params:
        if parameter.name == "help":
            continue
        is_option = parameter.param_type_name == "option"
        names = (
            ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
            if is_option
            else f"`{parameter.name.upper()}`"
        )
        default = "required" if parameter.required else shown(parameter.default)
        yield names, default, cell(getattr(parameter, "help", "") or "")


def serve_options() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Groups of `fledge serve`'s flags, which are argparse's."""
    for group in serve_flags():
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._HelpAction):
                continue
            names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest.upper()}`"
            text = cell((action.help or "").replace("%%", "%"))  # argparse formats it
            if action.choices:
                text += (": " if text else "") + ", ".join(f"`{choice}`" for choice in action.choices)
            rows.append((names, shown(action.default), text))
        if rows:
            yield str(group.title), rows


def cli() -> str:
    parts = []
    for name, command in commands().items():
        about = inspect.cleandoc(command.help or "").replace("\b\n", "").strip()
        parts.append(f"## fledge {name}\n\n{about}\n")
        if name == "serve":
            for title, rows in serve_options():
                parts.append(f"**{title}**\n\n{table(('flag', 'default', 'meaning'), rows)}\n")
        elif rows := list(options(command)):
            parts.append(table(("argument or flag", "default", "meaning"), rows) + "\n")
    return "\n".join(parts)


def exit_codes() -> str:
    """What every command ends with; `fledge --help` prints the same."""
    from fledge.cli import main

    codes: dict[int, str] = getattr(main, "EXIT_CODES", {})
    return table(("exit code", "meaning"), [(str(code), cell(text)) for code, text in codes.items()]) if codes else ""


def recipe() -> str:
    """One table a section, from the lines that `fledge train --help-recipe` prints."""
    from fledge.training.recipe import describe_keys

    parts, rows, path = [], [], []

    def flush() -> None:
        if rows:
            parts.append(table(("key", "default", "meaning"), list(rows)) + "\n")
            rows.clear()

    for line in describe_keys().splitlines():
        body, _, meaning = line.partition("  # ")
        indent = (len(body) - len(body.lstrip())) // 2
        name, _, default = body.strip().partition(":")
        path = [*path[:indent], name]
        if not default.strip() and meaning:
            if indent == 0:
                flush()
                parts.append(f"## {name}\n\n{cell(meaning)}\n")
            else:
                rows.append((f"`{'.'.join(path)}`", "", cell(meaning)))
            continue
        if indent == 0 and rows and "." in rows[-1][0]:
            flush()
            parts.append(f"## {name}\n")
        value = default.strip()
        rows.append((f"`{'.'.join(path)}`", "required" if value == "(required)" else f"`{cell(value)}`", cell(meaning)))
    flush()
    return "\n".join(parts)


def limits() -> str:
    """All flags of `fledge serve` that are limits, which shows in their names."""
    rows = []
    for _, flags in serve_options():
        for names, default, text in flags:
            if re.fullmatch(r"`--(max-[\w-]+|[\w-]+-timeout)`", names):
                rows.append((names, default, text.split(" (default ")[0]))
    return table(("flag", "default", "of what"), rows)


def planning() -> str:
    """The estimate for the default target, without its empty head line."""
    from fledge.training.planning import Plan

    return Plan().table().replace("| | |", "| figure | estimate |", 1)


REFERENCES = {"cli": cli, "recipe": recipe, "exit_codes": exit_codes, "planning": planning}

if __name__ == "__main__":
    print(REFERENCES[sys.argv[1]]())
