"""Media from callers: read within limits, decoded, normalised; and results drawn on pictures."""

from kestrel.media.audio import MAX_SECONDS, SAMPLE_RATE, AudioSource, AudioStream, open_audio
from kestrel.media.digest import begin_digest, content_digest
from kestrel.media.draw import annotate
from kestrel.media.image import FORMATS, Decode, ImageSource, NormalisedImage, load_decoders, normalise_image
from kestrel.media.limits import MediaBudget, MediaHold, MediaLimits
from kestrel.media.live import LiveAudio, LiveSource
from kestrel.media.processes import DecoderProcesses
from kestrel.media.remote import Fetcher
from kestrel.media.video import NormalisedVideo, VideoSource, load_video

__all__ = [
    "FORMATS",
    "MAX_SECONDS",
    "SAMPLE_RATE",
    "AudioSource",
    "AudioStream",
    "Decode",
    "DecoderProcesses",
    "Fetcher",
    "ImageSource",
    "LiveAudio",
    "LiveSource",
    "MediaBudget",
    "MediaHold",
    "MediaLimits",
    "NormalisedImage",
    "NormalisedVideo",
    "VideoSource",
    "annotate",
    "begin_digest",
    "content_digest",
    "load_decoders",
    "load_video",
    "normalise_image",
    "open_audio",
]
