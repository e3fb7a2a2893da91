"""transcribe: the words of a recording, with times. Validation and options; how a model does it is its family's.

``{"text", "language", "task", "duration_seconds", "source_duration_seconds", "clip_start_seconds",
"clip_end_seconds", "segments"}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kestrel.config import Settings
from kestrel.errors import InvalidRequestError, closest, shown
from kestrel.skills.channels import Channels
from kestrel.skills.inputs import check_names
from kestrel.skills.ladder import LADDER_ALIASES, LADDER_NAMES, Ladder
from kestrel.skills.text import text_request
from kestrel.skills.transcribe_options import OPTION_NAMES, TranscribeOptions
from kestrel.spi.skill import Call, Request, Skill
from kestrel.types import FinishReason

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer
    from kestrel.spi.prompt import PromptFormat

__all__ = ["TranscribeSkill", "ladder_of", "options_of"]

PLAIN = frozenset("top_p max_tokens seed timeout_s priority".split())
ALIASES = {**LADDER_ALIASES, "max_new_tokens": "max_tokens"}
REFUSED = {
    "beam_size": (1,),
    "patience": (1, 1.0),
    "length_penalty": (1, 1.0),
}  # beam search, and the values that ask for none


class TranscribeSkill(Skill):
    """``Call.values``: ``audio`` (as given), ``sample_rate`` (of raw PCM, else None), ``options``
    (``TranscribeOptions``). The ladder of temperatures and its thresholds are in the settings: ``ladder_of(call)``.

    Settings may also be given among the inputs, as other engines spell them.
    """

    name = "transcribe"
    description = "the words of a recording, with times"

    def parse(self, inputs: Mapping[str, Any], settings: Settings) -> Call:
        given = dict(inputs)
        _refuse_beams(given)
        late = {name: given.pop(name) for name in list(given) if name in _SETTINGS}
        check_names(self.name, given, ("audio", "sample_rate", *OPTION_NAMES))
        values = {
            "audio": _audio(given.pop("audio", None)),
            "sample_rate": _sample_rate(given.pop("sample_rate", None)),
            "options": TranscribeOptions.parse(given),
        }
        return Call(skill=self.name, values=values, settings=_merged(settings, late))

    def request(self, call: Call, prompt: PromptFormat, tokenizer: TextTokenizer) -> Request:
        def shape(channels: Channels, reason: FinishReason) -> dict[str, Any]:
            return {"text": channels.text.strip()}

        return text_request(self.name, call, prompt, tokenizer, shape)

    def settings(self, given: Mapping[str, Any] | Settings | None, defaults: Mapping[str, Any]) -> Settings:
        ladder = Ladder.parse({name: value for name, value in defaults.items() if name in LADDER_NAMES})
        if isinstance(given, Settings):
            known = given.extra.get("ladder")
            ladder = known if isinstance(known, Ladder) else ladder
            given = {k: v for k, v in given.given().items() if k != "temperature" or ladder is not known}
        mine = {ALIASES.get(name, name): value for name, value in (given or {}).items()}
        _refuse_beams(mine)
        changes = {name: mine.pop(name) for name in list(mine) if name in LADDER_NAMES}
        if unknown := [name for name in mine if name not in PLAIN]:
            raise InvalidRequestError(
                f"{self.name} takes no setting {unknown[0]!r}. {closest(str(unknown[0]), self.setting_names())}"
            )
        plain = {name: value for name, value in defaults.items() if name in PLAIN}
        settings = Settings.from_mapping(mine, defaults=plain, allowed=PLAIN, skill=self.name)
        return _with_ladder(settings, ladder.with_(**changes))

    def setting_names(self) -> frozenset[str]:
        return PLAIN | LADDER_NAMES


_SETTINGS = PLAIN | LADDER_NAMES | ALIASES.keys()


def ladder_of(settings: Settings) -> Ladder:
    """The temperatures and thresholds of a transcription."""
    ladder = settings.extra.get("ladder")
    assert isinstance(ladder, Ladder), "settings of a transcription come from TranscribeSkill.settings"
    return ladder


def options_of(call: Call) -> TranscribeOptions:
    """The options of a transcription."""
    options = call.values["options"]
    assert isinstance(options, TranscribeOptions)
    return options


def _with_ladder(settings: Settings, ladder: Ladder) -> Settings:
    return settings.with_(temperature=ladder.temperatures[0], extra={"ladder": ladder})


def _merged(settings: Settings, late: Mapping[str, Any]) -> Settings:
    """``settings`` with those that were given among the inputs."""
    if not late:
        return settings
    named = {ALIASES.get(name, name): value for name, value in late.items()}
    rest = {name: value for name, value in named.items() if name in PLAIN}
    ladder = ladder_of(settings).with_(**{name: v for name, v in named.items() if name in LADDER_NAMES})
    return _with_ladder(settings.with_(**rest), ladder)


def _refuse_beams(given: dict[str, Any]) -> None:
    for name, allowed in REFUSED.items():
        value = given.pop(name, None)
        if value is not None and value not in allowed:
            raise InvalidRequestError(
                f"{name} is {shown(value)}, and beam search is not supported yet. Leave it out; best_of and "
                "temperature choose among several attempts."
            )


def _audio(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | list | tuple | Mapping):
        raise InvalidRequestError(
            f"audio is a {type(value).__name__}; give a path, bytes, a binary file, a one-dimensional array of PCM "
            "with sample_rate, or an async iterator of such arrays"
        )
    return value


def _sample_rate(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequestError(f"sample_rate is {shown(value)}; it must be a whole number of Hz")
    return value
