"""Markup that is safe by construction: `Html` is markup, every other text is shown as text,
whatever is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeAlias

_VOID = ("input", "meta")
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINES = (0x2028, 0x2029)
_SHOWN = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **{code: f"[U+{code:04X}]" for code in (*range(0x80, 0xA0), *_BIDI, *_LINES)},
    **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD),
}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[Child] | None"


def visible(text: str) -> str:
    """`text` with everything that would be lost in a page or on a terminal, or would act on what is
    around it, as a visible sign: control characters (NUL is U+2400), bidirectional controls, line
    separators, halves of surrogate pairs.
    """
    return text.replace("\r\n", "\n").translate(_SHOWN)


def markup(*children: Child) -> Html:
    """The children one after another: `Html` as it is, other text escaped, None left out, lists in
    turn.
    """
    parts: list[str] = []
    for child in children:
        if isinstance(child, str):
            parts.append(child if isinstance(child, Html) else escape(visible(child)))
        elif child is not None:
            parts.append(markup(*child))
    return Html("".join(parts))


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """`<name attributes>children</name>`. `class_` is class and `data_tip` data-tip; None and False
    are left out, True stands alone.
    """
    given = name
    for key, value in attributes.items():
        if value is not None and value is not False:
            quoted = "" if value is True else f'="{escape(visible(str(value)))}"'
            given += f" {key.strip('_').replace('_', '-')}{quoted}"
    return Html(f"<{given}>" if name in _VOID else f"<{given}>{markup(*children)}</{name}>")


def section(title: str, *children: Child, note: str | None = None) -> Html:
    """A part of the page; nothing when it has no content."""
    content = markup(*children)
    if not content:
        return Html()
    return tag("section", tag("h2", title), faint(note), content)


def faint(note: str | None) -> Html:
    """An explanation."""
    return tag("p", note, class_="faint") if note else Html()


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, label: str, num_left: int = 1
) -> Html:
    """A table that scrolls sideways where it is too wide; nothing without rows. The first cell of a
    row names it; the first `num_left` columns are text, the others numbers.
    """

    def cells(name: str, row: Sequence[str]) -> list[Html]:
        scope = "row" if name == "td" else "col"
        return [
            tag(
                name if column else "th",
                cell,
                class_="left" if column < num_left else None,
                scope=None if column else scope,
            )
            for column, cell in enumerate(row)
        ]

    body = [tag("tr", cells("td", row)) for row in rows]
    if not body:
        return Html()
    head = tag("thead", tag("tr", cells("th", header)))
    region = {"class_": "scroll", "tabindex": 0, "role": "region", "aria_label": label}
    return tag("div", tag("table", head, tag("tbody", body)), **region)


def folded(summary: str, *children: Child) -> Html:
    """What is shown when the reader unfolds it."""
    return tag("details", tag("summary", summary), *children)
