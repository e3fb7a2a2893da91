"""Where models come from: names, local paths and repositories become files on this machine."""

from kestrel.hub.file import FileSource
from kestrel.hub.hf import HubSource
from kestrel.hub.locate import Located, resolve_model
from kestrel.hub.paths import inside

__all__ = ["FileSource", "HubSource", "Located", "inside", "resolve_model"]
