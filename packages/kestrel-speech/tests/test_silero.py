"""The Silero model; with ``-m weights`` against the published TorchScript of the package silero-vad."""

from pathlib import Path

import numpy as np
import pytest
import realweights
import torch
from safetensors.torch import save_file

from kestrel.errors import LoadError
from kestrel_speech.silero import SileroModel, _Network
from kestrel_speech.vad import VadOptions, speech_spans

RENAMED = {
    "stft.forward_basis_buffer": "stft_conv.weight",
    **{f"encoder.{i}.reparam_conv.{k}": f"conv{i + 1}.{k}" for i in range(4) for k in ("weight", "bias")},
    **{f"decoder.rnn.{k}": f"lstm_cell.{k}" for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    **{f"decoder.decoder.2.{k}": f"final_conv.{k}" for k in ("weight", "bias")},
}


@pytest.fixture(scope="module")
def published() -> Path:
    """A folder of the published weights, from the package registry."""
    try:
        return realweights.silero()
    except realweights.NotAvailable as error:
        pytest.skip(f"Silero's weights cannot be had: {error}")


@pytest.fixture
def random_weights(tmp_path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "vad.safetensors"
    save_file(_Network().state_dict(), path)
    return path


def sound(count):
    random = np.random.default_rng(0)
    return (
        random.standard_normal(count) * np.repeat(random.uniform(0, 0.3, 20), -(-count // 20))[:count]
    ).astype(np.float32)


def probabilities(path, samples, size=10**9):
    model = SileroModel(path)
    found = [model.push(samples[at : at + size]) for at in range(0, len(samples), size)]
    return np.concatenate([*found, model.flush()])


@pytest.mark.weights
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
def test_network_agrees_with_the_published_program(published, tmp_path):
    program = torch.jit.load(published / "vad.jit")
    weights = {**dict(program._model.named_parameters()), **dict(program._model.named_buffers())}
    path = tmp_path / "same.safetensors"  # the published safetensors file holds another training's weights
    save_file({RENAMED[name]: value.detach().contiguous() for name, value in weights.items()}, path)
    samples = sound(94_000)
    whole = np.pad(samples, (0, -len(samples) % 512))
    with torch.inference_mode():
        expected = [
            program(torch.from_numpy(part), 16000).item() for part in np.split(whole, len(whole) // 512)
        ]
    np.testing.assert_allclose(probabilities(path, samples), expected, atol=1e-5)


@pytest.mark.weights
def test_published_weights_load_and_hear_no_speech_in_silence(published):
    options = VadOptions(model_path=published / "vad.safetensors")
    assert speech_spans(np.zeros(160_000, np.float32), options) == []


@pytest.mark.parametrize("size", [1000, 16000, 65536])
def test_blocks_do_not_change_the_probabilities(random_weights, size):
    samples = sound(200_000)
    np.testing.assert_array_equal(
        probabilities(random_weights, samples, size), probabilities(random_weights, samples)
    )


def test_every_frame_is_judged(random_weights):
    for count in (1, 512, 513, 65_536, 65_537):
        assert len(probabilities(random_weights, sound(count))) == -(-count // 512)


def test_other_files_are_refused(tmp_path, random_weights):
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(1)}, other)
    text = tmp_path / "text.safetensors"
    text.write_text("no weights")
    for path, reason in (
        (other, "is not Silero"),
        (text, "cannot be read"),
        (tmp_path / "absent", "cannot be read"),
    ):
        with pytest.raises(LoadError, match=reason):
            speech_spans(np.zeros(1000, np.float32), VadOptions(model_path=path))
