"""The encoder's convolutions, which are products, against torch's."""

import pytest
import torch
import torch.nn.functional as F

from kestrel_speech.whisper.encoder import Frames, Halved


def filled(conv):
    torch.nn.init.normal_(conv.weight, std=0.3)
    torch.nn.init.normal_(conv.bias)
    return conv


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("bins", "dim", "frames"), [(1, 1, 2), (5, 8, 14), (80, 24, 100)])
def test_products_are_the_convolutions_of_each_window(count, bins, dim, frames):
    first, second = filled(Frames(bins, dim, torch.float32)), filled(Halved(dim, dim, torch.float32))
    second.pack()
    features = torch.randn(count, bins, frames)
    wanted = F.gelu(F.conv1d(features, first.weight, first.bias, padding=1))
    x_NFC = first(features)
    assert torch.allclose(x_NFC[:, 1:-1], wanted.transpose(1, 2), atol=1e-5)
    assert not x_NFC[:, [0, -1]].any(), "what a convolution sees beside a window is silence"
    wanted = F.gelu(F.conv1d(wanted, second.weight, second.bias, stride=2, padding=1))
    assert torch.allclose(second(x_NFC), wanted.transpose(1, 2), atol=1e-4)
