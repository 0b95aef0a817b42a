"""Text that another machine chose, made safe to show."""


def printable(text: str) -> str:
    """One line that no terminal obeys: control, direction and invisible characters as escapes."""
    if text.isprintable():  # nearly all are, and a page has thousands
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
