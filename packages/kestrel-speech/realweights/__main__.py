"""``python -m realweights [tiny.en] [base] [silero] [samples]``: fetch them into the cache and say where they are."""

from __future__ import annotations

import sys

from realweights import WHISPER, NotAvailable, librivox, pangrams, recordings, silero, whisper


def main(names: list[str]) -> int:
    """0 when all of them are there."""
    failed = False
    for name in names or [*WHISPER, "silero", "samples"]:
        try:
            if name == "samples":
                for sample in (*librivox(), *recordings(), *pangrams()):
                    print(sample.path)
            elif name == "silero":
                print(silero())
            else:
                print(whisper(name))
        except NotAvailable as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
