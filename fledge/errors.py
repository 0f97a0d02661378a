"""Errors caused by the user's input, and text made safe to print. Each message says what to change."""


def printable(text: str, most: int = 4000) -> str:
    """The text as one safe line of at most `most` characters: control characters could move the cursor or forge log lines."""
    line = "".join(char if char.isprintable() else " " if char.isspace() else "\ufffd" for char in text[: most + 1])
    return line if len(line) <= most else line[:most] + "…"


def literal(text: str) -> str:
    """`printable` text with Rich markup escaped, so that names from files and servers are shown exactly as written."""
    from rich.markup import escape

    shown = printable(text)
    body = shown.rstrip("\\")
    # Rich unescapes backslashes only before a tag, so backslashes at the end are doubled and an empty tag is appended.
    ends = "\\" * 2 * (len(shown) - len(body))
    return escape(body) + (f"{ends}[none][/none]" if ends else "")


def first_line(error: Exception) -> str:
    """The first line of a library exception's message, to quote in our own errors; its type's name if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UserError(ValueError):
    """An error caused by the user's input, printed as one line without a traceback.

    The message names what is wrong and says what to change.
    """


class UsageError(UserError):
    """A command line that cannot be read: an unknown flag, or a missing argument."""


class ModelError(UserError):
    """A model, drafter or tokenizer that cannot be used: missing, damaged, unsupported or mismatched."""


class RequestError(UserError):
    """A request the engine refuses: empty, too long, or with parameters that make no sense."""
