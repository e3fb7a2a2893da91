"""Media from callers: read within limits, decoded, normalised; and results drawn on pictures."""

from kestrel.media.draw import annotate
from kestrel.media.image import FORMATS, ImageSource, NormalisedImage, normalise_image
from kestrel.media.limits import MediaBudget, MediaHold, MediaLimits
from kestrel.media.remote import Fetcher

__all__ = [
    "FORMATS",
    "Fetcher",
    "ImageSource",
    "MediaBudget",
    "MediaHold",
    "MediaLimits",
    "NormalisedImage",
    "annotate",
    "normalise_image",
]
