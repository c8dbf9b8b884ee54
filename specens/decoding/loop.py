"""THE loop: plan -> propose -> merge -> score -> verify -> commit -> observe. One step is exactly one target forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specens.decoding.budget import Budget, PlanContext, Policy
from specens.decoding.cache import KVCache
from specens.decoding.costs import CostTable
from specens.decoding.drafter import Drafter, condition, hidden_layers
from specens.decoding.merge import merge
from specens.decoding.sampling import Sampler, TreeAnswers
from specens.decoding.stopping import StopRules
from specens.decoding.target import Layout, Target
from specens.decoding.timing import Stopwatch
from specens.decoding.types import ROOT, Commit, Draft, Member, MemberRecord, Plan, StepRecord, TokenTree
from specens.decoding.verify import Verifier
from specens.errors import DrafterError


@dataclass(frozen=True)
class Decoder:
    """A target, its drafter and the rules between them. Holds nothing of a prompt, so prompts cannot leak into each other.
    `margins`: also record how sure the target was of every token, outside the measured time.
    """

    target: Target
    drafter: Drafter
    budget: Budget
    verifier: Verifier
    layout: Layout = "tree"
    margins: bool = False

    def prefill(self, prompt_ids: Sequence[int]) -> tuple[KVCache, float]:
        """Begin a prompt: the target's cache for it, and the seconds that this and the drafters' own beginning took."""
        watch = Stopwatch(self.target.device)
        cache = self.target.prefill(prompt_ids, hidden_layers(self.drafter))
        self.drafter.start(tuple(prompt_ids))
        condition(self.drafter, cache.hidden)
        return cache, watch.read()["step"]

    def decode(
        self,
        prompt_ids: Sequence[int],
        cache: KVCache,
        sampler: Sampler,
        stop: StopRules,
        policy: Policy | None = None,
    ) -> Iterator[StepRecord]:
        """One record per step, until a stop rule ends the text. `policy` is the budget at work, by default a new one that does
        not know what steps cost.
        """
        policy = policy or self.budget.begin(self.drafter.members, CostTable())
        watch = Stopwatch(self.target.device)
        ids, step, reason = tuple(prompt_ids), 0, None  # a tuple: nobody who is shown the context can change it
        while reason is None:
            watch.restart()
            wanted = stop.tokens_wanted(len(ids))
            plan = policy.plan(PlanContext(self.drafter.members, len(ids), wanted, sampler.tells_laws))
            with watch.span("draft"):
                own = sampler.fork(f"step {len(ids)}")  # the same where noise is shared: see Sampler
                draft = self.drafter.propose(ids, plan, own) if plan.num_tokens else Draft()
                check_draft(draft, self.drafter.members, self.target.vocab_size)
            tree = policy.select(merge(draft, plan, stop.eos_ids))
            with watch.span("verify"):
                logits = self.target.score(cache, ids[-1], tree, self.layout)
                answers = TreeAnswers(sampler, ids, tree, logits)
                verdict = self.verifier(tree, answers)
            commit = stop.trim(ids, tree, verdict)
            cache.accept(commit.path)
            condition(self.drafter, cache.hidden)
            self.drafter.observe(commit)
            policy.observe(draft, tree, commit)
            seconds = watch.read()
            margins = answers.margins(commit) if self.margins else ()
            yield self._record(step, len(ids), plan, draft, tree, commit, seconds, margins)
            ids += commit.token_ids
            step, reason = step + 1, commit.finish_reason

    def _record(
        self,
        step: int,
        context: int,
        plan: Plan,
        draft: Draft,
        tree: TokenTree,
        commit: Commit,
        seconds: dict[str, float],
        margins: tuple[float, ...],
    ) -> StepRecord:
        draft_s, verify_s = seconds["draft"], seconds["verify"]
        on_path = [*(tree.owners[node] for node in commit.path), 0]
        members = self.drafter.members
        member_s = draft.seconds or [draft_s / max(len(members), 1)] * len(members)
        return StepRecord(
            step=step,
            context_tokens=context,
            num_nodes=len(tree),
            num_accepted=commit.num_accepted,
            token_ids=commit.token_ids,
            token_owners=tuple(on_path[: len(commit.token_ids)]),
            draft_ms=1e3 * draft_s,
            verify_ms=1e3 * verify_s,
            host_ms=1e3 * (seconds["step"] - draft_s - verify_s),
            layout=self.layout,
            finish_reason=commit.finish_reason,
            members=tuple(
                score_member(member, index, plan, draft, tree, commit, 1e3 * member_s[index])
                for index, member in enumerate(members)
            ),
            mode=plan.mode,
            rate=plan.rate,
            margins=margins,
        )


def check_draft(draft: Draft, members: Sequence[Member], vocab_size: int) -> None:
    """Name the drafter whose proposal could not even be verified. Raises DrafterError."""
    if not isinstance(draft, Draft):
        names = ", ".join(member.name for member in members)
        raise DrafterError(f"drafter {names}: proposed {type(draft).__name__}, not a Draft")
    if any(not 0 <= owner < len(members) for owner in draft.owners) or len(draft.seconds) not in (0, len(members)):
        raise DrafterError(f"a draft of {len(members)} members has owners {draft.owners} and seconds {draft.seconds}")
    for node, token in enumerate(draft.token_ids):
        if not 0 <= token < vocab_size:
            name = members[draft.owner(node)].name
            raise DrafterError(f"drafter {name}: proposed token {token}, the target has the ids 0..{vocab_size - 1}")
        law = draft.laws[node] if draft.laws else None
        if law is not None and not _is_law(law, token, vocab_size):
            name = members[draft.owner(node)].name
            raise DrafterError(
                f"drafter {name}: the law of its token {token} is none: give probabilities [{vocab_size}] that sum to 1 and can "
                "have drawn it"
            )


def _is_law(law: Any, token: int, vocab_size: int) -> bool:
    """Whether it could be the distribution of the token. That it is the one it was drawn from, nobody can see."""
    if tuple(law.shape) != (vocab_size,):
        return False
    return bool(law[token] > 0 and law.min() >= 0 and abs(float(law.sum()) - 1) < 1e-3)


def score_member(
    member: Member, index: int, plan: Plan, draft: Draft, tree: TokenTree, commit: Commit, draft_ms: float
) -> MemberRecord:
    """Compare a member's whole proposal, pruned nodes included, with the emitted tokens."""
    own = [node for node in range(len(draft)) if draft.owner(node) == index]
    num_matched = num_tested = 0
    reached = {ROOT}  # several nodes when siblings carry the same token
    for token in commit.token_ids:
        children = [node for node in own if draft.parents[node] in reached]
        reached = {node for node in children if draft.token_ids[node] == token}
        num_tested += bool(children)
        num_matched += bool(reached)
        if not reached:
            break
    return MemberRecord(
        drafter=member.name,
        num_drafted=len(own),
        num_verified=sum(owners >> index & 1 for owners in tree.owners),
        num_matched=num_matched,
        num_tested=num_tested,
        draft_ms=draft_ms,
        num_planned=(plan.members[index] if plan.members else plan).num_tokens,
    )
