"""The scheme ``hf:``: repositories of the Hugging Face hub, in the hub's own cache, safetensors only.

``HF_HOME``, ``HF_TOKEN`` and the rest are huggingface_hub's to read. Files lie in its cache and nowhere else.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kestrel.errors import KestrelError, LoadError, UnknownModelError
from kestrel.hub.progress import progress_bars
from kestrel.spi import Source

__all__ = ["HubSource"]

log = logging.getLogger(__name__)

# What a model is read from. Never a pickle (.bin, .pt) and never code (.py).
WANTED = ("*.safetensors", "*.json", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository; ``size`` in bytes."""

    name: str
    size: int


class HubSource(Source):
    """``hf:owner/name``. ``endpoint`` and ``cache_dir`` replace huggingface_hub's own."""

    scheme = "hf"

    def __init__(self, *, endpoint: str | None = None, cache_dir: Path | None = None) -> None:
        self._endpoint = endpoint
        self._cache_dir = cache_dir

    def locate(
        self, reference: str, *, revision: str | None, offline: bool, progress: Progress | None = None
    ) -> Path:
        """The snapshot directory of ``reference`` at ``revision`` (None: its main branch, as it is now).

        When the hub cannot be reached, a complete snapshot in the cache is used and said so in the log.
        """
        if offline:
            return self._cached(reference, revision)
        try:
            return self._downloaded(reference, revision, progress)
        except KestrelError:
            raise
        except (
            Exception
        ) as error:  # huggingface_hub raises errors of its own, of its HTTP library and of the system
            problem = _explained(error, reference, revision)
            if problem is not None:
                raise problem from error
            return self._cached_instead(reference, revision, error)

    def _downloaded(self, repo: str, revision: str | None, progress: Progress | None) -> Path:
        from huggingface_hub import HfApi, snapshot_download

        found = HfApi(endpoint=self._endpoint).model_info(repo, revision=revision, files_metadata=True)
        files = [RemoteFile(file.rfilename, file.size or 0) for file in found.siblings or ()]
        wanted = _wanted(repo, files)
        self._fetch(repo, str(found.sha), wanted, progress)
        return Path(
            snapshot_download(
                repo,
                revision=revision,  # by name, so that the cache learns where the branch stands
                allow_patterns=[_literally(file.name) for file in wanted],
                cache_dir=self._cache_dir,
                endpoint=self._endpoint,
                tqdm_class=progress_bars(lambda delta: None),
            )
        )

    def _fetch(self, repo: str, sha: str, wanted: Sequence[RemoteFile], progress: Progress | None) -> None:
        from huggingface_hub import try_to_load_from_cache

        def is_here(file: RemoteFile) -> bool:
            cached = try_to_load_from_cache(repo, file.name, cache_dir=self._cache_dir, revision=sha)
            return isinstance(cached, str)

        missing = [file for file in wanted if not is_here(file)]
        total = sum(file.size for file in missing)
        self._check_space(repo, total)
        done = 0
        for file in missing:
            self._fetch_one(repo, sha, file, done, total, progress)
            done += file.size
            if progress is not None:
                progress(file.name, done, total)

    def _fetch_one(
        self, repo: str, sha: str, file: RemoteFile, done: int, total: int, progress: Progress | None
    ) -> None:
        from huggingface_hub import hf_hub_download

        received = 0

        def advance(delta: int) -> None:
            nonlocal received
            received = min(received + delta, file.size)
            if progress is not None:
                progress(file.name, done + received, total)

        bars: dict[str, Any] = {"tqdm_class": progress_bars(advance)} if _takes_bars(hf_hub_download) else {}
        try:
            hf_hub_download(
                repo, file.name, revision=sha, cache_dir=self._cache_dir, endpoint=self._endpoint, **bars
            )
        except Exception as error:
            if _is_disk_full(error):
                raise self._full(repo, f"{file.name} of {file.size} bytes") from error
            raise

    def _check_space(self, repo: str, total: int) -> None:
        free = shutil.disk_usage(_existing(self._cache())).free
        if total > free:
            raise self._full(repo, f"{total} bytes, with {free} free")

    def _full(self, repo: str, what: str) -> LoadError:
        return LoadError(
            f"downloading {repo!r} into {self._cache()} needs room for {what}: the disk is full. "
            "Free space there, or put the cache elsewhere with HF_HOME"
        )

    def _cache(self) -> Path:
        from huggingface_hub import constants

        return Path(self._cache_dir or constants.HF_HUB_CACHE)

    def _cached(self, repo: str, revision: str | None) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            folder = Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=["config.json"],
                    cache_dir=self._cache_dir,
                    local_files_only=True,
                )
            )
        except (LocalEntryNotFoundError, HFValidationError) as error:
            raise UnknownModelError(
                f"{_named(repo, revision)} is not in the cache {self._cache()}, and offline nothing is downloaded. "
                f"Run `kestrel pull {repo}` with a connection"
            ) from error
        if not any(folder.glob("*.safetensors")):
            raise UnknownModelError(
                f"{_named(repo, revision)} is in the cache without weights, and offline nothing is downloaded. "
                f"Run `kestrel pull {repo}` with a connection"
            )
        return folder

    def _cached_instead(self, repo: str, revision: str | None, error: Exception) -> Path:
        try:
            folder = self._cached(repo, revision)
        except UnknownModelError:
            raise LoadError(
                f"{_named(repo, revision)} cannot be downloaded: {type(error).__name__}: {error}. "
                "Check the connection and retry"
            ) from error
        log.warning("the hub cannot be reached (%s); using %s from the cache", type(error).__name__, folder)
        return folder


def _wanted(repo: str, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The files to fetch, the largest last: a snapshot with weights has everything else."""
    top = [file for file in files if "/" not in file.name]
    wanted = [file for file in top if any(fnmatchcase(file.name, pattern) for pattern in WANTED)]
    if any(file.name.endswith(".safetensors") for file in wanted):
        return sorted(wanted, key=lambda file: (file.name.endswith(".safetensors"), file.size))
    pickles = [file.name for file in top if any(fnmatchcase(file.name, pattern) for pattern in PICKLES)]
    if pickles:
        raise LoadError(
            f"{repo!r} holds its weights as pickle files only ({', '.join(pickles)}), which can run any code when "
            "read; nothing was downloaded. Choose a repository that has safetensors, or convert them"
        )
    raise LoadError(
        f"{repo!r} holds no *.safetensors file; nothing was downloaded. Check the repository's name"
    )


def _explained(error: Exception, repo: str, revision: str | None) -> KestrelError | None:
    """The error to show for what the hub answered; None when it did not answer."""
    from huggingface_hub import errors

    if _is_disk_full(error):
        return LoadError(f"downloading {repo!r} failed: the disk is full ({error}). Free space in the cache")
    if isinstance(error, errors.GatedRepoError):
        return LoadError(
            f"{repo!r} is gated: its authors ask you to accept their terms. Accept them on its page at the hub, "
            "then set HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UnknownModelError(f"{repo!r} has no revision {revision!r}. Check the commit, tag or branch")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UnknownModelError(
            f"the hub has no repository {repo!r}, or it is private. Check the spelling; for a private one set HF_TOKEN"
        )
    if isinstance(error, errors.HFValidationError):
        return UnknownModelError(f"{repo!r} cannot be the name of a repository: {error}. Write owner/name")
    return None


def _is_disk_full(error: BaseException) -> bool:
    return any(
        (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT))
        or "no space left on device" in str(cause).lower()
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _takes_bars(download: Callable[..., Any]) -> bool:
    import inspect

    return "tqdm_class" in inspect.signature(download).parameters  # releases before 1.0 report no bytes


def _literally(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _existing(path: Path) -> Path:
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def _named(repo: str, revision: str | None) -> str:
    return f"{repo!r}" if revision is None else f"{repo!r} at revision {revision!r}"
