"""Who has which colour and letter, and the colours of both schemes: computed, so that everything can be read in both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specens.analysis.html.markup import Html, tag

PALETTE = ("0072b2", "e69f00", "009e73", "d55e00", "56b4e9", "cc79a7", "f0e442", "8c564b")
"""Colours of the drafters, in member order: Okabe and Ito's set, which colour-blind readers can tell apart, and a brown.
A ninth drafter gets the first again; the letters tell the two apart."""

SCHEMES = {
    "light": {
        "paper": "ffffff",
        "soft": "f2f4f7",
        "ink": "1b1f24",
        "faint": "59616b",
        "line": "d5dae1",
        "alarm": "b42318",
        "heat": "0072b2",
    },
    "dark": {
        "paper": "14171b",
        "soft": "20252b",
        "ink": "e4e7eb",
        "faint": "a3acb7",
        "line": "3a4149",
        "alarm": "ff9b8e",
        "heat": "56b4e9",
    },
}
"""Scheme -> role -> colour. Text is `ink`, `faint` or `alarm`, on `paper`, on `soft`, or (ink alone) on a drafter's tint or a
shade of `heat`."""

TINT_CONTRAST = 6.0
"""What text has on a drafter's tint, at least: more than it needs (4.5; WCAG 2.2, 1.4.3), as the letters there are small."""

NUM_SHADES = 10

GRAPHIC_CONTRAST = 3.0
"""What lines and bars need against the paper to be seen (WCAG 2.2, 1.4.11)."""


@dataclass(frozen=True, slots=True)
class Cast:
    """The drafters of a page, in member order. Index i has the colours `--c<i>` (for lines and bars) and `--t<i>` (its tint)."""

    names: tuple[str, ...]
    letters: tuple[str, ...]

    @staticmethod
    def of(names: Iterable[str]) -> Cast:
        names = tuple(names)
        return Cast(names, tuple(_letters(names)))

    def letters_of(self, winners: Sequence[int]) -> str:
        return " ".join(self.letters[index] for index in winners)

    def label(self, name: str) -> Html:
        """A drafter's mark, as the texts have it, and its name."""
        return tag("span", self.mark(name), " ", tag("bdi", name), class_="who")

    def mark(self, name: str) -> Html:
        """The letter on the tint; a bare dot for a drafter that is not of this run."""
        if name not in self.names:
            return tag("span", "·", class_="mark")
        index = self.names.index(name)
        return tag("span", self.letters[index], class_=f"mark t{index}")

    def legend(self) -> Html:
        return tag("p", map(self.label, self.names), class_="legend") if self.names else Html()


def _letters(names: Sequence[str]) -> list[str]:
    """A short sign for each name: the initials of its words (`non_autoregressive` is NA), numbered where two would be equal.
    Capital letters and digits only, so that it can stand in a style sheet.
    """
    taken: list[str] = []
    for name in names:
        sign = "".join(word[0] for word in re.findall("[a-z]+|[A-Z][a-z]*", name))[:3].upper() or "D"
        count = sum(re.fullmatch(rf"{sign}\d*", other) is not None for other in taken)
        taken.append(sign if not count else f"{sign}{count + 1}")
    return taken


def style(cast: Cast, winners: Iterable[tuple[int, ...]]) -> str:
    """The rules that depend on the run: the colours by role and drafter, and how each set of winners is marked in a text."""
    variables = {role: [SCHEMES[scheme][role] for scheme in SCHEMES] for role in SCHEMES["light"]}
    rules: list[str] = []
    for index in range(len(cast.names)):
        colour = PALETTE[index % len(PALETTE)]
        variables[f"c{index}"] = [strong(colour, scheme) for scheme in SCHEMES]
        variables[f"t{index}"] = [tint(colour, scheme) for scheme in SCHEMES]
        rules.append(
            f".c{index} {{ --c: var(--c{index}); --t: var(--t{index}) }} .t{index} {{ background: var(--t{index}) }}"
        )
    for level in range(1, NUM_SHADES + 1):
        variables[f"h{level}"] = [shade(level, scheme) for scheme in SCHEMES]
        rules.append(f".h{level} {{ background: var(--h{level}) }}")
    rules += [_winner_rule(cast, members) for members in sorted(set(winners))]
    root = [f"--{name}: light-dark(#{light}, #{dark});" for name, (light, dark) in variables.items()]
    return "\n".join([":root {", *root, "}", *rules])


def winner_class(members: Sequence[int]) -> str:
    return "w" + "-".join(map(str, members))


def _winner_rule(cast: Cast, members: tuple[int, ...]) -> str:
    """One winner: its tint. A tie: the tints in stripes. The letters come from the style sheet, so no copied text has them."""
    if len(members) == 1:
        background = f"var(--t{members[0]})"
    else:
        stripes = ", ".join(f"var(--t{index}) {7 * i}px {7 * (i + 1)}px" for i, index in enumerate(members))
        background = f"repeating-linear-gradient(115deg, {stripes})"
    name = winner_class(members)
    letters = cast.letters_of(members)
    return (
        f'.{name} {{ --c: var(--c{members[0]}); background: {background} }} .{name}::before {{ content: "{letters}" }}'
    )


def tint(colour: str, scheme: str) -> str:
    """The paper behind a drafter's tokens: half of its colour, or less where text could not be read on that."""
    paper, ink = SCHEMES[scheme]["paper"], SCHEMES[scheme]["ink"]
    mixed = (mix(paper, colour, share / 20) for share in range(10, 0, -1))
    return next(candidate for candidate in mixed if contrast(candidate, ink) >= TINT_CONTRAST)


def shade(level: int, scheme: str) -> str:
    """The paper behind a cell of a heat map, from 1 to NUM_SHADES."""
    return mix(SCHEMES[scheme]["paper"], SCHEMES[scheme]["heat"], 0.45 * level / NUM_SHADES)


def strong(colour: str, scheme: str) -> str:
    """The colour, moved towards the ink until it stands out from the paper."""
    paper, ink = SCHEMES[scheme]["paper"], SCHEMES[scheme]["ink"]
    shares = (share / 20 for share in range(21))
    mixed = (mix(colour, ink, share) for share in shares)
    return next(candidate for candidate in mixed if contrast(candidate, paper) >= GRAPHIC_CONTRAST)


def mix(first: str, second: str, share: float) -> str:
    """`share` of the second colour and the rest of the first, both as six hexadecimal digits."""
    pairs = zip(bytes.fromhex(first), bytes.fromhex(second), strict=True)
    return bytes(round(a + (b - a) * share) for a, b in pairs).hex()


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = [byte / 255 for byte in bytes.fromhex(colour)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
