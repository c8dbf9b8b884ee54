"""THE loop: plan -> propose -> merge -> score -> verify -> commit -> observe. One step is exactly
one target forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from specens.decoding.budgets.base import Budget, PlanContext, Policy
from specens.decoding.dense import Recording, RecordingProposer
from specens.decoding.drafter import Drafter, Proposer, close, condition, hidden_layers
from specens.decoding.merge import merge
from specens.decoding.proposals import check_draft, score_member
from specens.decoding.sampling import Sampler, TreeScores
from specens.decoding.stopping import StopRules
from specens.decoding.target.kv_cache import KVCache
from specens.decoding.target.supported import Layout
from specens.decoding.target.target import Target
from specens.decoding.timing import Stopwatch
from specens.decoding.types import Commit, Draft, Member, Plan, StepRecord, TokenTree
from specens.decoding.verify import Verifier


@dataclass(frozen=True)
class Prefilled:
    """A sequence that is ready to decode: the target's cache of its prompt, and the drafter's
    state. `seconds`: what both took. It is closed when its decoding ends, or by hand.
    """

    prompt_ids: tuple[int, ...]
    cache: KVCache
    proposer: Proposer
    seconds: float

    def close(self) -> None:
        self.cache.close()
        close(self.proposer)


@dataclass(frozen=True)
class Decoder:
    """A target, its drafter and the rules between them. Holds nothing of a sequence, so sequences
    cannot affect each other. `logit_gaps`: also record how sure the target was of every token,
    outside the measured time.
    """

    target: Target
    drafter: Drafter
    budget: Budget
    verifier: Verifier
    layout: Layout = "tree"
    logit_gaps: bool = False

    def prefill(self, prompt_ids: Sequence[int], recording: Recording | None = None) -> Prefilled:
        """Begin a sequence; with `recording`, also keep what its dense trace needs."""
        watch = Stopwatch(self.target.device)
        with ExitStack() as opened:  # closed where a drafter fails
            cache = self.target.prefill(prompt_ids, hidden_layers(self.drafter))
            opened.callback(cache.close)
            proposer = self.drafter.begin(tuple(prompt_ids))
            opened.callback(close, proposer)
            if recording is not None:
                proposer = RecordingProposer(proposer, recording)
            condition(proposer, cache.hidden)
            opened.pop_all()
        return Prefilled(tuple(prompt_ids), cache, proposer, watch.read()["step"])

    def decode(
        self, sequence: Prefilled, sampler: Sampler, stop: StopRules, policy: Policy
    ) -> Iterator[StepRecord]:
        """One record per step, until a stop rule ends the text."""
        try:
            yield from self._steps(sequence, sampler, stop, policy)
        finally:
            sequence.close()

    def _steps(
        self, sequence: Prefilled, sampler: Sampler, stop: StopRules, policy: Policy
    ) -> Iterator[StepRecord]:
        cache, proposer, members = sequence.cache, sequence.proposer, self.drafter.members
        watch = Stopwatch(self.target.device)
        # A tuple: nobody who is shown the context can change it.
        ids, number, reason = sequence.prompt_ids, 0, None
        while reason is None:
            watch.restart()
            wanted = stop.tokens_wanted(len(ids))
            plan = policy.plan(PlanContext(members, len(ids), wanted, sampler.needs_draft_probs))
            with watch.span("draft"):
                own = sampler.fork(f"step {len(ids)}")  # the same where noise is shared
                draft = proposer.propose(ids, plan, own) if plan.num_tokens else Draft()
                check_draft(draft, members, self.target.vocab_size)
            tree = policy.select(merge(draft, plan, stop.eos_ids))
            with watch.span("verify"):
                logits = self.target.score(cache, ids[-1], tree, self.layout)
                scores = TreeScores(sampler, ids, tree, logits)
                verdict = self.verifier(tree, scores)
            commit = stop.trim(ids, tree, verdict)
            cache.accept(commit.path)
            condition(proposer, cache.hidden)
            proposer.observe(commit)
            policy.observe(draft, tree, commit)
            seconds = watch.read()
            gaps = scores.logit_gaps(commit) if self.logit_gaps else ()
            step = _Step(number, len(ids), plan, draft, tree, commit, seconds, gaps)
            yield self._record(step, members, policy)
            ids += commit.token_ids
            number, reason = number + 1, commit.finish_reason

    def _record(self, step: _Step, members: Sequence[Member], policy: Policy) -> StepRecord:
        commit, tree = step.commit, step.tree
        draft_s, verify_s = step.seconds["draft"], step.seconds["verify"]
        member_s = step.draft.seconds or [draft_s / max(len(members), 1)] * len(members)
        on_path = [*(tree.owners[node] for node in commit.path), 0]
        records = [
            score_member(member, index, step.plan, step.draft, tree, commit, 1e3 * seconds)
            for index, (member, seconds) in enumerate(zip(members, member_s, strict=True))
        ]
        return StepRecord(
            step=step.number,
            context_tokens=step.context_tokens,
            num_nodes=len(tree),
            num_accepted=commit.num_accepted,
            token_ids=commit.token_ids,
            token_owners=tuple(on_path[: len(commit.token_ids)]),
            draft_ms=1e3 * draft_s,
            verify_ms=1e3 * verify_s,
            host_ms=1e3 * (step.seconds["step"] - draft_s - verify_s),
            layout=self.layout,
            finish_reason=commit.finish_reason,
            members=tuple(records),
            mode=policy.mode,
            rate=policy.rate,
            logit_gaps=step.logit_gaps,
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """All that a record is made of."""

    number: int
    context_tokens: int
    plan: Plan
    draft: Draft
    tree: TokenTree
    commit: Commit
    seconds: dict[str, float]
    logit_gaps: tuple[float, ...] = field(default=())
