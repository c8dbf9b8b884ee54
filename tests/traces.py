"""Texts and drafters made by hand: decoded live by the real loop, and traced at every position,
without any model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pandas as pd
from helpers import ScriptedTarget, decode_steps

from specens.decoding.budgets.base import Budget, PlanContext, Policy
from specens.decoding.budgets.costs import CostTable
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.loop import Decoder
from specens.decoding.merge import part_of
from specens.decoding.sampling import Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan, StepRecord
from specens.decoding.verify import Coupled
from specens.drafters.ensemble import Ensemble
from specens.records.schema import NO_CONFIDENCE, PromptRecord, frames_of
from specens.replay.trace import Trace

VOCAB = 9
END = 1
MOST_TOKENS = 40
CONTEXT_LIMIT = 60

COSTS = CostTable(
    ((0, 10.0), (2, 11.0), (8, 15.0), (32, 40.0)),
    {
        "chain": ((1, 0.2), (6, 0.3)),
        "tree": ((1, 0.5), (4, 0.6)),
        "model": ((1, 1.5), (5, 6.0)),
        "poor": ((1, 4.0),),
    },
    0.5,
)


@dataclass(frozen=True)
class Script:
    """A prompt and what the target outputs."""

    name: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prompt_ids + self.output_ids


def scripts(seed: int = 0, count: int = 4) -> list[Script]:
    """Texts of few tokens, so that guesses often agree by chance. The first token of a prompt is
    its own; one text in two ends before it must, and one prompt is so long that the context ends
    the text.
    """
    rng = random.Random(seed)
    made = []
    for number in range(count):
        length = rng.randrange(3, 12) if number else CONTEXT_LIMIT - 25
        prompt = (VOCAB + number, *(rng.randrange(2, VOCAB) for _ in range(length)))
        most = min(MOST_TOKENS, CONTEXT_LIMIT - len(prompt))
        size = rng.randrange(1, most) if number % 2 else most
        output = [rng.randrange(2, VOCAB) for _ in range(size)]
        output[-1] = END if size < most else output[-1]
        made.append(Script(f"prompt-{number}", prompt, tuple(output)))
    return made


@dataclass
class Guesser:
    """Knows the texts and errs: each token is right with probability `skill`. What it proposes
    follows from the position. With `num_nodes` above its depth its proposals branch, best first,
    and ends of text stand in them too. It abstains at a share `abstains` of the positions.
    """

    texts: Sequence[Script]
    depth: int
    num_nodes: int
    skill: float
    seed: int
    stops_early: bool = False
    has_confidences: bool = True
    context_limit: int | None = None
    abstains: float = 0.2
    members: tuple[Member, ...] = field(init=False)

    def __post_init__(self) -> None:
        limits = (self.depth, self.num_nodes, self.context_limit)
        self.members = (Member("guesser", *limits, stops_early=self.stops_early),)

    def bind(self, target: Any) -> None: ...

    def begin(self, prompt_ids: Sequence[int]) -> Guesser:
        return self

    def observe(self, commit: Commit) -> None: ...

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        full = self._full(context_ids)
        depths: list[int] = []
        kept: list[int] = []
        for node, parent in enumerate(full.parents):
            depths.append(1 if parent == ROOT else depths[parent] + 1)
            if depths[node] > plan.num_tokens or len(kept) == plan.num_nodes:
                continue
            kept.append(node)
            if self.stops_early and (full.confidence(node) or 0.0) < plan.min_confidence:
                break
        index = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
        confidences = tuple(full.confidence(node) for node in kept)
        return Draft(
            tuple(full.token_ids[node] for node in kept),
            tuple(index[full.parents[node]] for node in kept),
            confidences=confidences if self.has_confidences else (),
        )

    def _full(self, context_ids: Sequence[int]) -> Draft:
        rng = random.Random(f"{self.seed} {len(context_ids)} {context_ids[0]}")
        if rng.random() < self.abstains:
            return Draft()
        whole = next(text.whole for text in self.texts if text.whole[0] == context_ids[0])
        tokens: list[int] = []
        parents: list[int] = []
        confidences: list[float] = []
        depths: list[int] = []
        is_chain = self.num_nodes == self.depth
        while len(tokens) < self.num_nodes:
            open_nodes = [ROOT, *(node for node in range(len(tokens)) if depths[node] < self.depth)]
            parent = len(tokens) - 1 if is_chain else rng.choice(open_nodes)
            depth = 1 if parent == ROOT else depths[parent] + 1
            place = len(context_ids) + depth - 1
            truth = whole[place] if place < len(whole) else END
            tokens.append(truth if rng.random() < self.skill else rng.randrange(VOCAB))
            parents.append(parent)
            depths.append(depth)
            above = 1.0 if parent == ROOT else confidences[parent]
            confidences.append(above * rng.uniform(self.skill / 2, 1.0))
        return Draft(tuple(tokens), tuple(parents), confidences=tuple(confidences))


def guessers(texts: Sequence[Script]) -> dict[str, Guesser]:
    """Four members: a good chain, a tree, a model that stops early, and a poor one without
    confidences.
    """
    model = Guesser(texts, 5, 5, 0.7, seed=3, stops_early=True, abstains=0.0)
    return {
        "chain": Guesser(texts, 6, 6, 0.8, seed=1, abstains=0.4),
        "tree": Guesser(texts, 4, 10, 0.5, seed=2),
        "model": replace(model, context_limit=CONTEXT_LIMIT - 10),
        "poor": Guesser(texts, 3, 3, 0.2, seed=4, has_confidences=False, abstains=0.0),
    }


def stop_rules(text: Script) -> StopRules:
    return StopRules(len(text.prompt_ids) + MOST_TOKENS, (END,), CONTEXT_LIMIT)


def decode_live(
    texts: Sequence[Script],
    members: Mapping[str, Guesser],
    budget: Budget,
    costs: Mapping[str, CostTable] | None = None,
) -> list[tuple[PromptRecord, tuple[StepRecord, ...]]]:
    """Every text by the real loop, one after another, as a run does."""
    wholes = {text.whole[0]: text.whole for text in texts}

    def next_token(prefix: tuple[int, ...]) -> int:
        whole = wholes[prefix[0]]
        return whole[len(prefix)] if len(prefix) < len(whole) else 0

    target: Any = ScriptedTarget(next_token)
    decoder = Decoder(target, Ensemble(members), budget, Coupled())
    earlier: Policy | None = None
    done = []
    for text in texts:
        table = costs[text.name] if costs else COSTS
        earlier = budget.begin(decoder.drafter.members, table, earlier)
        sampler, rules = Sampler(), stop_rules(text)
        steps = tuple(decode_steps(decoder, text.prompt_ids, sampler, rules, earlier))
        emitted = tuple(token for step in steps for token in step.token_ids)
        assert emitted == text.output_ids, "the loop writes the text, whoever drafts"
        done.append((replace(record_of(text), num_steps=len(steps)), steps))
    return done


def live_frames(*arguments: Any) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Prompts, steps and drafts of `decode_live`."""
    return frames_of(decode_live(*arguments))


def facts(
    members: Mapping[str, Guesser], budget: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a dense trace records besides its rows."""
    names = ("name", "num_draft_tokens", "num_draft_nodes", "context_limit", "stops_early")
    own = [{name: getattr(member, name) for name in names} for member in Ensemble(members).members]
    return {
        "members": own,
        "eos_token_ids": [END],
        "budget": budget or {"name": "fixed", "node": node_of(FixedBudget())},
        "layout": "tree",
    }


def node_of(budget: Any) -> dict[str, Any]:
    """The configuration of a budget."""
    kind = type(budget)
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **asdict(budget)}


def drafts_everywhere(text: Script, members: Mapping[str, Guesser]) -> list[tuple[int, Draft]]:
    """At every position of a text: how many tokens are wanted, and all members' full proposals."""
    ensemble, rules = Ensemble(members), stop_rules(text)
    budget, proposer = FixedBudget(max_nodes=10**6), ensemble.begin(text.prompt_ids)
    found = []
    for length in range(len(text.prompt_ids), len(text.whole)):
        wanted = rules.tokens_wanted(length)
        plan = budget.plan(PlanContext(ensemble.members, length, wanted))
        context = text.whole[:length]
        draft = proposer.propose(context, plan, Sampler()) if plan.num_tokens else Draft()
        found.append((wanted, draft))
    return found


def dense_frame(texts: Sequence[Script], members: Mapping[str, Guesser]) -> pd.DataFrame:
    """The rows of dense.parquet."""
    rows = []
    for text in texts:
        for position, (wanted, draft) in enumerate(drafts_everywhere(text, members)):
            for index, name in enumerate(members):
                part = part_of(draft, index)
                rows.append(
                    {
                        "prompt_id": text.name,
                        "position": position,
                        "tokens_wanted": wanted,
                        "drafter": name,
                        "token_ids": part.token_ids,
                        "parents": part.parents,
                        "confidences": [
                            NO_CONFIDENCE if one is None else round(one * 10**4)
                            for one in part.confidences
                        ],
                    }
                )
    return pd.DataFrame(rows)


def prompts_frame(texts: Sequence[Script]) -> pd.DataFrame:
    return frames_of([(record_of(text), ()) for text in texts])[0]


def record_of(text: Script) -> PromptRecord:
    ids = {"prompt_ids": text.prompt_ids, "output_ids": text.output_ids}
    return PromptRecord(text.name, "odd", **ids)


def trace_of(texts: Sequence[Script], members: Mapping[str, Guesser]) -> Trace:
    return Trace.of(dense_frame(texts, members), prompts_frame(texts), facts(members))
