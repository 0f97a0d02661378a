"""What went wrong, said to the person who can put it right."""


def printable(text: str, most: int = 4000) -> str:
    """One line that is safe to print: no control characters, which move a terminal's cursor or forge lines of a log."""
    line = "".join(char if char.isprintable() else " " if char.isspace() else "\ufffd" for char in text[: most + 1])
    return line if len(line) <= most else line[:most] + "…"


def literal(text: str) -> str:
    """`printable`, for a place where Rich reads markup: names from files and servers are shown as they are written."""
    from rich.markup import escape

    shown = printable(text)
    body = shown.rstrip("\\")
    # Rich reads backslashes in pairs, but only before a tag: those at the end get one of their own.
    ends = "\\" * 2 * (len(shown) - len(body))
    return escape(body) + (f"{ends}[none][/none]" if ends else "")


def first_line(error: Exception) -> str:
    """What an exception of a library says, for an error of our own; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UserError(ValueError):
    """A mistake in what the user gave: printed as one line, without a traceback.

    Messages name the thing that is wrong and what to do about it.
    """


class UsageError(UserError):
    """A command line that cannot be read: an unknown flag, or a missing argument."""


class ModelError(UserError):
    """A model, drafter or tokenizer that cannot be used: missing, damaged, unsupported or mismatched."""


class RequestError(UserError):
    """A request the engine refuses: empty, too long, or with parameters that make no sense."""
