"""The drafters' colours and letters, and the colours of both schemes: computed, so that everything
can be read in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specens.analysis.palette import PALETTE, contrast, mix
from specens.report.markup import Html, tag

ROLES = {
    "paper": ("ffffff", "14171b"),
    "soft": ("f2f4f7", "20252b"),
    "ink": ("1b1f24", "e4e7eb"),
    "faint": ("59616b", "a3acb7"),
    "line": ("d5dae1", "3a4149"),
    "alarm": ("b42318", "ff9b8e"),
    "heat": ("0072b2", "56b4e9"),
}
"""Role -> its colour in the light and in the dark scheme. Text is `ink`, `faint` or `alarm`, on
`paper`, on `soft`, or (ink alone) on a drafter's tint or a shade of `heat`.
"""

SCHEMES = (0, 1)

TINT_CONTRAST = 6.0
"""What text has on a drafter's tint, at least: more than it needs (4.5; WCAG 2.2, 1.4.3), as the
letters there are small.
"""

NUM_SHADES = 10

GRAPHIC_CONTRAST = 3.0
"""What lines and bars need against the paper to be seen (WCAG 2.2, 1.4.11)."""


@dataclass(frozen=True, slots=True)
class Legend:
    """The drafters of a page, in member order. Index i has the colours `--c<i>` (for lines and
    bars) and `--t<i>` (its tint).
    """

    names: tuple[str, ...]
    letters: tuple[str, ...]

    @staticmethod
    def of(names: Iterable[str]) -> Legend:
        names = tuple(names)
        return Legend(names, tuple(_letters(names)))

    def letters_of(self, winners: Sequence[int]) -> str:
        return " ".join(self.letters[index] for index in winners)

    def label(self, name: str) -> Html:
        """A drafter's mark, as the texts have it, and its name."""
        return tag("span", self.mark(name), " ", tag("bdi", name), class_="drafter")

    def mark(self, name: str) -> Html:
        """The letter on the tint; a bare dot for a drafter that is not of this run."""
        if name not in self.names:
            return tag("span", "·", class_="mark")
        index = self.names.index(name)
        return tag("span", self.letters[index], class_=f"mark t{index}")

    def line(self) -> Html:
        return tag("p", map(self.label, self.names), class_="legend") if self.names else Html()


def _letters(names: Sequence[str]) -> list[str]:
    """A short sign for each name: the initials of its words (`non_autoregressive` is NA), numbered
    where two would be equal. Capital letters and digits only, so that it can stand in a style
    sheet.
    """
    taken: list[str] = []
    for name in names:
        words = re.findall("[a-z]+|[A-Z][a-z]*", name)
        sign = "".join(word[0] for word in words)[:3].upper() or "D"
        count = sum(re.fullmatch(rf"{sign}\d*", other) is not None for other in taken)
        taken.append(sign if not count else f"{sign}{count + 1}")
    return taken


def style(legend: Legend, winners: Iterable[tuple[int, ...]]) -> str:
    """The rules that depend on the run: the colours by role and drafter, and how each set of
    winners is marked in a text.
    """
    variables = {role: list(pair) for role, pair in ROLES.items()}
    rules: list[str] = []
    for index in range(len(legend.names)):
        colour = PALETTE[index % len(PALETTE)]
        variables[f"c{index}"] = [strong(colour, scheme) for scheme in SCHEMES]
        variables[f"t{index}"] = [tint(colour, scheme) for scheme in SCHEMES]
        rules.append(f".c{index} {{ --c: var(--c{index}); --t: var(--t{index}) }}")
        rules.append(f".t{index} {{ background: var(--t{index}) }}")
    for level in range(1, NUM_SHADES + 1):
        variables[f"h{level}"] = [shade(level, scheme) for scheme in SCHEMES]
        rules.append(f".h{level} {{ background: var(--h{level}) }}")
    rules += [_winner_rule(legend, members) for members in sorted(set(winners))]
    pairs = variables.items()
    root = [f"--{name}: light-dark(#{light}, #{dark});" for name, (light, dark) in pairs]
    return "\n".join([":root {", *root, "}", *rules])


def winner_class(members: Sequence[int]) -> str:
    return "w" + "-".join(map(str, members))


def _winner_rule(legend: Legend, members: tuple[int, ...]) -> str:
    """One winner: its tint. A tie: the tints in stripes. The letters come from the style sheet, so
    no copied text has them.
    """
    first, *others = members
    background = f"var(--t{first})"
    if others:
        tints = (f"var(--t{m}) {7 * i}px {7 * (i + 1)}px" for i, m in enumerate(members))
        background = f"repeating-linear-gradient(115deg, {', '.join(tints)})"
    name, letters = winner_class(members), legend.letters_of(members)
    rule = f".{name} {{ --c: var(--c{first}); background: {background} }}"
    return f'{rule} .{name}::before {{ content: "{letters}" }}'


def tint(colour: str, scheme: int) -> str:
    """The paper behind a drafter's tokens: half of its colour, or less where text could not be read
    on that.
    """
    paper, ink = ROLES["paper"][scheme], ROLES["ink"][scheme]
    mixed = (mix(paper, colour, share / 20) for share in range(10, 0, -1))
    return next(candidate for candidate in mixed if contrast(candidate, ink) >= TINT_CONTRAST)


def shade(level: int, scheme: int) -> str:
    """The paper behind a cell of a heat map, from 1 to NUM_SHADES."""
    return mix(ROLES["paper"][scheme], ROLES["heat"][scheme], 0.45 * level / NUM_SHADES)


def strong(colour: str, scheme: int) -> str:
    """The colour, moved towards the ink until it stands out from the paper."""
    paper, ink = ROLES["paper"][scheme], ROLES["ink"][scheme]
    shares = (share / 20 for share in range(21))
    mixed = (mix(colour, ink, share) for share in shares)
    return next(candidate for candidate in mixed if contrast(candidate, paper) >= GRAPHIC_CONTRAST)
