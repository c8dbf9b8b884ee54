"""A turn of a question as ids. They are made in one place, `render`, once: target, drafters and
baseline all get the `Prompt`'s ids, never text to tokenise again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specens.errors import UserError, one_line
from specens.prompts.sources import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ready for the target, which is fed `token_ids` and nothing else; `text` is the user's turn
    ("" for raw ids).
    """

    id: str
    category: str
    text: str
    token_ids: tuple[int, ...]


def next_prompt(
    question: Question,
    answers: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    chat: bool | None,
) -> Prompt:
    """The prompt of turn `len(answers)` of a question, with the target's own earlier answers in the
    history.

    `chat`: see `render`. Raises ValueError when the question has no such turn, UserError when it
    cannot be rendered.
    """
    turn, names = len(answers), question.prompt_names
    if turn >= len(names):
        raise ValueError(
            f"question {question.id!r} has {len(names)} turns, so turn {turn} does not exist"
        )
    prompt_id = names[turn]
    if question.token_ids:
        return Prompt(prompt_id, question.category, "", question.token_ids)
    messages: list[tuple[str, str]] = []
    for text, answer in zip(question.turns, answers, strict=False):
        messages += [("user", text), ("assistant", answer)]
    messages.append(("user", question.turns[turn]))
    token_ids = render(tokenizer, messages, chat=chat)
    if not token_ids:
        raise UserError(f"prompt {prompt_id!r} has no tokens after tokenisation: give it some text")
    return Prompt(prompt_id, question.category, question.turns[turn], token_ids)


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]], *, chat: bool | None
) -> tuple[int, ...]:
    """Token ids of a conversation of (role, content) messages, up to where the target's answer
    begins.

    `chat` None uses the tokenizer's chat template if it has one, True insists on it (UserError
    without one), False takes raw text: the contents with nothing put between them, as a base model
    would have continued them.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(
            f"prompts.chat=true, but the tokenizer {name!r} has no chat template: use "
            "prompts.chat=false"
        )
    if chat is False or not has_template:
        return _encode_raw(tokenizer, "".join(content for _, content in messages))
    return _encode_chat(tokenizer, messages)


def _encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]]
) -> tuple[int, ...]:
    from jinja2 import TemplateError

    conversation = [{"role": role, "content": content} for role, content in messages]
    try:
        # Ids straight from the template: its text tokenised again would get a second BOS.
        encoded: Any = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False
        )
    except (TemplateError, ValueError) as error:
        raise UserError(
            f"the tokenizer's chat template refused a conversation ({one_line(error)}): use "
            "prompts.chat=false"
        ) from error
    return tuple(int(token) for token in encoded)


def _encode_raw(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    bos = tokenizer.bos_token
    # typed by the user: the tokenizer would add a second one
    has_bos = bool(bos) and text.startswith(str(bos))
    encoded: Any = tokenizer(text, add_special_tokens=not has_bos)["input_ids"]
    return tuple(int(token) for token in encoded)
