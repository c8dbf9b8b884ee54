"""A run folder -> its audit: load what wrote it, choose what is examined, decode what is missing,
and write the page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from specens.audit.examine import Evidence, examine
from specens.audit.options import AuditOptions
from specens.audit.outputs import Output, chosen, read_outputs
from specens.audit.page import Audit
from specens.config.build import build
from specens.config.folder import launch_folder, run_config, run_part
from specens.decoding.loop import Decoder
from specens.decoding.speculator import Speculator
from specens.decoding.target.target import Target
from specens.errors import DrafterError, UserError
from specens.records.files import plain, write_result
from specens.records.reader import status_of
from specens.run import run
from specens.run.job import Job, job_of
from specens.run.terminal import Terminal

if TYPE_CHECKING:
    from omegaconf import DictConfig


def audit(
    config: DictConfig, folder: Path, overrides: Sequence[str] = (), hydra: DictConfig | None = None
) -> Audit:
    """Audit the run that `run` names, or one that is made first, into `folder`. `hydra`: as for
    specens.run.run.
    """
    terminal, options = Terminal(), build(config.audit)
    if config.run is None:
        own = run_part(config)
        if "prompts.limit" not in map(_name, overrides):
            own.prompts.limit = options.num_prompts
        run(own, folder, hydra)
    else:
        refuse_ignored(overrides)
        folder = Path(str(config.run)).expanduser().absolute()
        own = run_config(folder)
        own.plugins = config.plugins  # what a record lists is not imported
        if (origin := launch_folder(folder)) is not None:
            os.chdir(origin)
    try:
        found = examine_run(folder, job_of(own, prompts=None, tracker=None), options, terminal)
    except DrafterError as error:
        raise UserError(str(error)) from error
    for line in found.page().splitlines():
        terminal.say(line)
    return found


def refuse_ignored(overrides: Sequence[str]) -> None:
    """With run=, the run's own configuration is taken: any other override would be ignored."""
    for given in overrides:
        name = _name(given)
        if name not in ("run", "plugins") and not name.startswith("audit."):
            raise UserError(
                f"{given}: run= takes the configuration of that run; leave it out, or leave out "
                "run="
            )


def _name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def examine_run(folder: Path, job: Job, options: AuditOptions, terminal: Terminal) -> Audit:
    """Examine the outputs in a run folder, which were written by `job`; write `audit.txt` and
    `audit.json` there.
    """
    recorded = read_outputs(folder, job.sampling.seed)
    terminal.say(f"examining {folder}")
    loaded = job.target.load()
    # With exact_width, whatever the audit scores has that one width, as AR decoding had in the run.
    target = Target(loaded.model, loaded.tokenizer, origin=job.target, exact_width=job.exact_width)
    check_ids(folder, recorded.outputs, target.vocab_size)
    speculator = Speculator(Decoder(target, job.drafter, job.budget, job.verifier, job.layout))
    outputs = chosen(recorded.outputs, options.num_prompts)
    evidence = _evidence(speculator, job, outputs, options, terminal)
    terminal.end_prompt()
    subject = _subject(folder, job, loaded.facts())
    found = Audit(str(folder), subject, options, recorded, len(outputs), *evidence)
    content = json.dumps(plain(found.content()), indent=2, allow_nan=False, ensure_ascii=False)
    files = {"audit.json": content + "\n", "audit.txt": found.page()}
    write_result(folder, files, "the audit")
    return found


def check_ids(folder: Path, outputs: Sequence[Output], vocab_size: int) -> None:
    """Refuse outputs that are not the target's."""
    for output in outputs:
        for token in (*output.prompt_ids, *output.output_ids):
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"run={folder}: prompt {output.prompt_id} has token {token}, the target has "
                    f"the ids 0..{vocab_size - 1}; prompts.parquet was changed, or belongs to "
                    "another target"
                )


def _evidence(
    speculator: Speculator,
    job: Job,
    outputs: Sequence[Output],
    options: AuditOptions,
    terminal: Terminal,
) -> tuple[Evidence, Evidence | None]:
    """Of the run's own outputs, with more from other seeds if it sampled too few tokens; and, of a
    greedy run, of outputs that are sampled for the distribution test.
    """
    decoder, sampling = speculator.decoder, job.sampling
    config = sampling.generation_config(decoder.target)
    is_sampled = bool(config.do_sample)
    sampled_config = config
    if not is_sampled:
        sampled = replace(sampling, temperature=options.temperature)
        sampled_config = sampled.generation_config(decoder.target)
    num_known = sum(len(output.output_ids) for output in outputs) if is_sampled else 0
    num_missing = options.num_sampled(is_sampled=is_sampled) - num_known
    more = more_outputs(speculator, sampled_config, outputs, num_missing, terminal)
    show, width = terminal.begin_prompt, options.width
    if is_sampled:
        return examine(decoder, config, (*outputs, *more), width, show), None
    own = examine(decoder, config, outputs, width, show)
    return own, examine(decoder, sampled_config, more, width, show) if more else None


def more_outputs(
    speculator: Speculator,
    config: GenerationConfig,
    outputs: Sequence[Output],
    num_tokens: int,
    terminal: Terminal,
) -> tuple[Output, ...]:
    """Outputs of `num_tokens` tokens or a few more, decoded with the run's own drafters: the
    prompts over and over, each time with the next seed.
    """
    more: list[Output] = []
    while num_tokens > 0:
        output = outputs[len(more) % len(outputs)]
        seed = output.seed + 1 + len(more) // len(outputs)
        terminal.begin_prompt(f"sampling, {num_tokens} tokens to go")
        prompt = (output.prompt_id, output.prompt_ids)
        done = speculator.complete(prompt[1], config, seed=seed, prompt_key=prompt[0])
        more.append(Output(*prompt, done.output_ids, done.finish_reason, seed))
        num_tokens -= len(done.output_ids)
    return tuple(more)


def _subject(folder: Path, job: Job, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What was examined."""
    temperature = job.sampling.temperature
    return {
        "target": facts["name"],
        "dtype": facts["dtype"] + (" (quantised)" if facts["is_quantized"] else ""),
        "device": facts["device"],
        "drafters": [member.name for member in job.drafter.members],
        "verifier": job.verifier.name,
        "lossy": not job.verifier.lossless,
        "layout": job.layout,
        "exact_width": job.exact_width,
        "status": status_of(folder),
        "how": f"sampling at temperature {temperature:g}" if temperature > 0 else "greedy",
    }
