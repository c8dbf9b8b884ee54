"""From texts to evidence: the walk, the chunks, the reference where they disagree, and the stream test, text by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import GenerationConfig

from specens.decoding.generation import prepare
from specens.decoding.loop import Decoder
from specens.decoding.sampling import Sampler
from specens.decoding.stopping import StopRules
from specens.evidence.identity import (
    Deficits,
    Fork,
    deficits_of,
    end_fault,
    identity_verdict,
    is_explained,
    more_than_control,
    noise_floor,
    noise_limit,
    rank,
)
from specens.evidence.law import Statistic, Stream, is_rejected
from specens.evidence.texts import Text
from specens.evidence.walk import (
    Place,
    Walk,
    WalkRecorder,
    along,
    in_chunks,
    in_one_forward,
    reference_of,
    scores_at,
)

KEPT, LOST = "law not rejected", "NOT LOSSLESS"


@dataclass(frozen=True)
class Evidence:
    """What was found in the examined texts of one kind of decoding.

    `is_keyed`: the text for a seed has to be plain decoding's own, so identity applies; if not, `num_identical`, `forks`,
    `deficits` and `identity` are empty or None. `faults` are wrong ends. `num_control_forks` counts the positions at which plain
    decoding in chunks chooses otherwise than token by token. Greedy text has no law to test: `law` is None.
    """

    is_sampled: bool
    is_keyed: bool
    num_texts: int
    num_tokens: int
    num_identical: int | None
    forks: tuple[Fork, ...]
    faults: tuple[str, ...]
    noise_floor: float
    noise_limit: float
    reference: str | None
    num_control_forks: int
    is_more_than_control: bool
    deficits: Deficits | None
    identity: str | None
    statistics: tuple[Statistic, ...]
    control: tuple[Statistic, ...]
    num_contested: int
    impossible: tuple[str, ...]
    law: str | None

    @property
    def is_lossless(self) -> bool:
        return self.identity != "BUG" and self.law != LOST and not self.faults and self.noise_floor <= self.noise_limit


@dataclass(frozen=True)
class Examined:
    """One text: the walk, the same positions in chunks (`scores` `[n, 2]`, `choices` `[n]`), and what is wrong with its end."""

    walk: Walk
    scores: np.ndarray
    choices: np.ndarray
    fault: str | None


def examine(
    decoder: Decoder,
    config: GenerationConfig,
    texts: Sequence[Text],
    width: int,
    on_text: Callable[[str], object] = lambda line: None,
) -> Evidence:
    """Everything about texts that `decoder` wrote with `config`. Its drafter is bound, and only asked where text is sampled."""
    stream = Stream(decoder.drafter) if config.do_sample else None
    found = []
    for number, text in enumerate(texts, start=1):
        on_text(f"examining text {number} of {len(texts)}")
        found.append(_examine_text(decoder, config, text, width, stream))
    is_keyed = decoder.verifier.coupled or not config.do_sample
    floor, limit = _noise(decoder, found)
    num_control_forks = sum(int((one.choices != one.walk.choices).sum()) for one in found)
    forks, reference = _forks(decoder, config, found, floor) if is_keyed else ((), None)
    deficits = deficits_of(np.concatenate([one.walk.deficits for one in found]), floor) if is_keyed else None
    faults = tuple(f"{one.walk.text.prompt_id}: {one.fault}" for one in found if one.fault is not None)
    is_more = is_keyed and more_than_control(sum(fork.source == "walk" for fork in forks), num_control_forks)
    identity = None
    if deficits is not None:
        identity = identity_verdict(forks, faults, deficits, is_noise=floor <= limit, is_more=is_more)
    statistics = stream.statistics() if stream else ()
    return Evidence(
        is_sampled=config.do_sample,
        is_keyed=is_keyed,
        num_texts=len(texts),
        num_tokens=sum(len(text.output_ids) for text in texts),
        num_identical=_num_identical(found, forks) if is_keyed else None,
        forks=forks,
        faults=faults,
        noise_floor=floor,
        noise_limit=limit,
        reference=reference,
        num_control_forks=num_control_forks,
        is_more_than_control=is_more,
        deficits=deficits,
        identity=identity,
        statistics=statistics,
        control=stream.control_statistics() if stream else (),
        num_contested=stream.num_contested if stream else 0,
        impossible=tuple(stream.impossible) if stream else (),
        law=None if stream is None else LOST if is_rejected(statistics) or stream.impossible else KEPT,
    )


def _plain(decoder: Decoder, config: GenerationConfig, text: Text) -> tuple[Sampler, StopRules]:
    """The sampler that plain decoding would have written the text with, and its stop rules."""
    return prepare(decoder.target, config, text.prompt_ids, seed=text.seed, prompt_key=text.prompt_id)


def _examine_text(
    decoder: Decoder, config: GenerationConfig, text: Text, width: int, stream: Stream | None
) -> Examined:
    sampler, stop = _plain(decoder, config, text)
    # Other noise than the text's: whoever shared it could not be asked what else would have been likely.
    other, _ = prepare(
        decoder.target,
        config,
        text.prompt_ids,
        seed=text.seed,
        prompt_key=f"audit\x00{text.prompt_id}",
        coupled=False,
    )
    recorder = WalkRecorder(text, sampler)
    for place in along(decoder.target, text, stream.hidden_layers if stream else ()):
        if isinstance(place, Place):
            recorder.add(place)
            if stream:
                stream.add(place, other)
        elif stream:
            stream.start(text.prompt_ids, place)
    walk = recorder.walk()
    chunks = in_chunks(decoder.target, text, decoder.layout, width)
    return Examined(walk, *scores_at(chunks, sampler, walk.best), end_fault(stop, text))


def _noise(decoder: Decoder, found: Sequence[Examined]) -> tuple[float, float]:
    """nu over all positions, and its limit."""
    walked = np.concatenate([one.walk.scores for one in found])
    chunked = np.concatenate([one.scores for one in found])
    finite = np.abs(walked[np.isfinite(walked)])
    size = float(finite.max()) if len(finite) else 1.0
    epsilon = torch.finfo(torch.bfloat16 if decoder.target.is_quantized else decoder.target.dtype).eps
    with np.errstate(invalid="ignore"):
        floor = noise_floor(walked - chunked, size, torch.finfo(decoder.target.dtype).eps)
    return floor, noise_limit(size, epsilon)


def _num_identical(found: Sequence[Examined], forks: Sequence[Fork]) -> int:
    forked = {(fork.prompt_id, fork.seed) for fork in forks}
    return sum(one.fault is None and (one.walk.text.prompt_id, one.walk.text.seed) not in forked for one in found)


def _forks(
    decoder: Decoder, config: GenerationConfig, found: Sequence[Examined], floor: float
) -> tuple[tuple[Fork, ...], str | None]:
    """All forks of all texts, judged with a reference, which is made only if there are any."""
    wanted = [(one, places) for one in found if (places := _fork_places(one.walk))]
    if not wanted:
        return (), None
    reference, name = reference_of(decoder.target)
    forks: list[Fork] = []
    for one, places in wanted:
        sampler, _ = _plain(decoder, config, one.walk.text)
        races = [sampler.race(ids, logits) for ids, logits in in_one_forward(reference, one.walk.text)]
        forks += _judged(one, places, races, floor, is_other=reference is not decoder.target)
    return tuple(forks), name


def _fork_places(walk: Walk) -> list[tuple[int, int, str, float]]:
    """(position, plain decoding's token, its source, its margin) of every fork of a text."""
    text = walk.text
    places = [
        (position, int(walk.choices[position]), "walk", float(walk.deficits[position]))
        for position in np.flatnonzero(walk.choices != np.array(text.output_ids, dtype=np.int64)).tolist()
    ]
    at = text.baseline_fork
    if at is not None and text.baseline_ids is not None and walk.baseline is not None:
        plain = text.baseline_ids[at]
        if all(place[:2] != (at, plain) for place in places):
            places.append((at, plain, "baseline", abs(walk.baseline - float(walk.said[at]))))
    return places


def _judged(
    one: Examined,
    places: Sequence[tuple[int, int, str, float]],
    races: Sequence[torch.Tensor],
    floor: float,
    *,
    is_other: bool,
) -> list[Fork]:
    text = one.walk.text
    reference_floor = floor
    if is_other:  # the copy's own distance from the target counts too
        own = np.array(
            [[float(race[token]) for token in best] for race, best in zip(races, one.walk.best, strict=True)]
        )
        with np.errstate(invalid="ignore"):
            reference_floor = max(floor, noise_floor(own - one.walk.scores, 0.0, 0.0))
    forks = []
    for position, plain, source, margin in places:
        race, said = races[position], text.output_ids[position]
        best, second = race.topk(2).values.tolist()
        shortfall = best - min(float(race[plain]), float(race[said]))
        forks.append(
            Fork(
                prompt_id=text.prompt_id,
                seed=text.seed,
                position=position,
                said=said,
                plain=plain,
                source=source,
                margin=margin,
                gap=best - second,
                plain_rank=rank(race, plain),
                said_rank=rank(race, said),
                shortfall=shortfall,
                is_explained=is_explained(
                    margin,
                    shortfall,
                    floor,
                    reference_floor,
                    same_as_control=int(one.choices[position]) == said,
                ),
            )
        )
    return forks
