"""From outputs to evidence: each is scored again token by token, in chunks and, where it diverges,
by the reference; sampled ones are tested for their distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import GenerationConfig

from specens.audit.distribution_test import DistributionTest, Statistic, is_rejected
from specens.audit.identity import (
    BUG,
    RESCORING,
    Deficits,
    Divergence,
    deficits_of,
    divergences_of,
    end_fault,
    identity_verdict,
    more_than_control,
    noise_of,
)
from specens.audit.outputs import Output
from specens.audit.rescore import Position, Rescored, in_chunks, rescore, rescored
from specens.decoding.drafter import hidden_layers
from specens.decoding.generation import prepare
from specens.decoding.loop import Decoder
from specens.decoding.stopping import StopRules
from specens.decoding.target.target import Target

NOT_REJECTED, LOST = "distribution not rejected", "NOT LOSSLESS"


@dataclass(frozen=True)
class Evidence:
    """What was found in the examined outputs of one kind of decoding.

    `is_keyed`: the output for a seed has to be AR decoding's own, so identity applies; if not,
    `num_identical`, `divergences`, `deficits` and `identity` are empty or None. `faults` are wrong
    ends. `num_control_divergences` counts the positions at which AR decoding scored in chunks
    chooses otherwise than token by token. Greedy output has no distribution to test.
    """

    is_sampled: bool
    is_keyed: bool
    num_texts: int
    num_tokens: int
    faults: tuple[str, ...]
    noise_floor: float
    noise_limit: float
    num_control_divergences: int
    num_identical: int | None = None
    divergences: tuple[Divergence, ...] = ()
    reference: str | None = None
    is_more_than_control: bool = False
    deficits: Deficits | None = None
    identity: str | None = None
    statistics: tuple[Statistic, ...] = ()
    control: tuple[Statistic, ...] = ()
    num_contested: int = 0
    impossible: tuple[str, ...] = ()
    distribution: str | None = None

    @property
    def is_noise(self) -> bool:
        """Whether the noise floor can be rounding at all."""
        return self.noise_floor <= self.noise_limit

    @property
    def is_lossless(self) -> bool:
        is_bad = self.identity == BUG or self.distribution == LOST or bool(self.faults)
        return self.is_noise and not is_bad

    @property
    def num_divergences(self) -> int:
        """Of the outputs from AR decoding token by token; those on record are not counted."""
        return sum(one.source == RESCORING for one in self.divergences)


def examine(
    decoder: Decoder,
    config: GenerationConfig,
    outputs: Sequence[Output],
    width: int,
    on_output: Callable[[str], object] = lambda line: None,
) -> Evidence:
    """All evidence in outputs that `decoder` wrote with `config`. Its drafter is bound, and used
    only where output is sampled.
    """
    test = DistributionTest(decoder.drafter) if config.do_sample else None
    found, faults = [], {}
    for number, output in enumerate(outputs, start=1):
        on_output(f"examining text {number} of {len(outputs)}")
        one, stop = _rescored(decoder, config, output, width, test)
        found.append(one)
        if (fault := end_fault(stop, output)) is not None:
            faults[output] = f"{output.prompt_id}: {fault}"
    floor, limit = noise_of(decoder.target, found)
    evidence = Evidence(
        is_sampled=config.do_sample,
        is_keyed=decoder.verifier.coupled or not config.do_sample,
        num_texts=len(outputs),
        num_tokens=sum(len(output.output_ids) for output in outputs),
        faults=tuple(faults.values()),
        noise_floor=floor,
        noise_limit=limit,
        num_control_divergences=sum(
            int((one.control_choices != one.choices).sum()) for one in found
        ),
    )
    if evidence.is_keyed:
        evidence = _with_identity(evidence, decoder.target, found, faults)
    return evidence if test is None else _with_distribution(evidence, test)


def _rescored(
    decoder: Decoder,
    config: GenerationConfig,
    output: Output,
    width: int,
    test: DistributionTest | None,
) -> tuple[Rescored, StopRules]:
    """An output scored again, tested on the way, and the rules by which it has to end."""
    target, key, ids, seed = decoder.target, output.prompt_id, output.prompt_ids, output.seed
    sampler, stop = prepare(target, config, ids, seed=seed, prompt_key=key)
    control = in_chunks(target, output, sampler, decoder.layout, width)
    with target.prefill(ids, hidden_layers(decoder.drafter) if test else ()) as cache:
        positions: Iterable[Position] = rescore(target, cache, output)
        if test:
            # Noise of its own: given the output's, nothing else would have been likely.
            key = f"audit\x00{key}"
            own, _ = prepare(target, config, ids, seed=seed, prompt_key=key, coupled=False)
            positions = test.follow(ids, cache.hidden, positions, own)
        return rescored(output, sampler, positions, control), stop


def _with_identity(
    evidence: Evidence, target: Target, found: Sequence[Rescored], faults: Collection[Output]
) -> Evidence:
    floor, is_noise = evidence.noise_floor, evidence.is_noise
    divergences, reference = divergences_of(target, found, floor)
    deficits = deficits_of(np.concatenate([one.deficits for one in found]), floor)
    wrong = {(one.prompt_id, one.seed) for one in (*divergences, *faults)}
    evidence = replace(
        evidence,
        num_identical=sum((one.output.prompt_id, one.output.seed) not in wrong for one in found),
        divergences=divergences,
        reference=reference,
        deficits=deficits,
    )
    is_more = more_than_control(evidence.num_divergences, evidence.num_control_divergences)
    verdict = identity_verdict(
        divergences, deficits, faults=evidence.faults, is_noise=is_noise, is_more=is_more
    )
    return replace(evidence, is_more_than_control=is_more, identity=verdict)


def _with_distribution(evidence: Evidence, test: DistributionTest) -> Evidence:
    statistics = test.statistics()
    is_lost = is_rejected(statistics) or bool(test.impossible)
    return replace(
        evidence,
        statistics=statistics,
        control=test.control_statistics(),
        num_contested=test.num_contested,
        impossible=tuple(test.impossible),
        distribution=LOST if is_lost else NOT_REJECTED,
    )
