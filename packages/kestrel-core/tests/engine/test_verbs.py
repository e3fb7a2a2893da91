"""Verbs, handles and several models in one engine."""

import pytest
from engine_toys import picture

from kestrel.engine import EngineResult
from kestrel.errors import InvalidRequestError, UnknownModelError
from kestrel.spi import Call, Decoding, Request, Skill
from kestrel.testing.engines import ALPHABET
from kestrel.types import Text

TEXT = [
    ("query", {"image": picture(), "question": "what?"}, "answer"),
    ("query", {"question": "what?"}, "answer"),
    ("query", {"image": [picture(0), picture(1)], "question": "what?"}, "answer"),
    ("query", {"image": picture(), "question": "?", "spatial_refs": [[0.1, 0.2], [0, 0, 1, 1]]}, "answer"),
    ("caption", {"image": picture(), "length": "short"}, "caption"),
    ("generate", {"prompt": "say: "}, "text"),
]
OBJECTS = [
    ("point", {"image": picture(), "object": "dog"}, "points"),
    ("point", {"image": picture(), "object": ["dog", "cat"], "spatial_refs": [[0.5, 0.5]]}, "points"),
    ("detect", {"image": picture(), "object": "dog"}, "objects"),
    ("segment", {"image": picture(), "object": "dog"}, "segments"),
]


async def test_every_text_verb_answers_and_streams_the_same(toys):
    async with toys.engine() as engine:
        for skill, inputs, key in TEXT:
            result = await getattr(engine, skill)(**inputs)
            assert isinstance(result, EngineResult)
            assert result.output[key] == ALPHABET, skill
            stream = await getattr(engine, skill)(**inputs, stream=True)
            assert "".join([chunk.text async for chunk in stream]) == ALPHABET, skill


async def test_every_object_verb_answers_and_streams(toys):
    async with toys.engine() as engine:
        for skill, inputs, key in OBJECTS:
            settings = {"max_tokens": 3}
            assert (await getattr(engine, skill)(**inputs, settings=settings)).output == {key: []}
            stream = await getattr(engine, skill)(**inputs, settings=settings, stream=True)
            assert (await stream.result()).output == {key: []}


async def test_chat_answers_with_a_message(toys):
    async with toys.engine() as engine:
        messages = [{"role": "user", "content": "hello"}]
        result = await engine.chat(messages)
        assert result.output["message"] == {"role": "assistant", "content": ALPHABET}
        stream = await engine.chat(messages, stream=True)
        assert "".join([chunk.text async for chunk in stream]) == ALPHABET


async def test_a_verb_without_a_model_that_does_it_says_what_there_is(toys):
    async with toys.engine() as engine:
        with pytest.raises(InvalidRequestError, match="has no skill 'transcribe'; it has: caption, chat"):
            await engine.transcribe(b"RIFF")


async def test_the_family_decides_about_reasoning_unless_the_caller_does(toys):
    toys.family.defaults["reasoning"] = True
    async with toys.engine() as engine:
        assert "reasoning" in (await engine.query(question="what?")).output
        assert "reasoning" in (await engine.run("query", {"question": "what?"})).output
        assert "reasoning" not in (await engine.query(question="what?", reasoning=False)).output


async def test_a_handle_names_its_model_and_runs_any_skill(toys):
    async with toys.engine() as engine:
        handle = engine.model("toy")
        assert handle.model_id == "toy"
        assert set(handle.skills) == {
            "query",
            "caption",
            "point",
            "detect",
            "segment",
            "chat",
            "generate",
        }
        assert handle.supports("caption")
        assert not handle.supports("transcribe")
        assert handle.info.family == "toy"
        assert (await handle.run("query", {"question": "what?"})).output == {"answer": ALPHABET}
        stream = await handle.stream("query", question="what?", settings={"max_tokens": 3})
        assert [chunk.text async for chunk in stream] == ["a", "b", "c"]
        prepared = await handle.prepare(picture())
        assert (await handle.caption(prepared)).output == {"caption": ALPHABET}


async def test_the_first_of_several_models_is_the_default(toys):
    async with toys.engine(toys.config("one"), toys.config("two")) as engine:
        assert engine.models == ("one", "two")
        assert engine.model().model_id == "one"
        assert (await engine.query(question="?")).model_id == "one"
        assert (await engine.model("two").query(question="?")).model_id == "two"
        assert set(engine.stats()) == {"one", "two"}


async def test_an_unknown_model_is_refused_naming_those_there_are(toys):
    async with toys.engine(toys.config("one"), toys.config("two")) as engine:
        with pytest.raises(UnknownModelError, match=r"no model 'on'. Did you mean 'one'\? Choices: one, two"):
            engine.model("on")


async def test_a_model_given_twice_is_refused(toys):
    with pytest.raises(InvalidRequestError, match="'one' was given twice"):
        await toys.create(toys.config("one"), toys.config("one"))


class ShoutSkill(Skill):
    """A plugin's skill: its answer is what the model says, in capitals."""

    name = "shout"

    def parse(self, inputs, settings):
        return Call(skill=self.name, values=dict(inputs), settings=settings)

    def request(self, call, prompt, tokenizer):
        return Request(
            segments=(Text(call.values["text"]),), decoding=Decoding(max_tokens=5), settings=call.settings
        )

    async def run(self, call, infer, prompt, tokenizer):
        (completion,) = await super().run(call, infer, prompt, tokenizer)
        said = tokenizer.decode([token.id for token in completion.tokens]).upper()
        return [type(completion)(output={"shout": said}, tokens=completion.tokens)]


async def test_a_plugins_skill_runs_by_name_where_the_model_does_it(toys):
    toys.skills = (ShoutSkill(),)
    toys.family.more_skills = ("shout",)
    async with toys.engine() as engine:
        assert engine.model().supports("shout")
        result = await engine.run("shout", {"text": "say: "})
        assert result.output == {"shout": "ABCDE"}
    assert [record.skill for record in toys.records] == ["shout"]


async def test_an_unknown_skill_is_refused_naming_the_closest(toys):
    async with toys.engine() as engine:
        with pytest.raises(InvalidRequestError, match=r"no skill is called 'querry'. Did you mean 'query'\?"):
            await engine.run("querry", {"question": "?"})


@pytest.mark.parametrize(
    ("inputs", "settings", "words"),
    [
        ({"question": "?", "qestion": "?"}, {}, "takes no input 'qestion'. Did you mean 'question'"),
        ({"question": "?"}, {"temprature": 1}, "unknown setting 'temprature'. Did you mean 'temperature'"),
        ({"question": "?"}, {"max_objects": 1}, "takes no setting 'max_objects'"),
        ({"question": "?"}, {"response_format": {}}, "response_format is not supported yet"),
        ({"question": "?"}, {"adapter": "a"}, "adapter is not supported yet"),
    ],
)
async def test_unknown_inputs_and_settings_are_refused(toys, inputs, settings, words):
    async with toys.engine() as engine:
        with pytest.raises(InvalidRequestError, match=words):
            await engine.run("query", inputs, settings)


async def test_an_engine_used_on_another_loop_says_so(toys):
    import asyncio

    async def elsewhere(engine):
        await engine.query(question="?")

    async with toys.engine() as engine:
        with pytest.raises(InvalidRequestError, match="belongs to the event loop that created it"):
            await asyncio.to_thread(asyncio.run, elsewhere(engine))


async def test_skills_models_and_inputs_of_wrong_types_are_refused(toys):
    async with toys.engine() as engine:
        for name in (None, ["query"], 3):
            with pytest.raises(InvalidRequestError, match="no skill is called"):
                await engine.run(name, {})
        for inputs in (None, ["question"], "question"):
            with pytest.raises(InvalidRequestError, match="give a mapping"):
                await engine.run("query", inputs)
        with pytest.raises(UnknownModelError, match="no model"):
            engine.model(["toy"])
