"""The colours of drafters, the same on pages, in figures and in the terminal; and arithmetic on
colours.
"""

from __future__ import annotations

PALETTE = ("0072b2", "e69f00", "009e73", "d55e00", "56b4e9", "cc79a7", "f0e442", "8c564b")
"""Colours of the drafters, in member order: Okabe and Ito's set, which colour-blind readers can
tell apart, and a brown. A ninth drafter gets the first again; the letters tell the two apart.
"""


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
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
