"""What a step costs by width and context: verify milliseconds of compiled forwards, a quantised
copy's draft, reads per step.

    python experiments/gpu/cost_table.py --shape 8b --out 8b.json

Shapes other than `default` and `tiny` are random weights of published sizes: nothing is downloaded,
and time does not depend on the numbers. One JSON file per model; each entry of `contexts` is a cost
table as specens.decoding.budgets.costs reads it.
"""

from __future__ import annotations

import argparse
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

from specens.config.build import build
from specens.config.compose import compose
from specens.decoding.budgets.costs import CostTable
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.calibrate import comb
from specens.decoding.drafter import close
from specens.decoding.loop import Decoder
from specens.decoding.sampling import Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.target.compiled import CannotCompileError, CompileOptions
from specens.decoding.target.target import Target
from specens.decoding.types import Commit, Plan, Share
from specens.decoding.verify import Coupled
from specens.drafters.lm import LanguageModel
from specens.errors import UserError, one_line
from specens.models.load import TargetCopy
from specens.models.tiny import random_model
from specens.records.files import write_whole

SCHEMA_VERSION = 1
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Nodes and the last committed token."""
CONTEXTS = (1024, 256, 4096)
"""In the order in which they are measured, should the time run out."""
REPEATS = 15
DEPTHS = (1, 4)
"""Of the quantised copy's draft."""

QWEN = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960}
QWEN |= {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
QWEN |= {"max_position_embeddings": 32768, "tie_word_embeddings": True}
LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072, "tie_word_embeddings": False}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {"1.5b": ("qwen2", QWEN), "8b": ("llama", LLAMA)}
"""Sizes of Qwen2.5-1.5B and of Llama-3.1-8B."""


def target_of(shape: str, device: torch.device, dtype: torch.dtype) -> Target:
    """The model to measure, in memory."""
    if shape == "default":
        overrides = [f"target.dtype={str(dtype).removeprefix('torch.')}"]
        overrides += [f"target.device={device}", "target.packed=false"]
        spec = build(compose(overrides)["target"])
        loaded = spec.load()
        return Target(loaded.model, loaded.tokenizer, origin=spec)
    if shape == "tiny":
        tiny: Any = random_model(max_position_embeddings=8192)
        return Target(tiny.to(device, dtype))
    return Target(random_weights(shape, device, dtype))


def random_weights(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    model_type, sizes = SHAPES[shape]
    with device:  # made where it will run
        config = AutoConfig.for_model(model_type, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
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


def verify_table(
    target: Target, context: int, deadline: Deadline, is_compiled: bool
) -> dict[str, Any]:
    """Milliseconds of a forward over each width and of reading its best tokens, behind a context;
    median and fastest.
    """
    begin = time.perf_counter()
    reason = compile_for(target, context) if is_compiled else "not wanted"
    compile_s = time.perf_counter() - begin
    prompt, rows = prompt_of(target, context), []
    with target.prefill(prompt) as cache:
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
    points, origin = (
        tuple((nodes, ms) for nodes, ms, _ in rows),
        f"{target.name}, context {context}",
    )
    return {
        **CostTable(points, origin=origin).content(),
        "fastest_ms": [[nodes, least] for nodes, _, least in rows],
        "compiled": reason is None,
        "reason": reason,
        "compile_s": round(compile_s, 1),
        "capacity": target.compiled.capacity if target.compiled else None,
    }


def compile_for(target: Target, context: int) -> str | None:
    """Compiled forwards over buffers that are just large enough: what they cost depends on the
    buffers, not on what is in them. Returns why it failed, None if it did not.
    """
    target.compiled = None
    torch._dynamo.reset()  # gives back what was recorded for the context before
    options = CompileOptions.of(target.device)
    sizes = {"room": 64, "block": 256, "warm_ups": options.warm_ups}
    options = CompileOptions(options.backend, options.mode, **sizes)
    try:
        target.compile(options, max_nodes=WIDTHS[-1] - 1, num_tokens=context)
    except CannotCompileError as failure:
        return one_line(failure)
    return None


def draft_table(target: Target, quantization: str, context: int) -> dict[str, Any]:
    """A quantised copy's draft by depth; whether it was compiled, as the target was."""
    drafter = LanguageModel(TargetCopy(quantization), DEPTHS[-1], name="quantized")
    ids, rows = prompt_of(target, context), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drafter.bind(target)
        proposer = drafter.begin(ids)
    for depth in DEPTHS:
        plan, took = Plan.of((Share(depth, depth),)), []
        for _ in range(REPEATS + 2):
            begin = time.perf_counter()
            draft = proposer.propose(ids, plan, Sampler())
            took.append(1e3 * (time.perf_counter() - begin))
            ids = [*ids, draft.token_ids[0]]
            proposer.observe(Commit((), (ids[-1],)))
        rows.append([depth, statistics.median(took[2:])])
    close(proposer)
    texts = [one_line(str(warning.message)) for warning in caught]
    reasons = [text for text in texts if "uncompiled" in text]
    return {
        "quantization": quantization,
        "context": context,
        "draft_ms": rows,
        "uncompiled": reasons or None,
    }


@contextmanager
def reads_counted(device: torch.device) -> Iterator[list[str]]:
    """Every time the CPU waits for the device: as CUDA reports it, elsewhere by the calls that
    would.
    """
    calls: list[str] = []
    if device.type == "cuda":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield calls
            finally:
                torch.cuda.set_sync_debug_mode("default")
        texts = (str(warning.message) for warning in caught)
        calls += [text for text in texts if "synchroniz" in text]
        return

    def counting(name: str, read: Any) -> Any:
        return lambda self: calls.append(name) or read(self)

    real = {name: getattr(torch.Tensor, name) for name in ("tolist", "item")}
    for name, function in real.items():
        setattr(torch.Tensor, name, counting(name, function))
    try:
        yield calls
    finally:
        for name, function in real.items():
            setattr(torch.Tensor, name, function)


def reads_a_step(target: Target, num_new: int = 24) -> dict[str, Any]:
    """Greedy steps with the target itself as a drafter: what waits for the device, counted after a
    first, uncounted text.
    """
    drafter = LanguageModel(target.model, 3, name="same")
    drafter.bind(target)
    decoder = Decoder(target, drafter, FixedBudget(), Coupled())
    prompt = prompt_of(target, 64)
    counts: list[int] = []
    for is_counted in (False, True):
        stop = StopRules(len(prompt) + num_new)
        policy = decoder.budget.begin(drafter.members, CostTable())
        steps = decoder.decode(decoder.prefill(prompt), Sampler(), stop, policy)
        while True:
            with reads_counted(target.device) as calls:
                step = next(steps, None)
            if step is None:
                break
            if is_counted:
                counts.append(len(calls))
    expected = "1 for the verdict, 1 for each model that drafts"
    return {"num_steps": len(counts), "reads": counts, "expected": expected}


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
        except (UserError, RuntimeError) as failure:
            # bitsandbytes may lack a kernel: the rest of the table stands.
            result[name] = {"error": one_line(str(failure))}
    _write(options.out, result)
    return result


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.parent, {path.name: json.dumps(result, indent=1, allow_nan=False) + "\n"})


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add, device = parser.add_argument, "cuda" if torch.cuda.is_available() else "cpu"
    add("--shape", choices=("default", "tiny", *SHAPES), default="default")
    add("--out", type=Path, required=True)
    add("--device", default=device)
    add("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    contexts = list(CONTEXTS)
    add("--contexts", type=int, nargs="+", default=contexts, help="tokens before the tree")
    add("--quantization", default="nf4", help="of the copy that drafts; none: leave it out")
    seconds = "what is not begun by then is left out, and listed"
    add("--seconds", type=float, default=120, help=seconds)
    add("--compiled", choices=("true", "false"), help="default: on CUDA")
    result = measure(parser.parse_args(given))
    for context, entry in result["contexts"].items():
        times = (f"{nodes + 1}:{ms:.2f}" for nodes, ms in entry["verify_ms"])
        print(context, *times, f"compiled={entry['compiled']}")
    print("left out:", ", ".join(result["left_out"]) or "nothing")
    return result


if __name__ == "__main__":
    main()
