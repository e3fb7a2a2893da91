"""log_mel: windows of sound as the decades of their power in mel bands, as Whisper's encoder takes them.

Letters: N windows, S samples of a window, F frames, K frequencies, M mel bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["LOG_MEL", "log_mel"]

FLOOR = 1e-10  # of a power, before its logarithm
RANGE = 8.0  # decades below the loudest of the window that are kept


def log_mel(
    sound_NS: torch.Tensor, frames_N: torch.Tensor, filters_MK: torch.Tensor, hop: int = 160
) -> torch.Tensor:
    """Features [N, M, F] float32 of windows of sound [N, F · hop], whose first ``frames_N`` (int64) frames count.

    Hann windows of 2 (K − 1) samples every ``hop``, centred, the edges reflected; power, ``filters`` @ power, decades.
    What lies more than eight decades below the loudest value of its window is raised to there; then (x + 4) / 4. Frames
    from ``frames_N`` on are 0, neither loud nor silent. Sound and filters are float32; so is the transform, whatever
    the device multiplies in. Source: Radford et al. 2022, arXiv 2212.04356, section 2.2.
    """
    size, device = 2 * (filters_MK.shape[1] - 1), sound_NS.device
    num_frames = sound_NS.shape[1] // hop
    if not len(sound_NS):
        return sound_NS.new_empty(0, filters_MK.shape[0], num_frames)
    spectrum = torch.stft(
        sound_NS, size, hop, window=_hann(size, device), center=True, pad_mode="reflect", return_complex=True
    )
    power = spectrum.real[..., :-1].square() + spectrum.imag[..., :-1].square()
    decades = (filters_MK @ power).clamp_(min=FLOOR).log10_()
    loudest_N = decades.amax((1, 2), keepdim=True)
    features = torch.maximum(decades, loudest_N - RANGE).add_(4.0).div_(4.0)
    behind_NF = torch.arange(num_frames, device=device) >= frames_N[:, None]
    return features.masked_fill_(behind_NF[:, None], 0.0)


@lru_cache(maxsize=8)
def _hann(size: int, device: torch.device) -> torch.Tensor:
    return torch.hann_window(size, device=device)


_SHAPES = {  # windows, frames, bands, half a window less one, hop; frames that count
    "smallest": (1, 2, 2, 4, 5, (2,)),
    "empty": (0, 100, 80, 200, 160, ()),
    "odd, short windows": (3, 37, 7, 26, 20, (37, 0, 11)),
    "80 bands": (2, 120, 80, 200, 160, (120, 51)),
    "128 bands": (1, 300, 128, 200, 160, (299,)),
}
_SOUNDS = {"noise": 0.1, "noise that fades": 0.1, "silence": 0.0}


def _make(
    shape: tuple[int, int, int, int, int, tuple[int, ...]],
    sound: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Inputs:
    count, frames, bands, half, hop, live = shape
    made = normal(seed, (count, frames * hop), device, torch.float32, _SOUNDS[sound])
    if "fades" in sound:
        made *= torch.linspace(0.0, -5.0, frames * hop, device=device).exp2().pow(4)
    filters = _triangles(bands, half).to(device)
    return Inputs(
        args=(made, torch.tensor(live, dtype=torch.int64, device=device), filters), kwargs={"hop": hop}
    )


def _triangles(bands: int, half: int) -> torch.Tensor:
    """Filters [bands, half + 1]: triangles over the frequencies, the low ones narrow."""
    edges = torch.linspace(0.0, 1.0, bands + 2).square() * half
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    at = torch.arange(half + 1)
    return torch.minimum((at - left) / (centre - left), (right - at) / (right - centre)).clamp(min=0.0)


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="log_mel",
            name=f"{name}, {sound}",
            make=partial(_make, shape, sound),
            facts={"bands": shape[2], "size": 2 * shape[3], "hop": shape[4]},
        )
        for name, shape in _SHAPES.items()
        for sound in _SOUNDS
    ]


LOG_MEL = Op(
    name="log_mel",
    reference=log_mel,
    cases=_cases,
    # A transform in float32 errs by 1e-7 of the loudest amplitude; eight decades of power below, that is 1e-3 of it.
    tolerances={"float32": Tolerance(2e-3, 0.0)},
    facts={"bands": "M", "size": "2 (K − 1)", "hop": "as the argument", "dtype": "of sound and features"},
)
