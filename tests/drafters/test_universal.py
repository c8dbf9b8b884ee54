"""Drafting across tokenizers: what the drafter reads, what it writes, and that it proposes the text
that it means.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import ScriptedTarget, decode, trained_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.sampling import Sampler
from specens.decoding.target.supported import LAYOUTS
from specens.decoding.target.target import Target
from specens.decoding.types import Commit, Draft, Plan, Share
from specens.drafters import universal
from specens.drafters.lm import LanguageModel, feed
from specens.drafters.none import NoDrafter
from specens.drafters.universal import (
    LOOK_BEHIND,
    Transcript,
    Universal,
    continuation,
    num_complete,
)
from specens.errors import UserError
from specens.models.load import TargetCopy
from specens.models.tiny import byte_tokenizer, random_model
from specens.prompts.sources import DEMO_FILE

TEXT = "the brown fox reads the review of the hotel, and then the whole story about the river"
KINDS = ("bytes", "bpe", "words", "bos")


def tokenizer_of(kind: str):
    return byte_tokenizer() if kind == "bytes" else trained_tokenizer(kind)


def ids_of(kind: str, text: str) -> list[int]:
    return tokenizer_of(kind).encode(text, add_special_tokens=False)


def own_prefix(kind: str) -> list[int]:
    return [2] if kind == "bos" else []


def model_for(kind: str, **config):
    return random_model(vocab_size=len(tokenizer_of(kind)), **config)


def bound(
    kind: str, target_kind: str, num_draft_tokens: int = 4, vocab_size: int | None = None, **config
) -> Universal:
    """A drafter with a random model and a tokenizer of `kind`, for a target with one of
    `target_kind`.
    """
    drafter = Universal(model_for(kind, **config), num_draft_tokens, tokenizer=tokenizer_of(kind))
    target = ScriptedTarget(lambda prefix: 0, vocab_size or len(tokenizer_of(target_kind)))
    target.tokenizer = tokenizer_of(target_kind)
    drafter.bind(target)  # pyright: ignore
    return drafter


def target_that_writes(whole: list[int], kind: str) -> ScriptedTarget:
    """Its greedy text is `whole`, and then ends."""

    def next_token(prefix):
        return whole[len(prefix)] if len(prefix) < len(whole) else 1

    target = ScriptedTarget(next_token, len(tokenizer_of(kind)))
    target.tokenizer = tokenizer_of(kind)
    return target


@pytest.fixture
def writes(monkeypatch):
    """Makes the drafter's model go on with `text`, whatever it really predicts; then it ends.
    Returns the ids of every forward.
    """

    def script(kind: str, text: str, **spelled):
        """`spelled`: own ids to write after the text that is the key, instead of the usual ones."""
        tokenizer, calls, whole = tokenizer_of(kind), [], ids_of(kind, text)

        def scripted(loaded, cache, ids):
            logits = feed(loaded, cache, ids)
            if logits is None:
                return None
            calls.append(list(ids))
            begin = list(ids[len(own_prefix(kind)) :])
            written, rest = tokenizer.decode(begin), []
            if whole[: len(begin)] == begin:
                rest = whole[len(begin) :]
            elif text.startswith(written):
                rest = continuation(tokenizer, written, text[len(written) :])
            token = (spelled.get(written) or rest or [1])[0]
            return torch.nn.functional.one_hot(torch.tensor(token), logits.shape[-1]).float()

        monkeypatch.setattr(universal, "feed", scripted)
        return calls

    return script


def plan(num_tokens: int) -> Plan:
    return Plan.of((Share(num_tokens, num_tokens),))


def proposal(drafter: Universal, context_ids, num_tokens: int = 4) -> list[int]:
    """What a new sequence proposes; a chain always."""
    proposer = drafter.begin(context_ids[:-1] or context_ids)
    draft = proposer.propose(tuple(context_ids), plan(num_tokens), Sampler())
    assert draft == Draft.chain(draft.token_ids)
    return list(draft.token_ids)


# Lossless


@pytest.mark.parametrize(
    "kinds",
    [("bytes", "bpe"), ("bpe", "bytes"), ("words", "bos"), ("bytes", "words")],
    ids="-".join,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_is_plain_decodings_greedy_and_sampled(kinds, layout):
    theirs, own = kinds
    target = Target(model_for(theirs, seed=1), tokenizer_of(theirs))
    drafter = Universal(model_for(own, seed=2), tokenizer=tokenizer_of(own))
    num_drafted = 0
    for text, seed in itertools.product((TEXT, "a", "🎉"), (None, 5)):
        prompt = ids_of(theirs, text)
        plain, _ = decode(target, NoDrafter(), prompt, 12, seed=seed)
        output, steps = decode(target, drafter, prompt, 12, layout=layout, seed=seed)
        assert output == plain
        num_drafted += sum(step.num_nodes for step in steps)
    assert num_drafted > 0


@pytest.mark.parametrize(
    "kinds", [*itertools.product(KINDS, ("bytes", "bpe", "bos"))], ids="-".join
)
def test_the_right_text_is_accepted_whole_in_any_tokens(kinds, writes):
    theirs, own = kinds
    whole = ids_of(theirs, TEXT)
    target = target_that_writes(whole, theirs)
    writes(own, TEXT)
    drafter = Universal(model_for(own), 4, tokenizer=tokenizer_of(own))
    output, steps = decode(target, drafter, whole[:3], len(whole) - 3)
    assert output == whole[3:]
    accepted = [step.num_accepted for step in steps[:-1]]
    drafted = [step.num_nodes for step in steps[:-1]]
    # Now and then the model reads a word's first half and spells the rest otherwise; that costs a
    # step, not the text.
    assert sum(accepted) >= 0.85 * sum(drafted), (accepted, drafted)
    assert sum(drafted) >= 3.5 * len(drafted)


def test_with_the_targets_own_tokenizer_it_proposes_what_the_language_model_does():
    """Ids below 97 are printable ASCII (and three special tokens, which end a text here)."""
    other = random_model(vocab_size=97, seed=2)
    target = Target(random_model(vocab_size=97, seed=1), byte_tokenizer())
    ours, theirs = Universal(other, 5, tokenizer=byte_tokenizer()), LanguageModel(other, 5)
    for drafter in (ours, theirs):
        drafter.bind(target)
    context, num_proposed = tuple(ids_of("bytes", "Hello(x)")), 0
    proposers = [drafter.begin(context) for drafter in (ours, theirs)]
    for _ in range(8):
        drafts = [proposer.propose(context, plan(5), Sampler()) for proposer in proposers]
        proposed, expected = (list(draft.token_ids) for draft in drafts)
        until_special = list(itertools.takewhile(lambda token: token > 2, expected))
        assert proposed == until_special
        num_proposed += len(proposed)
        commit = Commit((), (*expected[:2], 7))
        for proposer in proposers:
            proposer.observe(commit)
        context += tuple(token if token > 2 else 9 for token in commit.token_ids)
        if not all(token > 2 for token in commit.token_ids):
            break
    assert num_proposed > 10


# Boundaries


@pytest.mark.parametrize("theirs", ["bpe", "words"])
def test_a_merge_over_the_boundary_leaves_the_context_and_gives_the_rest(theirs, writes):
    """The context ends inside a word that the target's tokenizer would have written in fewer
    tokens.
    """
    tokenizer = tokenizer_of(theirs)
    the, t = ids_of(theirs, "the"), ids_of(theirs, "a t")
    he = ids_of(theirs, "xhe")[len(ids_of(theirs, "x")) :]
    assert ids_of(theirs, "a the")[: len(t)] != t, "they do merge"
    assert tokenizer.decode(he) == "he" and he[0] not in (the[0], t[-1])
    assert continuation(tokenizer, "a t", "he") == he
    writes("bytes", "a the fox")
    assert proposal(bound("bytes", theirs), t)[: len(he)] == he


def test_what_starts_a_new_word_is_encoded_with_its_context():
    """Without it, this tokenizer would put a second space in front."""
    words = tokenizer_of("words")
    expected = ids_of("words", "the review")[len(ids_of("words", "the")) :]
    assert continuation(words, "the", " review") == expected
    assert continuation(words, "the", "n") != ids_of("words", "n"), "no space within a word"
    vocabulary = {"[UNK]": 0, "play": 1, "ing": 2, "##ing": 3}
    pieces = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=pieces)
    assert continuation(fast, "play", "ing") == [3]


def test_the_last_token_is_proposed_when_the_next_has_begun(writes):
    """Bytes for the model, words for the target: half a word would be a wrong token. One byte of
    the next token is nearly always enough to know.
    """
    tokenizer = tokenizer_of("bpe")
    whole = ids_of("bpe", TEXT)
    writes("bytes", TEXT)
    drafter, right = bound("bytes", "bpe"), []
    for begin, num_tokens in itertools.product(range(2, 20), (3, 4, 5)):
        if tokenizer.decode(whole[:begin]) + " " not in tokenizer.decode(whole[: begin + 1]):
            continue  # a word's inside: the context may have been cut otherwise than the text
        expected = whole[begin : begin + num_tokens]
        right.append(proposal(drafter, whole[:begin], num_tokens) == expected)
    assert len(right) > 10 and sum(right) >= 0.85 * len(right), right


# Characters of several tokens


@pytest.mark.parametrize("own", ["bytes", "bpe"])
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_character_that_the_context_has_only_begun_is_finished(own, cut, writes):
    """The model cannot read half an emoji. It writes it anew, and what the context has of it is not
    proposed again.
    """
    whole = ids_of("bytes", "a🎉b")
    writes(own, "a🎉b")
    assert num_complete(byte_tokenizer(), whole[: 1 + cut]) == 1
    assert proposal(bound(own, "bytes"), whole[: 1 + cut]) == whole[1 + cut :][:4]
    writes(own, "a🎈b")  # another one, which agrees in three bytes of four
    expected = ids_of("bytes", "a🎈b")[1 + cut :]
    assert proposal(bound(own, "bytes"), ids_of("bytes", "a🎈b")[: 1 + cut]) == expected[:4]
    writes(own, "abcdefgh")
    assert proposal(bound(own, "bytes"), whole[: 1 + cut]) == (
        [] if cut else ids_of("bytes", "bcde")
    )


def test_a_draft_stops_before_bytes_that_are_no_character(writes):
    broken = ids_of("bytes", "🎉")[:1]
    writes("bytes", "ab", ab=broken)  # "ab", half an emoji, and the end
    assert proposal(bound("bytes", "bytes"), ids_of("bytes", "a")) == ids_of("bytes", "b")
    endless = {"ab\ufffd" + "x" * count: ids_of("bytes", "x") for count in range(40)}
    calls = writes("bytes", "ab", ab=broken, **endless)
    assert proposal(bound("bytes", "bytes"), ids_of("bytes", "a")) == ids_of("bytes", "b")
    assert len(calls) < 8, "nothing behind it can be proposed, so nothing more is written"
    writes("bytes", "a", a=broken)
    assert proposal(bound("bytes", "bytes"), ids_of("bytes", "a")) == []


def test_a_context_of_bytes_that_are_no_text_is_read_all_the_same():
    garbage = [200, 201, 150, 199, 180, 202] * 4
    transcript = Transcript(byte_tokenizer(), tokenizer_of("bpe"))
    for end in range(1, len(garbage) + 1):
        transcript.follow(garbage[:end])
        assert end - 3 <= transcript.num_read <= end
    assert transcript.ids


# Reading a growing context


@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, KINDS)], ids="-".join)
def test_a_growing_context_is_read_as_the_whole_text_would_be(kinds, monkeypatch):
    """Over the demo prompts, in uneven steps; after the start only the text's end is encoded."""
    theirs, own = map(tokenizer_of, kinds)
    encoded, encode = [], universal.encode

    def recording(tokenizer, text):
        encoded.append(text)
        return encode(tokenizer, text)

    monkeypatch.setattr(universal, "encode", recording)
    text = " ".join(DEMO_FILE.read_text(encoding="utf-8").split())[:1500] + " naïve 🎉 café"
    ids = theirs.encode(text, add_special_tokens=False)
    transcript, begin, expected = Transcript(theirs, own), 20, []
    transcript.follow(ids[:begin])
    encoded.clear()
    steps = zip(range(20, 10**6, 3), itertools.cycle((1, 5, 3)), strict=False)
    for end in (min(begin + step, len(ids)) for begin, step in steps):
        before = list(transcript.ids)
        kept = transcript.follow(ids[:end])
        assert transcript.ids[:kept] == before[:kept]
        read = theirs.decode(ids[: transcript.num_read])
        expected = [*own_prefix(kinds[1]), *own.encode(read, add_special_tokens=False)]
        assert own.decode(transcript.ids) == own.decode(expected), f"after {end}"
        if end == len(ids):
            break
    assert transcript.num_read == len(ids)
    assert transcript.ids == expected
    assert max(map(len, encoded)) < 10 * LOOK_BEHIND


def test_a_bos_stands_in_front_once_and_is_no_text():
    own = Transcript(trained_tokenizer("bos"), trained_tokenizer("bos"))
    context = trained_tokenizer("bos").encode("the fox")
    assert context[0] == 2
    own.follow(context)
    assert own.ids == context
    other = Transcript(trained_tokenizer("bos"), byte_tokenizer())
    other.follow(context)
    assert other.ids == ids_of("bytes", "the fox")
    marked = Transcript(byte_tokenizer(), trained_tokenizer("bos"))
    # A mark of the chat template, which this tokenizer does not add by itself.
    marked.follow([0, *ids_of("bytes", "user")])
    assert marked.ids == [2, *ids_of("bos", "<s>user")]


def test_chat_marks_of_the_target_are_read_as_text_and_proposed_as_tokens(writes):
    writes("bpe", "<s>a</s><s>b")
    context = [0, *ids_of("bytes", "a")]
    assert proposal(bound("bpe", "bytes"), context) == [1, 0, *ids_of("bytes", "b")]


def test_a_member_that_was_idle_for_some_steps_is_never_stale():
    context, drafter = ids_of("bpe", TEXT), bound("bytes", "bpe")
    scheduled, idle = (drafter.begin(context[:4]) for _ in range(2))
    for end in range(5, len(context), 2):
        draft = scheduled.propose(tuple(context[:end]), plan(3), Sampler())
        if end % 3 == 0:
            assert idle.propose(tuple(context[:end]), plan(3), Sampler()) == draft
    another = drafter.begin(context[:7]).propose(tuple(context[:8]), plan(3), Sampler())
    assert list(another.token_ids) == proposal(bound("bytes", "bpe"), context[:8], 3)


def test_sequences_at_once_share_nothing():
    drafter, context = bound("bytes", "bpe"), ids_of("bpe", TEXT)
    texts = (context, context[7:])
    proposers = [drafter.begin(text[:4]) for text in texts]
    for end in range(5, 15):
        for text, proposer in zip(texts, proposers, strict=True):
            draft = proposer.propose(tuple(text[:end]), plan(3), Sampler())
            assert list(draft.token_ids) == proposal(bound("bytes", "bpe"), text[:end], 3)


@pytest.mark.parametrize("kinds", [("bytes", "bpe"), ("bpe", "words")], ids="-".join)
def test_the_cache_is_a_fresh_forwards_and_only_new_tokens_are_fed(kinds, monkeypatch):
    theirs, own = kinds
    errors, fed = [], []

    def checked(loaded, cache, ids):
        fed.append(len(ids) - cache.length)
        logits = feed(loaded, cache, ids)
        with torch.inference_mode():
            fresh = loaded.model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1]
        errors.append(float((logits - fresh).abs().max()))
        assert cache.length == len(ids)
        return logits

    monkeypatch.setattr(universal, "feed", checked)
    target = Target(model_for(theirs, seed=1), tokenizer_of(theirs))
    drafter = Universal(model_for(own, seed=2).double(), tokenizer=tokenizer_of(own))
    decode(target, drafter, ids_of(theirs, TEXT), 24)
    assert len(errors) > 24 and max(errors) < 1e-10
    assert max(fed[1:]) < LOOK_BEHIND + 8 and sum(fed[1:]) < 4 * len(fed)


# No draft


def test_the_drafters_own_end_is_never_proposed(writes):
    drafter = bound("bpe", "bytes")
    writes("bpe", "a the")
    assert proposal(drafter, ids_of("bytes", "a")) == ids_of("bytes", " the")
    assert proposal(drafter, ids_of("bytes", "a th")) == ids_of("bytes", "e")
    assert proposal(drafter, ids_of("bytes", "a the")) == []


def test_with_a_full_context_of_its_own_it_abstains(writes):
    """40 bytes fit. The target counts fewer tokens, so no budget could know."""
    calls = writes("bytes", TEXT)
    whole = ids_of("bpe", TEXT)
    target = target_that_writes(whole, "bpe")
    drafter = Universal(model_for("bytes", max_position_embeddings=40), tokenizer=byte_tokenizer())
    output, steps = decode(target, drafter, whole[:2], len(whole) - 2)
    assert output == whole[2:]
    assert steps[0].num_nodes > 0 and not any(step.num_nodes for step in steps[-5:])
    assert max(map(len, calls)) <= 40
    assert len(tokenizer_of("bpe").decode(whole)) > 40 > len(whole[: steps[0].context_tokens])
    calls.clear()
    assert proposal(drafter, whole) == [] and not calls  # the prompt alone is too long


def test_ids_beyond_either_vocabulary_are_not_used(writes):
    whole = ids_of("bpe", TEXT)
    beyond = next(index for index in range(6, len(whole)) if whole[index] > max(whole[:index]))
    writes("bytes", TEXT)
    drafter = bound("bytes", "bpe", vocab_size=whole[beyond])
    assert proposal(drafter, whole[:4], 10) == whole[4:beyond][:10]
    narrow = Universal(random_model(vocab_size=60), tokenizer=byte_tokenizer())
    narrow.bind(Target(model_for("bpe"), tokenizer_of("bpe")))
    assert proposal(narrow, whole[:4]) == []  # its model knows no lower-case letters


def test_a_padded_row_of_logits_is_no_token():
    wide = random_model(vocab_size=300)
    with torch.no_grad():
        wide.lm_head.weight[259:] *= 100  # what no token belongs to is always likeliest
    drafter = Universal(wide, tokenizer=byte_tokenizer())
    drafter.bind(Target(model_for("bpe"), tokenizer_of("bpe")))
    proposer = drafter.begin([5, 6])
    texts = (ids_of("bytes", TEXT[:length]) for length in range(5, 9))
    assert all(proposer._next_token(ids) < 259 for ids in texts)  # pyright: ignore


def test_a_target_token_costs_only_so_many_own_ones(writes, monkeypatch):
    monkeypatch.setattr(universal, "MAX_OWN_TOKENS", 2)
    calls = writes("bytes", "the the the")
    assert proposal(bound("bytes", "bpe"), ids_of("bpe", "the"), 2) == ids_of("bpe", " the")
    assert len(calls) <= 1 + 2 * 2, "one forward of the prompt, two for each token of the draft"


def test_after_an_empty_text_it_abstains():
    drafter = bound("bpe", "bos")
    assert proposal(drafter, [2]) == []


def test_its_member_is_for_the_coupled_verifier_only():
    (member,) = bound("bytes", "bpe", 3).members
    assert (member.name, member.num_draft_tokens, member.num_draft_nodes) == ("universal", 3, 3)
    assert member.coupled_only and member.context_limit is None


# Bad input


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Universal(random_model()), "drafter universal: .* tokenizer="),
        (
            lambda: Universal(random_model(), 0, tokenizer=byte_tokenizer()),
            r"universal\.num_draft_tokens=0",
        ),
        (lambda: Universal(TargetCopy("int3")), "quantization=int3"),
    ],
)
def test_what_can_be_known_to_be_wrong_is_refused_at_once(make, line):
    with pytest.raises(UserError, match=line) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_target_without_a_tokenizer_and_a_model_without_one_are_refused():
    class Nameless:
        def check(self): ...

        def load_for(self, target):
            return universal.LoadedModel.of(random_model())

    tokenizer = byte_tokenizer()
    target = Target(random_model(), tokenizer)
    with pytest.raises(UserError, match=r"drafter universal: .* the target has no tokenizer"):
        Universal(random_model(), tokenizer=tokenizer).bind(Target(random_model()))
    with pytest.raises(UserError, match=r"drafter universal: .* its model has no tokenizer"):
        Universal(Nameless()).bind(target)
    with pytest.raises(UserError, match="universal is in training mode"):
        Universal(random_model().train(), tokenizer=tokenizer).bind(target)


def test_a_short_plan_is_kept():
    target = Target(model_for("bytes", seed=1), byte_tokenizer())
    drafter = Universal(model_for("bpe", seed=2), 6, tokenizer=tokenizer_of("bpe"))
    budget = FixedBudget(max_nodes=2)
    _, steps = decode(target, drafter, ids_of("bytes", TEXT), 12, budget=budget)
    assert max(step.num_nodes for step in steps) <= 2
    assert all(member.num_drafted <= 2 for step in steps for member in step.members)
