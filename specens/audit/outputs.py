"""What is examined: the outputs in a run folder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from specens.errors import UserError, one_line
from specens.models.detokenize import divergence
from specens.records.reader import load


@dataclass(frozen=True)
class Output:
    """One text. `prompt_id` and `seed` key the noise that it was sampled with; `baseline_ids` is
    the AR baseline's output in the same run (None: not recorded, or another sample of the same
    distribution).
    """

    prompt_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str | None
    seed: int
    baseline_ids: tuple[int, ...] | None = None

    @property
    def baseline_divergence(self) -> int | None:
        """Where output and baseline diverge, None if they do not."""
        return None if self.baseline_ids is None else divergence(self.output_ids, self.baseline_ids)


@dataclass(frozen=True)
class RunOutputs:
    """All outputs of a run's finished prompts, in order, and how many of its prompts failed."""

    outputs: tuple[Output, ...]
    num_failed: int

    @property
    def num_baselines(self) -> int:
        return sum(output.baseline_ids is not None for output in self.outputs)

    @property
    def num_baseline_identical(self) -> int:
        diverging = sum(output.baseline_divergence is not None for output in self.outputs)
        return self.num_baselines - diverging


def read_outputs(folder: Path, seed: int) -> RunOutputs:
    """The outputs in a run folder. UserError in one line when it cannot be read, or holds no
    finished prompt.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a run that `load` reads in part is not examined
            rows = load(folder).prompts.to_dict("records")
    except UserWarning as error:
        raise UserError(f"run={folder}: {one_line(error)}") from error
    outputs = tuple(_output(row, seed) for row in rows if pd.isna(row["error"]))
    if not outputs:
        raise UserError(
            f"run={folder}: holds no finished prompt; give the folder of a run with some"
        )
    return RunOutputs(outputs, len(rows) - len(outputs))


def _output(row: dict[Any, Any], seed: int) -> Output:
    prompt, output = (tuple(map(int, row[name])) for name in ("prompt_ids", "output_ids"))
    baseline = None
    # is_identical is missing where the verifier samples otherwise than the baseline
    if not pd.isna(row["is_identical"]) and row["baseline_ids"] is not None:
        baseline = tuple(map(int, row["baseline_ids"]))
    return Output(row["prompt_id"], prompt, output, row["finish_reason"], seed, baseline)


def chosen(outputs: Sequence[Output], count: int) -> tuple[Output, ...]:
    """`count` outputs, spread evenly, and every other one that diverges from its baseline: a
    divergence has to be explained.
    """
    count = min(count, len(outputs))
    places = {index * len(outputs) // count for index in range(count)}
    places |= {i for i, one in enumerate(outputs) if one.baseline_divergence is not None}
    return tuple(outputs[index] for index in sorted(places))
