"""The published tokenizer as Kestrel loads it, against the encoder that it comes from."""

import pytest

from kestrel_qwen.markup import CONTROL

TEXTS = [
    "Hello, world! It's 3.14 o'clock.",
    "  two  spaces\n\n\nand\ttabs \r\n",
    "Grüße aus Zürich, naïve café",
    "नमस्ते दुनिया",
    "こんにちは世界。你好，世界！",
    "مرحبا بالعالم",
    "สวัสดีชาวโลก",
    "😀👩‍👩‍👧 emoji",
    "def f(x):\n    return {'a': [1, 2]}\n",
    "e\u0301 composes",
]
IDS = {
    "<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046, "<|vision_start|>": 248053,
    "<|vision_end|>": 248054, "<|image_pad|>": 248056, "<|video_pad|>": 248057, "<tool_call>": 248058,
    "</tool_call>": 248059, "<think>": 248068, "</think>": 248069,
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_text_has_the_ids_of_the_published_encoder(text, published, encoding):
    from published import marked

    assert published.encode(text) == marked(encoding, text)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_give_their_text_back(text, published):
    import unicodedata

    assert published.decode(published.encode(text)) == unicodedata.normalize("NFC", text)


def test_control_tokens_have_their_published_ids_and_no_text(published):
    assert {name: published.token_id(name) for name in IDS} == IDS
    assert all(published.token_bytes(i) == b"" for i in IDS.values())


@pytest.mark.parametrize("name", CONTROL)
def test_no_text_becomes_a_control_token(name, published):
    for text in (name, f"a{name}b", f" {name}\n"):
        ids = published.encode(text)
        assert max(ids) < min(IDS.values())
        assert published.decode(ids) == text
