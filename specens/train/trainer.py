"""transformers' Trainer, set up alike for every drafter, with checkpoints to resume from."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from specens.cli import show
from specens.compat import use_one_gpu
from specens.decoding.generation import eos_ids
from specens.decoding.target.target import Target
from specens.drafters.trained.weights import Trained, model_fingerprint
from specens.errors import UserError, check_choice, check_count, check_flag, check_number, one_line
from specens.models.load import tokenizer_fingerprint
from specens.records.files import write_whole
from specens.train.loss import Learner, Loss, Teacher
from specens.train.model_card import command_line, save_with_card
from specens.train.packing import PackedRows, kept_ids, split, stack
from specens.train.shards import TextShards, check_folder

DTYPES = ("float32", "bfloat16", "float16")
REPORTS = ("none", "wandb")
STATE = "trainer_state.json"
MODEL = "model.safetensors"
BEGUN = "begun.json"
"""In a folder of checkpoints: the options they were made with."""

PLACES = ("corpus", "folder", "report_to")
RHYTHM = ("schedule.evaluate_every", "schedule.save_every", "schedule.num_loaders")
MAY_CHANGE = (*PLACES, *RHYTHM, "dtype")
"""Options that may differ when a training is resumed: they do not change what is learned."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. `num_steps` counts optimizer steps of `rows_per_step` rows; `bfloat16`
    is mixed precision, `num_loaders` the processes that read rows ahead.
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
        check_flag("stage.schedule.bfloat16", self.bfloat16)


@dataclass(frozen=True)
class TrainingStage(ABC):
    """Options of every training stage: `corpus` to learn from, `folder` to write to,
    `num_output_ids` the size of the trimmed output vocabulary, `num_held_out` of the corpus's last
    shards are only measured on.
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
            check_folder(f"stage.{name}", getattr(self, name))
        for name in ("num_output_ids", "row_tokens", "num_held_out"):
            check_count(f"stage.{name}", getattr(self, name))
        check_choice("stage.dtype", self.dtype, DTYPES)
        check_choice("stage.report_to", self.report_to, REPORTS)
        for name, kind in (("loss", Loss), ("schedule", Schedule)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise UserError(f"stage.{name}={value!r}: give its options, such as in conf/stage")

    def check_target(self, target: Target) -> None:  # noqa: B027, a stage may have nothing to check
        """Refuse what can be known to be wrong before there is a corpus."""

    @abstractmethod
    def learner(self, teacher: Teacher, texts: TextShards) -> Learner:
        """What is trained, at its beginning."""

    def run(self, target: Target) -> Path:
        """Train, and write the weights and their card. Returns the weights' path."""
        self.check_target(target)
        fingerprint = model_fingerprint(target.model)
        texts = TextShards.open(self.corpus, tokenizer_fingerprint(target.tokenizer), fingerprint)
        ends = eos_ids(target.model.generation_config)
        kept, coverage = kept_ids(texts, self.num_output_ids, target.vocab_size, ends)
        learner = self.learner(Teacher(target, kept), texts)
        rows, held_out = split(texts, self.row_tokens, learner.hidden_layers, self.num_held_out)
        folder, options = Path(self.folder).expanduser(), asdict(self)
        checkpoints = folder / f"checkpoints{learner.suffix}"
        num_tokens = rows.num_tokens() + held_out.num_tokens()
        check_begun(checkpoints, options, target=fingerprint, corpus_tokens=num_tokens)
        arguments = training_arguments(checkpoints, self.schedule, self.report_to, target.device)
        curves = train(learner, rows, held_out, arguments)
        evaluations = [entry for entry in curves if any(key.startswith("eval_") for key in entry)]
        training = {
            "target": Path(target.name).name,
            "command": command_line(),
            "corpus_tokens": rows.num_tokens(),
            "corpus": texts.options,
            "options": {name: options[name] for name in options if name not in PLACES},
            "vocabulary_coverage": coverage,
            "held_out": evaluations[-1] if evaluations else {},
        }
        tensors = stored(learner.tensors(), self.dtype) | {"kept_ids": kept.int()}
        path = folder / f"{learner.kind}{learner.suffix}.safetensors"
        save_with_card(Trained(learner.kind, fingerprint, learner.sizes, training, tensors), path)
        show(f"{path}: {coverage:.1%} of the corpus's tokens are in the trimmed vocabulary")
        return path


class RowTrainer(Trainer):
    """A Trainer whose evaluation is the learner's own measure over the held-out rows."""

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        learner: Any = self.model
        rows: Any = self.eval_dataset
        learner.eval()
        sums: dict[str, float] = {}
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
            for index in range(len(rows)):
                batch = self._prepare_inputs(stack([rows[index]]))
                for name, value in learner.measure(**batch).items():
                    sums[name] = sums.get(name, 0.0) + value
        learner.train()
        count = max(sums.pop("count", 1.0), 1.0)
        metrics = {f"{metric_key_prefix}_{name}": value / count for name, value in sums.items()}
        self.log(metrics)
        notify = self.callback_handler.on_evaluate
        self.control = notify(self.args, self.state, self.control, metrics)
        return metrics


def train(
    learner: Learner, rows: PackedRows, held_out: PackedRows, arguments: TrainingArguments
) -> list[dict[str, float]]:
    """Train, from the last checkpoint if there is one. Returns the Trainer's log (the curves),
    which is also written to `curves.jsonl`.
    """
    folder, num_steps = Path(str(arguments.output_dir)), arguments.max_steps
    last = last_checkpoint(folder)
    state = {} if last is None else json.loads((last / STATE).read_text())
    if last is not None and state["global_step"] >= num_steps:  # the Trainer would add a step
        show(f"{folder}: trained already, {num_steps} steps")
        learner.load_state_dict(load_file(last / MODEL))
        curves = state["log_history"]
    else:
        trainer = RowTrainer(learner, arguments, stack, train_dataset=rows, eval_dataset=held_out)
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        curves = trainer.state.log_history
    write_whole(folder, {"curves.jsonl": "".join(json.dumps(entry) + "\n" for entry in curves)})
    return curves


def training_arguments(
    folder: Path, schedule: Schedule, report_to: str, device: torch.device
) -> TrainingArguments:
    """The Trainer's options, on the device of the target, whose embeddings and output projection
    the learner reads.
    """
    if device.index:
        problem = "training runs on the first device; choose it with CUDA_VISIBLE_DEVICES"
        raise UserError(f"target.device={device}: {problem}")
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
    use_one_gpu(arguments)  # a batch is a list here, which several could not share
    return arguments


def check_begun(folder: Path, options: dict[str, Any], **facts: Any) -> None:
    """A training is resumed only with the options, target and corpus (`facts`) that its checkpoints
    were made with; UserError names what differs.
    """
    given = dict(options)
    for part in ("loss", "schedule"):
        given |= {f"{part}.{name}": value for name, value in given.pop(part).items()}
    given = {name: value for name, value in given.items() if name not in MAY_CHANGE} | facts
    path = folder / BEGUN
    is_begun = path.is_file() and last_checkpoint(folder) is not None
    begun = json.loads(path.read_text()) if is_begun else {}
    for name, value in given.items():
        if begun.get(name, value) != value:
            label = name if name in facts else f"stage.{name}"
            problem = f"its checkpoints were made with {label}={begun[name]}, not {value}"
            remedy = "give another folder, or delete this one to begin again"
            raise UserError(f"{folder}: {problem}; {remedy}")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder, {BEGUN: json.dumps(given, indent=1)})


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole one: a killed run may have left one without its STATE, which comes last."""
    steps = {}
    for path in folder.glob(f"checkpoint-*/{STATE}"):
        try:
            with safe_open(path.with_name(MODEL), framework="pt"):  # reads the header: is it whole?
                steps[json.loads(path.read_text())["global_step"]] = path.parent
        except (ValueError, KeyError, OSError, SafetensorError):
            continue
    return steps[max(steps)] if steps else None


def stored(tensors: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """As they go to a file: on the CPU, floating-point numbers in `dtype`."""
    kind = getattr(torch, dtype)
    cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    return {name: x.to(kind) if x.is_floating_point() else x for name, x in cpu.items()}
