"""Pictures as SVG files: what all of them have in common, readable on a light page and on a dark one."""

from collections.abc import Iterable
from xml.sax.saxutils import escape

HUES = ("#2f7fd0", "#d9731a", "#2a9d6f", "#b45fa0", "#8a7a1f", "#5b6ad0", "#c0504d", "#4f8f9f")
STYLE = """
text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#24292f}
.small{font-size:10px}.dim{fill:#59636e}.on{fill:#fff;font-size:10.5px;text-anchor:middle}.mid{text-anchor:middle}
.page{fill:#fff}.grid{stroke:#d8dee4}.line{stroke:#8c959f}.mark{stroke:#24292f;fill:#fff}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9da7b1}.page{fill:#0d1117}.grid{stroke:#2a313a}
.line{stroke:#6e7781}.mark{stroke:#e6edf3;fill:#0d1117}}
"""


def hue(index: int) -> str:
    """A colour for each, until they come again."""
    return HUES[index % len(HUES)]


def svg_text(x: float, y: float, text: str, kind: str = "") -> str:
    """A line of text. `kind`: its classes."""
    classes = f' class="{kind}"' if kind else ""
    return f'<text{classes} x="{x:g}" y="{y:g}">{escape(text)}</text>'


def svg_file(title: str, width: float, height: float, parts: Iterable[str], style: str = "") -> str:
    """A whole file.

    Args:
        title: said by screen readers.
        parts: elements, on a page of this size.
        style: CSS of this picture's own classes.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style>",
        f'<rect class="page" width="{width:g}" height="{height:g}" rx="6"/>',
    )
    return "\n".join([*head, *parts, "</svg>\n"])
