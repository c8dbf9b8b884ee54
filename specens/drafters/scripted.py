"""Drafters with a known answer: an oracle, one that is always wrong, one that always proposes the
same, one that replays texts. They bound what drafting can win or lose, and the laws are tested with
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from specens.decoding.sampling import Sampler
from specens.decoding.target.target import Target
from specens.decoding.types import Commit, Draft, Member, Plan, TokenTree, chain_parents
from specens.errors import UserError, check_count, check_flag


def _member(name: str, num_draft_tokens: int) -> tuple[Member, ...]:
    check_count(f"{name}.num_draft_tokens", num_draft_tokens)
    return (Member(name, num_draft_tokens, num_draft_tokens),)


class Oracle:
    """Proposes what the target is about to output, by running the target itself. Costs a target
    forward per token: it shows how many steps a perfect drafter would save, not how much time.
    `wrong=True` shifts every token, so that all are wrong.
    """

    def __init__(self, num_draft_tokens: int = 4, wrong: bool = False) -> None:
        check_flag("oracle.wrong", wrong)
        self.members = _member("wrong" if wrong else "oracle", num_draft_tokens)
        self._wrong = wrong

    def bind(self, target: Target) -> None:
        self._target = target

    def begin(self, prompt_ids: Sequence[int]) -> Oracle:
        return self  # it computes everything from the context

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        ids, draft_probs = list(context_ids), []
        with self._target.prefill(ids) as cache:
            for _ in range(plan.num_tokens):
                logits = self._target.score(cache, ids[-1], TokenTree(), "tree")[0]
                cache.accept(())
                ((token, probs),) = sampler.sample(ids, logits)
                ids.append(token)
                draft_probs.append(probs)
        drafted = ids[len(context_ids) :]
        if self._wrong:
            return Draft.chain([(token + 1) % self._target.vocab_size for token in drafted])
        return Draft.chain(drafted, draft_probs)

    def observe(self, commit: Commit) -> None: ...


class Fixed:
    """Proposes the same tokens in every step; with `parents`, the same tree."""

    def __init__(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> None:
        for token in token_ids:
            check_count("fixed.token_ids", token, 0)
        shape = chain_parents(len(token_ids)) if parents is None else tuple(parents)
        self._draft = Draft(tuple(token_ids), shape)
        self.members = _member("fixed", len(self._draft))

    def bind(self, target: Target) -> None:
        if any(not 0 <= token < target.vocab_size for token in self._draft.token_ids):
            most, found = target.vocab_size - 1, self._draft.token_ids
            raise UserError(f"fixed: token_ids must lie in 0..{most}, got {found}")

    def begin(self, prompt_ids: Sequence[int]) -> Fixed:
        return self

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        return self._draft if plan.num_tokens else Draft()

    def observe(self, commit: Commit) -> None: ...


def _outputs_of(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """prompt ids -> output ids of a run folder."""
    path = folder / "prompts.parquet"
    try:
        rows = pq.read_table(path, columns=["prompt_ids", "output_ids"]).to_pylist()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"replayed: cannot read {path} ({reason}); give a run folder") from error
    done = (row for row in rows if row["prompt_ids"] and row["output_ids"])
    return {tuple(row["prompt_ids"]): row["output_ids"] for row in done}


class Replayed:
    """Proposes the continuation of whole texts that it was given: prompt -> the ids that followed
    it, from an earlier run. Abstains on other prompts, and for the rest of a prompt once the text
    has left the recording. `run` names a run folder instead.
    """

    def __init__(
        self,
        recordings: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        num_draft_tokens: int = 4,
        run: str | None = None,
    ) -> None:
        if (recordings is None) == (run is None):
            raise UserError("replayed: give the run folder to replay, drafter.run=<folder>")
        self.members = _member("replayed", num_draft_tokens)
        known = _outputs_of(Path(run)) if run is not None else recordings or {}
        self._recordings = {tuple(prompt): tuple(output) for prompt, output in known.items()}

    def bind(self, target: Target) -> None: ...

    def begin(self, prompt_ids: Sequence[int]) -> ReplayedProposer:
        return ReplayedProposer(self._recordings.get(tuple(prompt_ids), ()))


class ReplayedProposer:
    """What is left of one recording."""

    def __init__(self, rest: tuple[int, ...]) -> None:
        self._rest = rest

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        return Draft.chain(self._rest[: plan.num_tokens])

    def observe(self, commit: Commit) -> None:
        count = len(commit.token_ids)
        self._rest = self._rest[count:] if self._rest[:count] == commit.token_ids else ()
