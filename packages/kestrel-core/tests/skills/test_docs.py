"""docs/skills.md: the skill that it shows works as written."""

import re
from pathlib import Path

import numpy as np

from kestrel.config import Settings
from kestrel.skills.text import text_request
from kestrel.spi import Decoding, PromptFormat, Skill
from kestrel.testing.fakes import ByteTokenizer
from kestrel.types import Media, Prepared, Token

PAGE = next(
    parent / "docs/skills.md" for parent in Path(__file__).parents if (parent / "docs/skills.md").is_file()
)


class TagsPrompt(PromptFormat):
    skills = frozenset({"tags"})

    def segments(self, skill, call):
        return [Media(item) for item in call.prepared]

    def decoding(self, skill, call):
        return Decoding()


def test_the_skill_on_the_page_answers_in_its_shape():
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    module: dict[str, object] = {}
    exec(compile(source, str(PAGE), "exec"), module)
    (skill,) = module["kestrel_skills"]()
    assert isinstance(skill, Skill)
    item = Prepared(kind="image", digest=bytes(32), num_positions=1, tensors={})

    call = skill.parse({"image": np.zeros((1, 1, 3), np.uint8)}, Settings()).with_prepared([item])
    reader = skill.request(call, TagsPrompt(), ByteTokenizer()).reader()
    for byte in b"cat, black cat":
        reader.feed(Token(byte))

    assert reader.finish("stop")[1] == {"tags": ["cat", "black cat"]}


def test_every_name_that_the_page_points_to_exists():
    text = PAGE.read_text(encoding="utf-8")
    folder = Path(text_request.__code__.co_filename).parent

    for name in re.findall(r"`([a-z]+\.py)`", text):
        assert (folder / name).is_file(), name
