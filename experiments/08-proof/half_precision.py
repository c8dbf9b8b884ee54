"""How often do drafted and plain greedy text fork in half precision, and does one width for all forwards (exact_width) help?

    python experiments/08-proof/half_precision.py bfloat16 prompts.path=question.jsonl

13 Spec-Bench questions, 96 tokens; drafts by the non-autoregressive prophet (16 nodes, a bushy tree), then by the distilled one
(4 nodes, a chain). Prints for each: texts that are identical, tokens per fork (a text ends at its fork), seconds of both.
"""

from __future__ import annotations

import sys
import time

from specens.config import build, compose
from specens.decoding.budget import FixedBudget
from specens.decoding.loop import Decoder
from specens.decoding.target import Target
from specens.decoding.verify import Coupled
from specens.drafters.none import NoDrafter
from specens.rendering import next_prompt
from specens.speculator import Speculator
from specens.text import first_difference

NUM_TOKENS = 96


def main() -> None:
    words = ["prompts=spec_bench", "prompts.per_category=1", f"sampling.max_new_tokens={NUM_TOKENS}"]
    # Packed float16 weights would be computed with in float32.
    config = compose([f"target.dtype={sys.argv[1]}", "target.packed=false", *words, *sys.argv[2:]])
    loaded = build(config.target).load()
    prompts = [next_prompt(question, [], loaded.tokenizer, None) for question in build(config.prompts).questions()]
    for name, width in (("non_autoregressive", 16), ("distilled", 4)):
        for exact in (None, width):
            target = Target(loaded.model, loaded.tokenizer, origin=build(config.target), exact_width=exact)
            options = build(config.sampling).generation_config(target)
            drafter = build(compose([f"drafter={name}"]).drafter)
            spec = Speculator(Decoder(target, drafter, FixedBudget(width), Coupled()))
            plain = Speculator(Decoder(target, NoDrafter(), FixedBudget(width), Coupled()))
            forks, num_tokens, seconds = 0, 0, [0.0, 0.0]
            for prompt in prompts:
                texts = []
                for index, speculator in enumerate((plain, spec)):
                    begin = time.perf_counter()
                    texts.append(speculator.complete(prompt.token_ids, options, seed=0, prompt_key="").output_ids)
                    seconds[index] += time.perf_counter() - begin
                fork = first_difference(*texts)
                forks += fork is not None
                num_tokens += len(texts[0]) if fork is None else fork + 1
            print(
                f"{sys.argv[1]} {name} exact_width={exact}: identical {len(prompts) - forks}/{len(prompts)}, "
                f"{num_tokens / forks if forks else float('inf'):.0f} tokens per fork, "
                f"plain {seconds[0]:.0f} s, drafted {seconds[1]:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
