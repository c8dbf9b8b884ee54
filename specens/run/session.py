"""The loaded parts of a job: the target, and its decoding with and without the drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.drafter import hidden_layers
from specens.decoding.loop import Decoder
from specens.decoding.speculator import Speculator
from specens.decoding.target.compiled import CannotCompileError, CompileOptions
from specens.decoding.target.target import Target
from specens.decoding.verify import Coupled
from specens.drafters.none import NoDrafter
from specens.prompts.chat import Prompt, next_prompt
from specens.prompts.sources import Question
from specens.run.cost_cache import cached, keep
from specens.run.environment import environment
from specens.run.job import Job
from specens.run.terminal import Terminal

WARM_UP_TOKENS = 4
"""Decoded with and without drafters before anything is timed."""


@dataclass(frozen=True)
class Session:
    """`facts` are those of the loaded model, `config` its generation options; `drafted` decodes
    with the job's drafter, `baseline` is AR decoding on the same target.
    """

    job: Job
    target: Target
    facts: dict[str, Any]
    config: GenerationConfig
    drafted: Speculator
    baseline: Speculator

    def environment(self) -> dict[str, Any]:
        """What the numbers depend on besides the configuration."""
        return environment(self.target, self.facts, self.job.drafter, self.config)

    def prompt(self, question: Question, answers: Sequence[str]) -> Prompt:
        """The next turn of a question, as ids."""
        assert self.target.tokenizer is not None
        return next_prompt(question, answers, self.target.tokenizer, self.job.prompts.chat)

    def keep_costs(self) -> None:
        """Keep what was measured of steps for the next run on this machine."""
        if self.drafted.costs is not None and self.job.budget.costs is None:
            keep(cost_subject(self), self.drafted.costs)


def load_session(job: Job, terminal: Terminal) -> Session:
    """Load the target and the drafters, and compile if that is wanted or worth it here."""
    terminal.say("loading the target")
    loaded = job.target.load()
    target = Target(loaded.model, loaded.tokenizer, origin=job.target, exact_width=job.exact_width)
    config = job.sampling.generation_config(target)
    terminal.say("loading the drafters")
    is_dense = job.trace == "dense"
    decoder = Decoder(target, job.drafter, job.budget, job.verifier, job.layout, is_dense)
    drafted = Speculator(decoder, wants_costs=is_dense)
    session = Session(job, target, loaded.facts(), config, drafted, ar_baseline(target))
    _compile(session, terminal)
    if drafted.costs is None and drafted.wants_costs:
        drafted.cached_costs = cached(cost_subject(session))
    return session


def ar_baseline(target: Target) -> Speculator:
    """AR decoding by the same loop."""
    return Speculator(Decoder(target, NoDrafter(), FixedBudget(), Coupled()))


def _compile(session: Session, terminal: Terminal) -> None:
    """Compile the target if that is wanted or worth it here; or print why not, and go on."""
    job, target = session.job, session.target
    is_worth_it = target.device.type == "cuda" and job.layout == "tree"
    if not (is_worth_it if job.compiled is None else job.compiled):
        return
    terminal.say("compiling the target (some minutes)")
    nodes = job.exact_width or job.budget.max_nodes
    room = session.config.max_new_tokens or CompileOptions.room
    options = replace(CompileOptions.of(target.device), room=room)
    try:
        if job.layout != "tree":
            raise CannotCompileError(f"layout={job.layout} has no fixed shapes")
        target.compile(options, max_nodes=nodes, hidden_layers=hidden_layers(job.drafter))
    except CannotCompileError as failure:
        terminal.say(f"the run goes on uncompiled: {failure}")


def cost_subject(session: Session) -> dict[str, Any]:
    """What a cost table depends on."""
    job, known = session.job, session.environment()
    names = ("packages", "device", "compiled", "num_threads", "target", "drafters", "platform")
    members = [str(member) for member in job.drafter.members]
    steps = {"layout": job.layout, "width": job.budget.max_nodes, "members": members}
    return {**{name: known[name] for name in names}, **steps}


def warm_up(session: Session, questions: Sequence[Question], terminal: Terminal) -> None:
    """Decode a few tokens both ways on the first prompt that can be decoded, so that nothing is
    timed cold.
    """
    terminal.say("warming up")
    config = GenerationConfig(**{**session.config.to_dict(), "max_new_tokens": WARM_UP_TOKENS})
    seed = session.job.sampling.seed
    for question in questions:
        try:
            prompt = session.prompt(question, [])
            for speculator in (session.baseline, session.drafted):
                speculator.complete(prompt.token_ids, config, seed=seed, prompt_key=prompt.id)
        except (Exception, SystemExit):  # it fails again, by name, when its turn comes
            continue
        break
    # The run is what its records say, and replay begins where they do.
    session.drafted.forget()
