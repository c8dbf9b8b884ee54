"""A run folder -> its audit: load what wrote it, choose what is examined, decode what is missing, and leave the page there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import GenerationConfig

from specens.decoding.budget import Budget
from specens.decoding.drafter import Drafter
from specens.decoding.generation import SamplingOptions
from specens.decoding.loop import Decoder
from specens.decoding.target import Layout, Target
from specens.decoding.verify import Verifier
from specens.errors import UserError
from specens.evidence.examine import examine
from specens.evidence.options import Options
from specens.evidence.page import Audit
from specens.evidence.texts import Text, chosen, read_texts
from specens.files import SUMMARY_NAME, plain, write_whole
from specens.models import ModelSpec
from specens.screen import Screen
from specens.speculator import Speculator


def examine_folder(
    folder: Path,
    options: Options,
    screen: Screen,
    *,
    target: ModelSpec,
    drafter: Drafter,
    budget: Budget,
    verifier: Verifier,
    sampling: SamplingOptions,
    layout: Layout,
    exact_width: int | None,
) -> Audit:
    """Examine the texts in a run folder, which were written with these parts; write `audit.txt` and `audit.json` there."""
    written = read_texts(folder, sampling.seed)
    screen.say(f"examining {folder}")
    loaded = target.load()
    # One width is plain decoding's too, in such a run: of whatever the audit asks the target.
    model = Target(loaded.model, loaded.tokenizer, origin=target, exact_width=exact_width)
    check_ids(folder, written.texts, model.vocab_size)
    speculator = Speculator(Decoder(model, drafter, budget, verifier, layout))
    own = sampling.generation_config(model)
    texts = chosen(written.texts, options.num_prompts)
    num_chosen = len(texts)
    extra_sampling = sampling if own.do_sample else replace(sampling, temperature=options.temperature)
    extra_config = extra_sampling.generation_config(model)
    num_sampled = sum(len(text.output_ids) for text in texts) if own.do_sample else 0
    num_missing = options.num_sampled(is_sampled=bool(own.do_sample)) - num_sampled
    extra = more_texts(speculator, extra_config, texts, num_missing, screen)
    if own.do_sample:
        texts, extra = (*texts, *extra), ()
    found = examine(speculator.decoder, own, texts, options.width, screen.begin_prompt)
    sampled = examine(speculator.decoder, extra_config, extra, options.width, screen.begin_prompt) if extra else None
    screen.end_prompt()
    facts = loaded.facts()
    subject = {
        "target": facts["name"],
        "dtype": facts["dtype"] + (" (quantised)" if facts["is_quantized"] else ""),
        "device": facts["device"],
        "drafters": [member.name for member in drafter.members],
        "verifier": verifier.name,
        "lossy": not verifier.lossless,
        "layout": layout,
        "exact_width": exact_width,
        "status": status_of(folder),
        "how": f"sampling at temperature {sampling.temperature:g}" if own.do_sample else "greedy",
    }
    done = Audit(str(folder), subject, options, written, num_chosen, found, sampled)
    content = json.dumps(plain(done.content()), indent=2, allow_nan=False, ensure_ascii=False)
    try:
        write_whole(folder, {"audit.json": content + "\n", "audit.txt": done.page()})
    except OSError as error:
        raise UserError(f"cannot write the audit into {folder}: {error.strerror}") from error
    return done


def check_ids(folder: Path, texts: Sequence[Text], vocab_size: int) -> None:
    """Refuse texts that are not the target's."""
    for text in texts:
        for token in (*text.prompt_ids, *text.output_ids):
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"run={folder}: prompt {text.prompt_id} has token {token}, the target has the ids 0..{vocab_size - 1}; "
                    "prompts.parquet was changed, or belongs to another target"
                )


def status_of(folder: Path) -> str:
    """How the run ended, by its summary.json."""
    try:
        return str(json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8")).get("status"))
    except (OSError, ValueError, AttributeError):
        return "nothing, or it is missing"


def more_texts(
    speculator: Speculator, config: GenerationConfig, texts: Sequence[Text], num_tokens: int, screen: Screen
) -> tuple[Text, ...]:
    """Texts of `num_tokens` tokens or a few more, decoded with the run's own drafters: the prompts over and over, each time with
    the next seed.
    """
    extra: list[Text] = []
    round_, missing = 0, num_tokens
    while missing > 0:
        round_ += 1
        for text in texts:
            if missing <= 0:
                break
            screen.begin_prompt(f"sampling, {missing} tokens to go")
            seed = text.seed + round_
            done = speculator.complete(text.prompt_ids, config, seed=seed, prompt_key=text.prompt_id)
            extra.append(
                replace(
                    text,
                    output_ids=done.output_ids,
                    finish_reason=done.finish_reason,
                    seed=seed,
                    baseline_ids=None,
                )
            )
            missing -= len(done.output_ids)
    return tuple(extra)
