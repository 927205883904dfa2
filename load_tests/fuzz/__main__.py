"""Prints a case again: `python -m load_tests.fuzz SEED NUMBER`."""

from __future__ import annotations

import sys

from load_tests.fuzz.bodies import case

if __name__ == "__main__":
    asked = case(int(sys.argv[1]), int(sys.argv[2]))
    print(asked.method, asked.path, f"leaves after {asked.leaves_s} s" if asked.leaves_s is not None else "")
    sys.stdout.flush()
    sys.stdout.buffer.write(asked.content + b"\n")
