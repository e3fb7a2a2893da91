"""Where models come from: names, local paths and repositories become files on this machine."""

from kestrel.hub.paths import inside

__all__ = ["inside"]
