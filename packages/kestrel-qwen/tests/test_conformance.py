"""The family passes the public conformance check."""

from kestrel.spi import TinyCheckpoint
from kestrel.testing.families import check_family
from kestrel_qwen import QwenFamily
from kestrel_qwen.tiny import TINY_CONFIG, TINY_MOE, write_tiny


def test_the_family_keeps_the_interfaces_promises():
    report = check_family(QwenFamily())
    assert set(report.skills) == {"query", "caption", "point", "detect", "chat", "generate"}
    assert set(report.media) == {"image", "video"}


class Variant(QwenFamily):
    """The family with another tiny checkpoint."""

    def __init__(self, config, skills):
        self._tiny = TinyCheckpoint(write=lambda path, seed: write_tiny(path, seed, config), skills=skills)

    def tiny(self):
        return self._tiny


def test_so_does_a_mixture_of_experts():
    check_family(Variant(TINY_MOE, ("query",)))


def test_so_does_a_text_only_model():
    text = TINY_CONFIG["text_config"] | {"tie_word_embeddings": True}
    assert check_family(Variant(text, ("query", "chat"))).media == ()
