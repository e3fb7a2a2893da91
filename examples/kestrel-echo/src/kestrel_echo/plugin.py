"""What the entry point names: the family, recognised and described without torch."""

import math

from kestrel.spi import Match, ModelFamily, ModelInfo, TinyCheckpoint, hookimpl

KESTREL_SPI_VERSION = 1
SKILLS = ("generate", "query")


class EchoFamily(ModelFamily):
    """Checkpoints whose config.json says ``"model_type": "echo"``."""

    name = "echo"

    def match(self, card):
        return Match() if card.config.get("model_type") == "echo" else None

    def describe(self, card):
        facts = {"family": "echo", "architecture": "byte-level decoder of one layer", "skills": SKILLS}
        size = sum(math.prod(tensor.shape) for tensor in card.tensors.values())
        return ModelInfo(num_parameters=size, max_context=card.config["max_positions"], **facts)

    def build(self, card, ctx):
        from kestrel_echo.model import build

        return build(card, ctx)

    def tiny(self):
        from kestrel_echo.tiny import write

        return TinyCheckpoint(write=write, skills=SKILLS)


@hookimpl
def kestrel_model_families():
    return [EchoFamily()]
