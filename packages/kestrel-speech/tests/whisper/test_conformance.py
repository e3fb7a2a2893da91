"""The family passes the public conformance check."""

from kestrel.testing.families import check_family
from kestrel_speech import WhisperFamily


def test_the_family_keeps_the_interfaces_promises():
    report = check_family(WhisperFamily())
    assert report.skills == ("transcribe",)
    assert report.media == ("audio",)
