"""Prompts that a model does not support are rejected with the reason."""

import pytest

from rlzoo.core.errors import UserError
from rlzoo.models.pretrained import load_pretrained
from rlzoo.rollout.prompts import encode_prompt


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
    [("{{ raise_exception('no system message') }}", "no system message"), ("{% for %}", "TemplateSyntaxError")],
)
def test_a_template_error_is_reported_in_one_line(tokenizer, template, reason):
    with pytest.raises(UserError, match=rf"^the model's chat template fails for the prompt '1\+1=': .*{reason}"):
        templated(tokenizer, template)
