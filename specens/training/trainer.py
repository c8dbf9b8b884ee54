"""transformers' Trainer, set up alike for every drafter: checkpoints, resuming after a kill, evaluation, mixed precision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainingArguments

from specens.errors import UserError, check_count, check_number, one_line
from specens.trained import model_fingerprint
from specens.training.card import command_line
from specens.training.loss import Loss
from specens.training.rows import Rows, stack

DTYPES = ("float32", "bfloat16", "float16")
REPORTS = ("none", "wandb")
STATE = "trainer_state.json"
MODEL = "model.safetensors"
BEGUN = "begun.json"
"""In a folder of checkpoints: the options they were made with."""

MAY_CHANGE = (
    "corpus",
    "folder",
    "report_to",
    "dtype",
    *(f"schedule.{name}" for name in ("evaluate_every", "save_every", "num_loaders")),
)
"""Options that a resumed training may have other values of: they do not change what is learned."""


class Learner(Protocol):
    """What is trained: `forward(rows)` -> {"loss": scalar}, `measure(rows)` -> sums by name (each with its own count)."""

    def __call__(self, rows: Any) -> dict[str, torch.Tensor]: ...

    def measure(self, rows: Any) -> dict[str, float]: ...


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. `num_steps` counts optimizer steps of `rows_per_step` rows; `bfloat16` is mixed precision,
    `num_loaders` the processes that read rows ahead.
    """

    num_steps: int = 1000
    rows_per_step: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    max_gradient: float = 1.0
    evaluate_every: int = 200
    save_every: int = 200
    bfloat16: bool = False
    num_loaders: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "rows_per_step", "evaluate_every", "save_every"):
            check_count(f"stage.schedule.{name}", getattr(self, name))
        for name in ("warmup_steps", "num_loaders", "seed"):
            check_count(f"stage.schedule.{name}", getattr(self, name), 0)
        for name in ("learning_rate", "max_gradient"):
            check_number(f"stage.schedule.{name}", getattr(self, name), above=True)
        check_number("stage.schedule.weight_decay", self.weight_decay)
        if not isinstance(self.bfloat16, bool):
            raise UserError(f"stage.schedule.bfloat16={self.bfloat16!r}: give true or false")


@dataclass(frozen=True)
class TrainingStage:
    """Options of every training stage: `corpus` to learn from, `folder` to write to, `num_output_ids` the size of the trimmed
    output vocabulary, `num_held_out` the corpus's last shards, which only measure.
    """

    corpus: str
    folder: str
    num_output_ids: int = 8192
    row_tokens: int = 1024
    num_held_out: int = 1
    loss: Loss = field(default_factory=Loss)
    schedule: Schedule = field(default_factory=Schedule)
    dtype: str = "bfloat16"
    report_to: str = "none"

    def __post_init__(self) -> None:
        for name in ("corpus", "folder"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"stage.{name}={getattr(self, name)!r}: give a folder")
        for name in ("num_output_ids", "row_tokens", "num_held_out"):
            check_count(f"stage.{name}", getattr(self, name))
        for name, known in (("dtype", DTYPES), ("report_to", REPORTS)):
            if getattr(self, name) not in known:
                raise UserError(f"stage.{name}={getattr(self, name)!r}: choose one of {', '.join(known)}")
        for name, kind in (("loss", Loss), ("schedule", Schedule)):
            if not isinstance(getattr(self, name), kind):
                raise UserError(f"stage.{name}={getattr(self, name)!r}: give options of it, such as in conf/stage")


def is_layers(value: Any) -> bool:
    """A list of whole numbers."""
    return isinstance(value, list) and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in value)


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
    learner: nn.Module, rows: Rows, held_out: Rows, folder: Path, stage: Any, target: Any
) -> list[dict[str, float]]:
    """Train in `folder` as `stage` says, going on from its last checkpoint if there is one. Returns the Trainer's log (the
    curves), which is also written to `curves.jsonl`.
    """
    check_begun(folder, stage, target, rows.num_tokens() + held_out.num_tokens())
    arguments = training_arguments(folder, stage.schedule, stage.report_to, target.device)
    last = last_checkpoint(folder)
    state = {} if last is None else json.loads((Path(last) / STATE).read_text())
    if last is not None and state["global_step"] >= stage.schedule.num_steps:  # the Trainer would add a step
        print(f"{folder}: trained already, {stage.schedule.num_steps} steps", flush=True)
        learner.load_state_dict(load_file(Path(last) / MODEL))
        curves: list[dict[str, float]] = state["log_history"]
    else:
        trainer = RowTrainer(
            model=learner, args=arguments, train_dataset=rows, eval_dataset=held_out, data_collator=stack
        )
        trainer.train(resume_from_checkpoint=last)
        curves = trainer.state.log_history
    (folder / "curves.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in curves))
    return curves


def training_arguments(folder: Path, schedule: Schedule, report_to: str, device: torch.device) -> TrainingArguments:
    """The Trainer's options, on the device of the target, whose embeddings and output projection the learner reads."""
    if device.index:
        raise UserError(
            f"target.device={device}: training runs on the first device; choose it with CUDA_VISIBLE_DEVICES"
        )
    on_cpu = device.type == "cpu"
    try:
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
            dataloader_num_workers=schedule.num_loaders,
        )
    except (ValueError, ImportError) as error:  # no bfloat16 on this device, no wandb
        raise UserError(f"stage.schedule: {one_line(error)}") from error
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several would be given parts of a batch, which is a list here
    return arguments


def check_begun(folder: Path, stage: Any, target: Any, corpus_tokens: int) -> None:
    """Checkpoints are gone on from only with the options and the corpus they were made with; UserError names what differs."""
    given = asdict(stage)
    for part in ("loss", "schedule"):
        given |= {f"{part}.{name}": value for name, value in given.pop(part).items()}
    options = {name: value for name, value in given.items() if name not in MAY_CHANGE}
    options |= {"target": model_fingerprint(target.model), "corpus_tokens": corpus_tokens}
    path = folder / BEGUN
    begun = json.loads(path.read_text()) if path.is_file() and last_checkpoint(folder) is not None else options
    for name, value in options.items():
        if begun.get(name, value) != value:
            label = name if name in ("target", "corpus_tokens") else f"stage.{name}"
            raise UserError(
                f"{folder}: its checkpoints were made with {label}={begun.get(name)}, not {value}; give another folder, or "
                "delete this one to begin again"
            )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(options, indent=1))


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole one: a killed run may have left one without its STATE, which is written last."""
    steps = {}
    for path in folder.glob(f"checkpoint-*/{STATE}"):
        try:
            with safe_open(path.with_name(MODEL), framework="pt"):  # its header, which tells if it is whole
                steps[json.loads(path.read_text())["global_step"]] = str(path.parent)
        except (ValueError, KeyError, OSError, SafetensorError):
            continue
    return steps[max(steps)] if steps else None


def stored(tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """As they go to a file: on the CPU, numbers in `dtype`."""
    return {
        name: tensor.detach().cpu().to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor.detach().cpu()
        for name, tensor in tensors.items()
    }


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
