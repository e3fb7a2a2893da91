"""What bytes look like that are not the media asked for, for error messages."""

from __future__ import annotations

__all__ = ["describe"]

_SIGNATURES = {
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a ZIP archive or office document",
    b"\x1f\x8b": "gzip data",
    b"%!PS": "PostScript",
    b"RIFF": "RIFF audio or video",
    b"\x1aE\xdf\xa3": "Matroska or WebM video",
    b"ID3": "MP3 audio",
    b"OggS": "Ogg audio",
    b"fLaC": "FLAC audio",
    b"8BPS": "a Photoshop file",
    b"\x80": "a pickle or other binary data",
}
_BRANDS = {
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"mif1": "HEIF",
    b"msf1": "HEIF",
    b"avif": "AVIF",
    b"avis": "AVIF",
}


def describe(raw: bytes) -> str:
    """What ``raw`` seems to be: "text", "a PDF document", "unknown data beginning with 00 01 …"."""
    if raw[4:8] == b"ftyp":
        brand = _BRANDS.get(raw[8:12])
        return f"{brand}, which this Pillow cannot decode" if brand else "MP4 or similar video"
    for signature, name in _SIGNATURES.items():
        if raw.startswith(signature):
            return name
    head = raw[:256].lstrip()
    if head[:1] == b"<":
        return "SVG, HTML or another kind of markup"
    if head and all(byte in b"\t\r\n" or byte >= 0x20 for byte in head) and _is_utf8(raw[:256]):
        return "text"
    return f"unknown data beginning with {raw[:8].hex(' ')}"


def _is_utf8(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4  # a character may be cut at the end
    return True
