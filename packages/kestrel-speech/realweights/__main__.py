"""``python -m realweights [tiny.en] [base] [silero] [samples]``: fetch them into the cache and say where they are."""

from __future__ import annotations

import argparse
import sys

from realweights import WHISPER, NotAvailable, librivox, pangrams, recordings, silero, whisper


def main(arguments: list[str]) -> int:
    """0 when all of them are there."""
    parser = argparse.ArgumentParser(prog="python -m realweights", description=__doc__)
    choices = [*WHISPER, "silero", "samples"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(choices)}; default: all")
    names = parser.parse_args(arguments).names
    if unknown := [name for name in names if name not in choices]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(choices)}")
    failed = False
    for name in names or choices:
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
