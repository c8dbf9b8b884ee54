"""transformers' Trainer, set up alike for every drafter: checkpoints, resuming after a kill, evaluation, mixed precision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from specens.errors import UserError, check_count
from specens.training.card import command_line
from specens.training.rows import Rows, stack


class Learner(Protocol):
    """What is trained: `forward(rows)` -> {"loss": scalar}, `measure(rows)` -> sums by name (each with its own count)."""

    def __call__(self, rows: Any) -> dict[str, torch.Tensor]: ...

    def measure(self, rows: Any) -> dict[str, float]: ...


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. `num_steps` counts optimizer steps of `rows_per_step` rows; `bfloat16` is mixed precision."""

    num_steps: int = 1000
    rows_per_step: int = 8
    learning_rate: float = 5e-4
    warmup_steps: int = 50
    weight_decay: float = 0.01
    max_gradient: float = 1.0
    evaluate_every: int = 200
    save_every: int = 200
    bfloat16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "rows_per_step", "evaluate_every", "save_every"):
            check_count(f"stage.schedule.{name}", getattr(self, name))
        if not self.learning_rate > 0:
            raise UserError(f"stage.schedule.learning_rate={self.learning_rate}: give a number above 0")


class RowTrainer(Trainer):
    """A Trainer whose evaluation is the learner's own measure over the held-out rows."""

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        learner: Any = self.model
        learner.eval()
        sums: dict[str, float] = {}
        rows: Any = self.eval_dataset
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
            for index in range(len(rows)):
                batch = self._prepare_inputs(stack([rows[index]]))
                for name, value in learner.measure(**batch).items():
                    sums[name] = sums.get(name, 0.0) + value
        learner.train()
        count = max(sums.pop("count", 1.0), 1.0)
        metrics = {f"{metric_key_prefix}_{name}": value / count for name, value in sums.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def train(
    learner: nn.Module, rows: Rows, held_out: Rows, folder: Path, schedule: Schedule, *, report_to: str = "none"
) -> list[dict[str, float]]:
    """Train in `folder`, going on from its last checkpoint if there is one. Returns the Trainer's log (the curves), which is
    also written to `curves.jsonl`.
    """
    on_cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=schedule.num_steps,
        per_device_train_batch_size=schedule.rows_per_step,
        learning_rate=schedule.learning_rate,
        warmup_steps=schedule.warmup_steps,
        lr_scheduler_type="cosine",
        weight_decay=schedule.weight_decay,
        max_grad_norm=schedule.max_gradient,
        bf16=schedule.bfloat16,
        use_cpu=on_cpu,
        eval_strategy="steps",
        eval_steps=schedule.evaluate_every,
        logging_steps=min(schedule.evaluate_every, 20),
        save_steps=schedule.save_every,
        save_total_limit=2,
        seed=schedule.seed,
        data_seed=schedule.seed,
        report_to=report_to,
        disable_tqdm=False,
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
    )
    trainer = RowTrainer(model=learner, args=arguments, train_dataset=rows, eval_dataset=held_out, data_collator=stack)
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    curves: list[dict[str, float]] = trainer.state.log_history
    (folder / "curves.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in curves))
    return curves


def describe_training(
    target: Any, texts: Any, rows: Rows, options: dict[str, Any], curves: list[dict[str, float]], coverage: float
) -> dict[str, Any]:
    """How weights were made, for their file and their model card."""
    return {
        "target": Path(target.name).name,
        "command": command_line(),
        "corpus_tokens": rows.num_tokens(),
        "corpus": texts.manifest.get("options", {}),
        "options": {name: value for name, value in options.items() if name not in ("corpus", "folder", "report_to")},
        "vocabulary_coverage": coverage,
        "held_out": dict(last_metrics(curves)),
    }


def last_metrics(curves: list[dict[str, float]]) -> Mapping[str, float]:
    """The last evaluation."""
    return next((entry for entry in reversed(curves) if any(key.startswith("eval_") for key in entry)), {})
