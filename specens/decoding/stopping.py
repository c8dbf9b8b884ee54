"""When a text ends, decided token by token, in the order in which AR decoding would have met the
rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from specens.decoding.types import Commit, TokenTree, Verdict

StopTest = Callable[[Sequence[int]], bool]
"""All ids so far, prompt included -> whether a stop string ends with the last one."""


@dataclass(frozen=True)
class StopRules:
    """The rules of one prompt. `max_length` and `context_limit` count prompt and output together,
    in tokens.
    """

    max_length: int
    eos_ids: Collection[int] = ()
    context_limit: int | None = None
    stop_test: StopTest | None = None

    def tokens_wanted(self, num_committed: int) -> int:
        """How many more tokens may be emitted."""
        limit = (
            self.max_length
            if self.context_limit is None
            else min(self.max_length, self.context_limit)
        )
        return limit - num_committed

    def reason(self, ids: Sequence[int]) -> str | None:
        """Why the text ends with the last of `ids`, or None: an end-of-sequence id, a stop string,
        the length, the context. The first that holds names the reason; which of them holds at a
        token does not depend on how it was drafted.
        """
        if ids[-1] in self.eos_ids:
            return "eos"
        if self.stop_test is not None and self.stop_test(ids):
            return "stop"
        if len(ids) >= self.max_length:
            return "length"
        if self.context_limit is not None and len(ids) >= self.context_limit:
            return "context"
        return None

    def trim(self, context_ids: Sequence[int], tree: TokenTree, verdict: Verdict) -> Commit:
        """What the verdict emits before a rule stops it: ids, text and counts are all taken from
        this.
        """
        tokens = [*(tree.token_ids[node] for node in verdict.path), verdict.target_token]
        ids = list(context_ids)
        for count, token in enumerate(tokens, start=1):
            ids.append(token)
            reason = self.reason(ids)
            if reason is not None:
                return Commit(verdict.path[:count], tuple(tokens[:count]), reason)
        return Commit(verdict.path, tuple(tokens))
