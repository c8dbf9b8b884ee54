"""A decoder with what it keeps between prompts: the cost table, and what a budget has learned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from transformers import GenerationConfig

from specens.decoding.budgets.base import Policy
from specens.decoding.budgets.costs import CostTable, between, read_costs, refreshed
from specens.decoding.calibrate import QUICK, Effort, calibrate
from specens.decoding.dense import Recording
from specens.decoding.drafter import Drafter
from specens.decoding.generation import prepare
from specens.decoding.loop import Decoder, Prefilled
from specens.decoding.sampling import Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.target.self_check import self_check
from specens.decoding.target.supported import LAYOUTS
from specens.decoding.target.target import Target
from specens.decoding.types import StepRecord
from specens.decoding.verify import Verifier
from specens.errors import UserError, check_choice


@dataclass(frozen=True)
class Completion:
    """One prompt's result: the emitted ids, why they end, a record per step, the seconds of prefill
    and decoding, and the cost table that the budget decided by (None: it needed none).
    """

    output_ids: tuple[int, ...]
    finish_reason: str
    steps: tuple[StepRecord, ...]
    prefill_s: float
    decode_s: float
    costs: CostTable | None = None

    @classmethod
    def of(
        cls, steps: Sequence[StepRecord], prefill_s: float, costs: CostTable | None = None
    ) -> Completion:
        """The result of all steps of a prompt: decoding took what they took."""
        ids = tuple(token for step in steps for token in step.token_ids)
        decode_s = sum(step.draft_ms + step.verify_ms + step.host_ms for step in steps) / 1e3
        reason = str(steps[-1].finish_reason)
        return cls(ids, reason, tuple(steps), prefill_s, decode_s, costs)


class Decoding:
    """One sequence at work: iterate over its steps, each of which is made when it is requested."""

    def __init__(
        self, sequence: Prefilled, steps: Generator[StepRecord, None, None], costs: CostTable | None
    ) -> None:
        self.prefill_s, self.costs = sequence.seconds, costs
        self._sequence, self._steps = sequence, steps

    def __iter__(self) -> Iterator[StepRecord]:
        return self._steps

    def close(self) -> None:
        """End the sequence where it is; after its last step there is nothing left to do."""
        self._steps.close()
        self._sequence.close()


class Speculator:
    """A target with its drafters, bound and checked. The command line and the library use this same
    object, several threads at once if they like: a sequence's own state lies in its Decoding.

    `wants_costs`: measure what steps cost even if the budget has no use for it. `bind` False: the
    caller has bound the drafter to the target.
    """

    def __init__(self, decoder: Decoder, *, wants_costs: bool = False, bind: bool = True) -> None:
        check_choice("layout", decoder.layout, LAYOUTS)
        check_draft_probs(decoder.verifier, decoder.drafter)
        decoder.target.check_layout(decoder.layout)
        if decoder.drafter.members:
            self_check(decoder.target, decoder.layout)
        if bind:
            decoder.drafter.bind(decoder.target)
        self.decoder = decoder
        self.wants_costs = wants_costs or decoder.budget.needs_costs
        given = decoder.budget.costs
        self.costs = read_costs(str(given)) if given is not None else None
        self.cached_costs: CostTable | None = None
        """What was measured before on this machine, to be measured once more, quickly."""
        self._policy: Policy | None = None
        self._lock = threading.Lock()

    @property
    def target(self) -> Target:
        return self.decoder.target

    def complete(
        self,
        prompt_ids: Sequence[int],
        config: GenerationConfig,
        *,
        seed: int,
        prompt_key: str,
        on_step: Callable[[StepRecord], object] | None = None,
        recording: Recording | None = None,
    ) -> Completion:
        """Decode one prompt to its end, calling `on_step` after each step; the time that takes is
        not counted.
        """
        decoding = self.begin(
            prompt_ids, config, seed=seed, prompt_key=prompt_key, recording=recording
        )
        steps: list[StepRecord] = []
        try:
            for step in decoding:
                steps.append(step)
                if on_step is not None:
                    on_step(step)
        finally:
            decoding.close()
        return Completion.of(steps, decoding.prefill_s, decoding.costs)

    def begin(
        self,
        prompt_ids: Sequence[int],
        config: GenerationConfig,
        *,
        seed: int,
        prompt_key: str,
        recording: Recording | None = None,
    ) -> Decoding:
        """Prefill one prompt. What steps cost is measured before the first prompt, if that is
        wanted, and the table is refreshed by the prompts after it.
        """
        decoder = self.decoder
        costs = self.known_costs(prompt_ids)
        sampler, stop = prepare(
            self.target,
            config,
            prompt_ids,
            seed=seed,
            prompt_key=prompt_key,
            coupled=decoder.verifier.coupled,
        )
        sequence = decoder.prefill(prompt_ids, recording)
        return Decoding(sequence, self._steps(sequence, sampler, stop, costs), costs)

    def _steps(
        self, sequence: Prefilled, sampler: Sampler, stop: StopRules, costs: CostTable | None
    ) -> Generator[StepRecord, None, None]:
        """The steps; after the last of them, the cost table has moved to what they took."""
        decoder, budget, steps = self.decoder, self.decoder.budget, []
        with self._lock:  # a policy that is at work on a sequence is not handed to another one
            earlier, self._policy = self._policy, None
        policy = budget.begin(decoder.drafter.members, costs or CostTable(), earlier)
        try:
            for step in decoder.decode(sequence, sampler, stop, policy):
                steps.append(step)
                yield step
        finally:
            self._policy = policy
        with self._lock:
            if self.costs is not None and budget.refresh and budget.costs is None:
                self.costs = refreshed(self.costs, steps)

    def forget(self) -> None:
        """Drop what a budget has learned from one prompt for the next; costs stay known."""
        self._policy = None

    def known_costs(self, prompt_ids: Sequence[int]) -> CostTable | None:
        """The cost table in force; measured now if the budget wants one and there is none."""
        with self._lock:
            if self.costs is None and self.wants_costs:
                self.target.check_prompt(prompt_ids, len(prompt_ids))
                cached, most = self.cached_costs, self.decoder.budget.max_nodes
                effort = Effort() if cached is None else QUICK
                measured = calibrate(self.decoder, tuple(prompt_ids), most, effort)
                self.costs = measured if cached is None else between(cached, measured)
            return self.costs


def check_draft_probs(verifier: Verifier, drafter: Drafter) -> None:
    """Refuse a drafter that cannot report the distribution it samples from, where the verifier has
    to know it.
    """
    for member in () if verifier.coupled else drafter.members:
        if member.coupled_only:
            raise UserError(
                f"drafter {member.name}: cannot report the distribution that it samples its tokens "
                f"from, which verifier={verifier.name} has to know; use verifier=coupled"
            )
