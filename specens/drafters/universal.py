"""Drafting across tokenizers: a language model with another vocabulary than the target's proposes
by text.

The context's text becomes the drafter's own tokens, the model writes on, and what it wrote becomes
tokens of the target. The idea is universal assisted generation (Timor et al. 2025, arXiv
2502.05202).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specens.decoding.sampling import Sampler
from specens.decoding.target.kv_cache import KVCache
from specens.decoding.target.supported import (
    context_limit,
    refuse_training_mode,
    refuse_unsupported,
)
from specens.decoding.target.target import Target
from specens.decoding.types import Commit, Draft, Member, Plan
from specens.drafters.lm import ModelSource, feed
from specens.errors import UserError, check_count
from specens.models.load import LoadedModel

LOOK_BEHIND = 16
"""Tokens before a boundary that are encoded along with what follows it. What stands further back
does not change with it.
"""
MAX_OWN_TOKENS = 8
"""Own tokens written, at most, for each token proposed: a vocabulary of bytes needs four or five
for a word.
"""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes bytes to that are no character (yet)."""
MAX_INCOMPLETE = 3
"""Bytes, so tokens at most, of a UTF-8 character that is not complete."""


class Universal:
    """Drafts a chain: its model's most likely text, in the target's tokens. It does not take part
    in sampling: its tokens cannot be sampled with the target's noise, which is keyed by the
    target's ids. `model` is a source to load from, or a model in memory, with its `tokenizer`.
    """

    def __init__(
        self,
        model: ModelSource | PreTrainedModel,
        num_draft_tokens: int = 4,
        name: str = "universal",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        check_count(f"{name}.num_draft_tokens", num_draft_tokens)
        if not isinstance(model, PreTrainedModel):
            model.check()
        elif tokenizer is None:
            raise UserError(
                f"drafter {name}: a model in memory comes without a tokenizer; give tokenizer=... "
                "with it"
            )
        self._source, self._tokenizer = model, tokenizer
        # No context_limit: a budget counts the target's tokens, and this model's context its own.
        self.members = (Member(name, num_draft_tokens, num_draft_tokens, coupled_only=True),)
        self._loaded: LoadedModel | None = None
        self.lock = threading.Lock()
        """Fast tokenizers refuse to encode in two threads at once."""

    def facts(self) -> dict[str, Any]:
        return self._loaded.facts() if self._loaded is not None else {}

    def bind(self, target: Target) -> None:
        name = self.members[0].name
        if target.tokenizer is None:
            raise UserError(
                f"drafter {name}: it drafts by text, and the target has no tokenizer; give "
                "tokenizer=... with it"
            )
        if isinstance(self._source, PreTrainedModel):
            refuse_training_mode(self._source, name)
            self._loaded = LoadedModel.of(self._source, self._tokenizer)
        else:
            self._loaded = self._source.load_for(target)
        self.loaded, own = self._loaded, self._tokenizer or self._loaded.tokenizer
        if own is None:
            raise UserError(
                f"drafter {name}: it drafts by text, and its model has no tokenizer; give "
                "tokenizer=..."
            )
        refuse_unsupported(self.loaded.model)
        self.own, self.theirs, self.vocab_size = own, target.tokenizer, target.vocab_size
        self.ends = end_ids(self.loaded.model, own)
        self.limit = context_limit(self.loaded.model)

    def begin(self, prompt_ids: Sequence[int]) -> UniversalProposer:
        return UniversalProposer(self, prompt_ids)


class UniversalProposer:
    """One sequence. Its cache holds a prefix of the text so far in its own tokens. Only the end of
    the text is encoded again in a step, and where that changes own tokens, the cache is cut back.
    """

    def __init__(self, drafter: Universal, prompt_ids: Sequence[int]) -> None:
        self._drafter = drafter
        self._transcript = Transcript(drafter.theirs, drafter.own)
        self._cache = KVCache()
        self._fed: list[int] = []
        with drafter.lock:
            self._transcript.follow(prompt_ids)
        own_ids = self._transcript.ids
        if len(own_ids) > 1 and self._room(own_ids) >= 0:
            self._feed(own_ids[:-1])

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        with self._drafter.lock:
            kept = self._transcript.follow(context_ids)
        own_ids = self._transcript.ids
        # The last own token is always fed again: its logits are the next forward's.
        same = min(common_prefix(self._fed, own_ids, kept), len(own_ids) - 1)
        self._fed = self._fed[: max(same, 0)]
        self._cache.rollback(len(self._fed))
        # Tokens of a character that is not complete yet: unread, so the model has to write that
        # character again.
        num_read = self._transcript.num_read
        begun = list(context_ids[num_read:])
        theirs = self._drafter.theirs
        before = decode(theirs, context_ids[max(num_read - LOOK_BEHIND, 0) : num_read])
        num_tokens = min(plan.num_tokens, plan.num_nodes)
        token_ids = self._write(own_ids, before, len(begun) + num_tokens) if own_ids else []
        if token_ids[: len(begun)] != begun:
            return Draft()
        token_ids = token_ids[len(begun) :][:num_tokens]
        vocab_size = self._drafter.vocab_size
        beyond = (index for index, token in enumerate(token_ids) if token >= vocab_size)
        return Draft.chain(token_ids[: next(beyond, None)])

    def _write(self, own_ids: Sequence[int], before: str, num_tokens: int) -> list[int]:
        """Write on after `own_ids`, until what was written is `num_tokens` of the target's tokens
        or more: those tokens. `before` is the end of the context's text.
        """
        ids, token_ids = list(own_ids), []
        for num_written in range(1, num_tokens * MAX_OWN_TOKENS + 1):
            token = self._next_token(ids)
            if token is None or token in self._drafter.ends:
                break
            ids.append(token)
            text = added_text(self._drafter.own, ids, len(own_ids))
            if text is None:
                break
            with self._drafter.lock:
                whole = text.partition(INCOMPLETE)[0]
                token_ids = continuation(self._drafter.theirs, before, whole)
            # Where own tokens are shorter than the target's, the last of these is hardly ever whole
            # before another one has begun.
            enough = num_tokens + (num_written > num_tokens)
            if len(token_ids) >= enough or INCOMPLETE in text[:-MAX_INCOMPLETE]:
                break
        return token_ids

    def _next_token(self, ids: Sequence[int]) -> int | None:
        """The most likely own token after `ids`; None when this model's context is full, or it
        cannot read the text.
        """
        logits = self._feed(ids) if self._room(ids) > 0 else None
        # Padded embeddings have rows that no token belongs to.
        return None if logits is None else int(logits[: len(self._drafter.own)].argmax())

    def _feed(self, ids: Sequence[int]) -> Any:
        logits = feed(self._drafter.loaded, self._cache, ids)
        self._fed = list(ids[: self._cache.length])
        return logits

    def _room(self, ids: Sequence[int]) -> int:
        """Own tokens that still fit behind `ids`; below 0 when not even those fit."""
        limit = self._drafter.limit
        return 1 if limit is None else limit - len(ids)

    def observe(self, commit: Commit) -> None:
        """Nothing: `propose` reads whatever the context has grown by."""


class Transcript:
    """The text of a growing context of the target's in another tokenizer's ids, `ids`, behind the
    BOS that it adds by itself.

    `num_read` tokens of the context are in it: those of a character that is not complete yet are
    left for later.
    """

    def __init__(self, theirs: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> None:
        self._theirs, self._own = theirs, own
        self._their_bos, self._bos = own_bos(theirs), own_bos(own)
        self.ids: list[int] = []
        self.num_read = 0

    def follow(self, context_ids: Sequence[int]) -> int:
        """Read what is new in the context: how many of the first `ids` stayed as they were. Encodes
        the end of the text, and all of it only where that end cannot be told from the rest.
        """
        begin, self.num_read = self.num_read, num_complete(self._theirs, context_ids)
        added = (
            added_text(self._theirs, context_ids[: self.num_read], begin)
            if 0 < begin <= self.num_read
            else None
        )
        kept = None if added is None else self._append(added)
        if kept is not None:
            return kept
        skip = (
            len(self._their_bos)
            if tuple(context_ids[: len(self._their_bos)]) == self._their_bos
            else 0
        )
        self.ids = [
            *self._bos,
            *encode(self._own, decode(self._theirs, context_ids[skip : self.num_read])),
        ]
        return 0

    def _append(self, added: str) -> int | None:
        """Put text at the end, which may change the ids before it: how many stayed. None, and
        nothing is done, where the look-behind by itself is not encoded as it is in the whole text.
        """
        behind = self.ids[max(len(self._bos), len(self.ids) - LOOK_BEHIND) :]
        text = decode(self._own, behind)
        known, both = encode(self._own, text), encode(self._own, text + added)
        num_same = common_prefix(known, both)
        changed = known[num_same:]
        if changed != behind[len(behind) - len(changed) :]:
            return None
        kept = len(self.ids) - len(changed)
        self.ids[kept:] = both[num_same:]
        return kept


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of `ids`, special tokens as they are written."""
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of `text`, nothing put around them."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def own_bos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The BOS that a tokenizer puts before every text by itself, if any: no part of the text."""
    bos = tokenizer.bos_token_id
    adds = (
        bos is not None
        and tokenizer.encode("a")[:1] == [bos]
        and encode(tokenizer, "a")[:1] != [bos]
    )
    return (int(bos),) if adds else ()  # pyright: ignore[reportArgumentType]


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a model's text: its EOS, and every other special token, whose name would be no
    text of the target's.
    """
    named = getattr(model.generation_config, "eos_token_id", None)
    eos = [named] if isinstance(named, int) else named or []
    return frozenset({*eos, *tokenizer.all_special_ids})


def num_complete(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
    """How many of the first `ids` end with a whole character. All of them if the bytes at the end
    will never be one.
    """
    for end in range(len(ids), max(len(ids) - MAX_INCOMPLETE - 1, 0), -1):
        if not decode(tokenizer, ids[max(end - LOOK_BEHIND, 0) : end]).endswith(INCOMPLETE):
            return end
    return len(ids)


def added_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], begin: int) -> str | None:
    """The text that `ids[begin:]` add to the text before them; None where they change it."""
    first = max(begin - LOOK_BEHIND, 0)
    before, both = decode(tokenizer, ids[first:begin]), decode(tokenizer, ids[first:])
    return both[len(before) :] if both.startswith(before) else None


def continuation(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """The ids that `text` adds to those of `before`. Where the two would share a token, which
    cannot be had any more, `text` is encoded for itself; behind a line break if that keeps apart,
    as some tokenizers put a space before a text's first word.
    """
    for context in (before, "\n"):
        known, both = encode(tokenizer, context), encode(tokenizer, context + text)
        if both[: len(known)] == known:
            return both[len(known) :]
    return encode(tokenizer, text)


def common_prefix(left: Sequence[int], right: Sequence[int], start: int = 0) -> int:
    """Length of the common prefix of two sequences that are known to be equal up to `start`."""
    num_same, shorter = min(start, len(left), len(right)), min(len(left), len(right))
    while num_same < shorter and left[num_same] == right[num_same]:
        num_same += 1
    return num_same
