"""What a step costs by width and context: verify milliseconds of compiled forwards, a quantised copy's draft, reads a step.

    python experiments/gpu/cost_table.py --shape 8b --out 8b.json

Shapes other than `default` and `tiny` are random weights of published sizes: nothing is downloaded, and time does not depend on
the numbers. One JSON file a model; each entry of `contexts` is a cost table as specens.decoding.costs reads it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specens.config import build, compose
from specens.decoding.budget import FixedBudget
from specens.decoding.calibrate import comb
from specens.decoding.compiled import CannotCompileError, CompileOptions
from specens.decoding.costs import CostTable
from specens.decoding.loop import Decoder
from specens.decoding.sampling import Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.target import Target
from specens.decoding.types import Commit, Plan
from specens.decoding.verify import Coupled
from specens.drafters.lm import LanguageModel
from specens.errors import UserError, one_line
from specens.files import write_whole
from specens.models import TargetCopy
from specens.tiny import random_model

SCHEMA_VERSION = 1
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Nodes and the last committed token."""
CONTEXTS = (1024, 256, 4096)
"""In the order in which they are measured, should the time run out."""
REPEATS = 15
DEPTHS = (1, 4)
"""Of the quantised copy's draft."""

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "1.5b": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
}
"""Sizes of Qwen2.5-1.5B and of Llama-3.1-8B."""


def target_of(shape: str, device: torch.device, dtype: torch.dtype) -> Target:
    """The model to measure, in memory."""
    if shape == "default":
        words = [f"target.dtype={str(dtype).removeprefix('torch.')}", f"target.device={device}", "target.packed=false"]
        spec = build(compose(words)["target"])
        loaded = spec.load()
        return Target(loaded.model, loaded.tokenizer, origin=spec)
    if shape == "tiny":
        tiny: Any = random_model(max_position_embeddings=8192)
        return Target(tiny.to(device, dtype))
    return Target(random_weights(shape, device, dtype))


def random_weights(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    model_type, sizes = SHAPES[shape]
    with device:  # made where it will run
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=dtype)
    model.config.name_or_path = f"random {model_type} {shape}"
    return model.eval()


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end


def prompt_of(target: Target, length: int) -> list[int]:
    return [7919 * (i + 1) % (target.vocab_size - 10) + 5 for i in range(length)]


def verify_table(target: Target, context: int, deadline: Deadline, is_compiled: bool) -> dict[str, Any]:
    """Milliseconds of a forward over each width and of reading its best tokens, behind a context; median and fastest."""
    begin = time.perf_counter()
    reason = compile_for(target, context) if is_compiled else "not asked for"
    compile_s = time.perf_counter() - begin
    prompt, rows = prompt_of(target, context), []
    cache = target.prefill(prompt)
    for width in WIDTHS:
        if deadline.is_over and rows:
            break
        tree, took = comb(prompt, width - 1), []
        for _ in range(REPEATS + 2):
            begin = time.perf_counter()
            target.score(cache, prompt[-1], tree, "tree").argmax(-1).tolist()
            took.append(1e3 * (time.perf_counter() - begin))
            cache.accept(())
            cache.rollback(context - 1)
            if deadline.is_over and len(took) > 3:
                break
        rows.append((width - 1, statistics.median(took[2:]), min(took[2:])))
    table = CostTable(tuple((nodes, ms) for nodes, ms, _ in rows), origin=f"{target.name}, context {context}")
    return {
        **table.content(),
        "fastest_ms": [[nodes, least] for nodes, _, least in rows],
        "compiled": reason is None,
        "reason": reason,
        "compile_s": round(compile_s, 1),
        "capacity": target.compiled.capacity if target.compiled else None,
    }


def compile_for(target: Target, context: int) -> str | None:
    """Compiled forwards over buffers that are just large enough: what they cost depends on the buffers, not on what is in
    them.
    """
    target.compiled = None
    torch._dynamo.reset()  # gives back what was recorded for the context before
    options = CompileOptions.of(target.device)
    options = CompileOptions(options.backend, options.mode, room=64, block=256, warm_ups=options.warm_ups)
    try:
        target.compile(options, max_nodes=WIDTHS[-1] - 1, num_tokens=context)
    except CannotCompileError as failure:
        return one_line(failure)
    return None


def draft_table(target: Target, quantization: str, context: int) -> dict[str, Any]:
    """A quantised copy's draft by depth; whether it was compiled, as the target was."""
    drafter = LanguageModel(TargetCopy(quantization), DEPTHS[-1], name="quantized")
    ids, rows = prompt_of(target, context), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        drafter.bind(target)
        drafter.start(ids)
    for depth in DEPTHS:
        took = []
        for _ in range(REPEATS + 2):
            begin = time.perf_counter()
            draft = drafter.propose(ids, Plan(depth, depth), Sampler())
            took.append(1e3 * (time.perf_counter() - begin))
            ids = [*ids, draft.token_ids[0]]
            drafter.observe(Commit((), (ids[-1],)))
        rows.append([depth, statistics.median(took[2:])])
    words = [one_line(str(warning.message)) for warning in said if "uncompiled" in str(warning.message)]
    return {"quantization": quantization, "context": context, "draft_ms": rows, "uncompiled": words or None}


@contextmanager
def reads_counted(device: torch.device) -> Iterator[list[str]]:
    """Every time the host waits for the device: as CUDA reports it, elsewhere by the calls that would."""
    calls: list[str] = []
    if device.type == "cuda":
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield calls
            finally:
                torch.cuda.set_sync_debug_mode("default")
        calls += [text for text in (str(warning.message) for warning in said) if "synchroniz" in text]
        return
    real = {name: getattr(torch.Tensor, name) for name in ("tolist", "item")}
    for name, function in real.items():
        setattr(torch.Tensor, name, lambda self, name=name, read=function: calls.append(name) or read(self))
    try:
        yield calls
    finally:
        for name, function in real.items():
            setattr(torch.Tensor, name, function)


def reads_a_step(target: Target, num_new: int = 24) -> dict[str, Any]:
    """Greedy steps with the target itself as a drafter: what waits for the device, counted after a first, uncounted text."""
    drafter = LanguageModel(target.model, 3, name="same")
    drafter.bind(target)
    decoder = Decoder(target, drafter, FixedBudget(), Coupled())
    prompt = prompt_of(target, 64)
    counts: list[int] = []
    for is_counted in (False, True):
        cache, _ = decoder.prefill(prompt)
        steps = decoder.decode(prompt, cache, Sampler(), StopRules(len(prompt) + num_new))
        for _ in itertools.count():
            with reads_counted(target.device) as calls:
                step = next(steps, None)
            if step is None:
                break
            if is_counted:
                counts.append(len(calls))
        del cache
    return {"num_steps": len(counts), "reads": counts, "expected": "1 for the verdict, 1 for each model that drafts"}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device, deadline = torch.device(options.device), Deadline(options.seconds)
    target = target_of(options.shape, device, getattr(torch, options.dtype))
    is_compiled = device.type == "cuda" if options.compiled is None else options.compiled == "true"
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "shape": options.shape,
        "model": target.name,
        "num_parameters": target.model.num_parameters(),
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "contexts": {},
        "left_out": [],
    }
    for context in options.contexts:
        if deadline.is_over:
            result["left_out"].append(f"context {context}")
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        entry = verify_table(target, context, deadline, is_compiled)
        if device.type == "cuda":
            entry["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
        result["contexts"][str(context)] = entry
        _write(options.out, result)
    for name, part in (
        ("reads", lambda: reads_a_step(target)),
        ("quantized", lambda: draft_table(target, options.quantization, options.contexts[-1])),
    ):
        if deadline.is_over or (name == "quantized" and options.quantization == "none"):
            result["left_out"].append(name)
            continue
        try:
            result[name] = part()
        except (UserError, RuntimeError) as failure:  # bitsandbytes may lack a kernel: the rest of the table stands
            result[name] = {"error": one_line(str(failure))}
    _write(options.out, result)
    return result


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.parent, {path.name: json.dumps(result, indent=1, allow_nan=False) + "\n"})


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=("default", "tiny", *SHAPES), default="default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="tokens before the tree")
    parser.add_argument("--quantization", default="nf4", help="of the copy that drafts; none: leave it out")
    parser.add_argument("--seconds", type=float, default=120, help="what is not begun by then is left out, and said so")
    parser.add_argument("--compiled", choices=("true", "false"), help="default: on CUDA")
    options = parser.parse_args(words)
    result = measure(options)
    for context, entry in result["contexts"].items():
        print(context, *(f"{nodes + 1}:{ms:.2f}" for nodes, ms in entry["verify_ms"]), f"compiled={entry['compiled']}")
    print("left out:", ", ".join(result["left_out"]) or "nothing")
    return result


if __name__ == "__main__":
    main()
