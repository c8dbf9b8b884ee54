"""What is examined: the texts of a run folder, and the configuration that they were written with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specens.errors import UserError, one_line
from specens.loading import load
from specens.text import first_difference


@dataclass(frozen=True)
class Text:
    """One emitted text. `prompt_id` and `seed` key the noise that it was drawn with; `baseline_ids` is what plain decoding said
    in the same run (None: not on file, or another text of the same law).
    """

    prompt_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str | None
    seed: int
    baseline_ids: tuple[int, ...] | None = None

    @property
    def baseline_fork(self) -> int | None:
        """Index of the first token in which output and baseline differ (the shorter one's end counts), None if in none."""
        return None if self.baseline_ids is None else first_difference(self.output_ids, self.baseline_ids)


@dataclass(frozen=True)
class Written:
    """All that a run has on file: its finished texts in order, and how many of its prompts failed."""

    texts: tuple[Text, ...]
    num_failed: int

    @property
    def num_baselines(self) -> int:
        return sum(text.baseline_ids is not None for text in self.texts)

    @property
    def num_baseline_identical(self) -> int:
        return sum(text.baseline_ids is not None and text.baseline_fork is None for text in self.texts)


def read_texts(folder: Path, seed: int) -> Written:
    """The texts of a run folder. UserError in one line when it cannot be read, or holds no finished prompt."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what `load` would leave out is not a run that was examined
            prompts = load(folder).prompts
    except UserWarning as error:
        raise UserError(f"run={folder}: {one_line(error)}") from error
    rows = prompts.to_dict("records")
    done = [
        row for row in rows if row["error"] is None or (isinstance(row["error"], float) and math.isnan(row["error"]))
    ]
    if not done:
        raise UserError(f"run={folder}: holds no finished prompt; give the folder of a run that has some")
    return Written(tuple(_text(row, seed) for row in done), len(rows) - len(done))


def _text(row: dict, seed: int) -> Text:
    # Empty where the verifier writes another text of the same law: the baseline's is then no standard.
    is_compared = row["is_identical"] in (True, False)
    baseline = tuple(map(int, row["baseline_ids"])) if is_compared and row["baseline_ids"] is not None else None
    prompt, output = tuple(map(int, row["prompt_ids"])), tuple(map(int, row["output_ids"]))
    return Text(row["prompt_id"], prompt, output, row["finish_reason"], seed, baseline)


def chosen(texts: Sequence[Text], count: int) -> tuple[Text, ...]:
    """`count` texts, spread evenly, and every other one that differs from its baseline: a difference has to be explained."""
    count = min(count, len(texts))
    spread = {index * len(texts) // count for index in range(count)}
    return tuple(text for index, text in enumerate(texts) if index in spread or text.baseline_fork is not None)
