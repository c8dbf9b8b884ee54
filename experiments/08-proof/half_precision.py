"""How often do drafted and AR greedy outputs diverge in half precision, and does one width for all
forwards (exact_width) help?

    python experiments/08-proof/half_precision.py bfloat16 prompts.path=question.jsonl

13 Spec-Bench questions, 96 tokens. The drafts are the non-autoregressive drafter's (16 nodes, a
bushy tree), then the distilled one's (4 nodes, a chain). Prints for each: identical outputs, tokens
per divergence (an output ends where it diverges), seconds of both.
"""

from __future__ import annotations

import sys
import time

from specens.config.build import build, named
from specens.config.compose import compose
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.loop import Decoder
from specens.decoding.speculator import Speculator
from specens.decoding.target.target import Target
from specens.decoding.verify import Coupled
from specens.drafters.none import NoDrafter
from specens.models.detokenize import divergence
from specens.prompts.chat import next_prompt

# Packed float16 weights would be computed with in float32.
OVERRIDES = (
    *("target.packed=false", "sampling.max_new_tokens=96"),
    *("prompts=spec_bench", "prompts.per_category=1"),
)


def main() -> None:
    dtype = sys.argv[1]
    config = compose([f"target.dtype={dtype}", *OVERRIDES, *sys.argv[2:]])
    loaded = build(config.target).load()
    questions = build(config.prompts).questions()
    prompts = [next_prompt(question, [], loaded.tokenizer, None) for question in questions]
    for name, width in (("non_autoregressive", 16), ("distilled", 4)):
        for exact in (None, width):
            origin = build(config.target)
            target = Target(loaded.model, loaded.tokenizer, origin=origin, exact_width=exact)
            options = build(config.sampling).generation_config(target)
            speculators = [
                Speculator(Decoder(target, drafter, FixedBudget(width), Coupled()))
                for drafter in (NoDrafter(), named("drafter", name))
            ]
            num_divergences, num_tokens, seconds = 0, 0, [0.0, 0.0]
            for prompt in prompts:
                outputs = []
                for index, speculator in enumerate(speculators):
                    begin = time.perf_counter()
                    done = speculator.complete(prompt.token_ids, options, seed=0, prompt_key="")
                    seconds[index] += time.perf_counter() - begin
                    outputs.append(done.output_ids)
                at = divergence(*outputs)
                num_divergences += at is not None
                num_tokens += len(outputs[0]) if at is None else at + 1
            rate = num_tokens / num_divergences if num_divergences else float("inf")
            print(
                f"{dtype} {name} exact_width={exact}: "
                f"identical {len(prompts) - num_divergences}/{len(prompts)}, "
                f"{rate:.0f} tokens per divergence, "
                f"AR {seconds[0]:.0f} s, drafted {seconds[1]:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
