"""The side of chat templates that runs in a worker process, without torch: a template is a program that came with a model."""

from __future__ import annotations

from collections.abc import Mapping

LONGEST_PROMPT = 10_000_000  # characters


def start() -> None:
    """Import what renders, and bound the memory."""
    from transformers.utils import chat_template_utils

    from rlzoo.tasks.limits import limit_memory

    assert chat_template_utils
    limit_memory()


def render(template: str, special_tokens: Mapping[str, str], prompt: str) -> str:
    """The text of one user's message, up to where the answer begins; as ``tokenizer.apply_chat_template`` renders it.

    Raises:
        ValueError: it is longer than any model reads.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": prompt}]
    texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **special_tokens)
    text = str(texts[0])
    if len(text) > LONGEST_PROMPT:
        raise ValueError(f"makes a prompt of {len(text):,} characters (at most {LONGEST_PROMPT:,})")
    return text
