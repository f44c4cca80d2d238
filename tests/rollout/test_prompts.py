"""Prompts that a model does not support are rejected with the reason; a chat template cannot hang or fill the memory."""

import time

import pytest

from rlzoo.core.errors import UserError
from rlzoo.models.pretrained import load_pretrained
from rlzoo.rollout import prompts
from rlzoo.rollout.prompts import TEMPLATES, encode_prompt


@pytest.fixture(scope="module")
def tokenizer():
    return load_pretrained("embedded")[1]


def templated(tokenizer, template):
    tokenizer.chat_template = template
    return encode_prompt(tokenizer, "1+1=", chat_template=True)


def test_a_template_is_rendered_as_the_tokenizer_would(tokenizer):
    template = "{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    ids = templated(tokenizer, template)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], add_generation_prompt=True, tokenize=False)
    assert ids == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took longer than 2 s"),
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{{ 'a' * 11000000 }}", "the prompt has 11,000,000 characters"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{% for %}", "TemplateSyntaxError"),
    ],
)
def test_a_template_that_does_not_end_or_makes_too_much_is_one_line(tokenizer, monkeypatch, template, reason):
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 2.0)
    begin = time.monotonic()
    with pytest.raises(UserError, match=reason) as caught:
        templated(tokenizer, template)
    assert time.monotonic() - begin < 60
    assert str(caught.value).startswith("the model's chat template fails for the prompt '1+1=': ")
    # another worker renders it
    assert templated(tokenizer, "{{ messages[0].content }}") == tuple(tokenizer("1+1=")["input_ids"])
    assert TEMPLATES.process is not None
