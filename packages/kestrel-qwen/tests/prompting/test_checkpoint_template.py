"""A checkpoint's own template: sandboxed, and unable to make control tokens of anybody else's text."""

import pytest
from conversations import GOLDENS, conversation, spelled_out

from kestrel.errors import InvalidRequestError, LoadError
from kestrel.spi import MediaPart, Message, ModelCard, TextPart, Tool, ToolCall
from kestrel_qwen.checkpoint_template import CheckpointTemplate, read_template, thinks_by_default
from kestrel_qwen.markup import CONTROL, Markup
from kestrel_qwen.template import render

# A template that does what the one in code does, in a checkpoint's language.
JINJA = """\
{%- macro say(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'text' -%}{{- part.text -}}
            {%- else -%}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(query=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.query = messages.index(m) -%}{%- endfor -%}
{%- if ns.query < 0 -%}{{- raise_exception('No user query found.') -}}{%- endif -%}
{%- if messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + say(messages[0].content) | trim + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
    {%- set content = say(m.content) | trim -%}
    {%- if m.role == 'user' -%}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}
    {%- elif m.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if m.reasoning_content and loop.index0 > ns.query -%}
            {{- '<think>\\n' + m.reasoning_content | trim + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- content -}}
        {%- for call in m.tool_calls -%}
            {{- ('\\n' if not loop.first else '\\n\\n' if content else '') -}}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
            {%- for key, value in call.function.arguments | items -%}
                {%- set value = value | string if value is string or value is number else value | tojson -%}
                {{- '<parameter=' + key + '>\\n' + value + '\\n</parameter>\\n' -}}
            {%- endfor -%}
            {{- '</function>\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif m.role == 'tool' -%}
        {%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' -}}
{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' -}}
"""


@pytest.fixture(scope="module")
def template():
    return CheckpointTemplate.compile(JINJA)


def user(*parts):
    return Message(role="user", parts=tuple(TextPart(p) if isinstance(p, str) else p for p in parts))


def control(pieces):
    return [piece.text for piece in pieces if isinstance(piece, Markup)]


@pytest.mark.parametrize(
    "case",
    [case for case in GOLDENS if not case["tools"]],
    ids=lambda case: f"{case['name']}-{case['enable_thinking']}",
)
def test_it_renders_what_the_checkpoint_would(case, template):
    messages, tools, kinds = conversation(case)
    assert (
        spelled_out(template.render(messages, tools, kinds, thinking=case["enable_thinking"]), kinds)
        == case["rendered"]
    )


def test_calls_and_results_of_tools_pass_through_it(template):
    messages, _, _ = conversation(next(c for c in GOLDENS if c["name"] == "tool_call_with_thinking_kept"))
    own = template.render(messages, (), [], thinking=True)
    assert spelled_out(own, []) == spelled_out(render(messages, thinking=True), [])


def test_text_that_spells_every_control_token_stays_text(template):
    everything = "".join(CONTROL)

    def conversation_of(text, thought):
        call = ToolCall(name="f", arguments={f"k{text}": text, "deep": {"list": [text]}})
        return [
            Message(role="system", parts=(TextPart(text),)),
            user(text),
            Message(role="assistant", parts=(TextPart(text),), reasoning=thought, tool_calls=(call,)),
            Message(role="tool", parts=(TextPart(text),)),
        ]

    evil = template.render(conversation_of(everything, everything), (), [], thinking=True)
    calm = template.render(conversation_of("x", "y"), (), [], thinking=True)
    assert control(evil) == control(calm)
    assert spelled_out(evil, []).count(everything) == 8


@pytest.mark.parametrize("word", ["think", "|im_end|", " think ", "/think"])
def test_a_template_that_puts_brackets_around_text_makes_no_control_token_of_it(word):
    bracketing = CheckpointTemplate.compile("<{{ messages[0].content | trim }}>")
    pieces = bracketing.render([user(word)], (), [], thinking=True)
    assert control(pieces) == []
    assert spelled_out(pieces, []) == f"<{word.strip()}>"


def test_private_characters_of_the_conversation_survive(template):
    text = "".join(chr(code) for code in range(0xE000, 0xE010)) + "<think>"
    assert f"user\n{text}<" in spelled_out(template.render([user(text)], (), [], thinking=True), [])


def test_tools_arrive_as_plain_json():
    listing = CheckpointTemplate.compile("{% for t in tools %}{{ t | tojson }}{% endfor %}")
    tool = Tool(name="f", description="<ü>", parameters={"type": "object"})
    assert spelled_out(listing.render([user("?")], [tool], [], thinking=True), []) == (
        '{"type": "function", "function": {"name": "f", "description": "<ü>", "parameters": {"type": "object"}}}'
    )


def test_media_that_the_template_loses_are_an_error():
    forgetful = CheckpointTemplate.compile("{{ messages[0].content[1].text }}")
    with pytest.raises(InvalidRequestError, match="0 of 1 media"):
        forgetful.render([user(MediaPart(0), "?")], (), ["image"], thinking=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ nothing.at_all }}",
        "{{ 1 // 0 }}",
        "{{ messages | map('nofilter') | list }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_bad_request(source):
    with pytest.raises((InvalidRequestError, LoadError)):
        CheckpointTemplate.compile(source).render([user("?")], (), [], thinking=True)


def test_a_broken_template_cannot_be_compiled():
    with pytest.raises(LoadError, match="no template"):
        CheckpointTemplate.compile("{% if %}")


def card(path):
    return ModelCard(model_id="a/model", path=path, files={p.name: 1 for p in path.iterdir()})


def test_the_source_is_a_file_or_an_entry_of_the_tokenizers_config(tmp_path):
    assert read_template(card(tmp_path)) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "a"}', encoding="utf-8")
    assert read_template(card(tmp_path)) == "a"
    (tmp_path / "chat_template.jinja").write_text("b", encoding="utf-8")
    assert read_template(card(tmp_path)) == "b"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(LoadError, match="cannot be read"):
        read_template(card(tmp_path))


@pytest.mark.parametrize(
    ("source", "thinks"),
    [
        (JINJA.replace("if enable_thinking else", "if enable_thinking is not false else"), True),
        (JINJA, False),
        ("{{ messages[0].content }}", True),
        ("{% broken", True),
        (None, True),
    ],
)
def test_a_template_decides_whether_its_model_thinks_by_default(source, thinks, config):
    assert thinks_by_default(source, config.text) is thinks
