"""Text from a trace as it may go to a terminal.

A boundary may have any name: one with a line break in it could write a line of the report, one with
an escape sequence colour or overwrite it.
"""

from __future__ import annotations


def plain(text: str) -> str:
    """The text in one line; characters that are not printed are shown by their escapes."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
