"""`python -m loadgen.sim`: the simulated server without the rest of loadgen."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loadgen.sim.process import Options, run
from loadgen.types import UserError


def options(arguments: list[str] | None = None) -> Options:
    """The command line, read."""
    parser = argparse.ArgumentParser(prog="loadgen sim", description="A simulated inference server.")
    default = Options()
    parser.add_argument("--preset", default=default.preset, help="a preset's name, or a YAML file")
    parser.add_argument("--host", default=default.host)
    parser.add_argument("--port", type=int, default=default.port, help="0 takes any free one")
    parser.add_argument("--time-scale", type=float, help="how much faster than life (preset's own by default)")
    parser.add_argument("--memory-scale", type=float, help="real bytes per claimed byte")
    parser.add_argument("--memory-limit-mib", type=int, help="real memory that the claims may fill at most")
    parser.add_argument("--faults", type=Path, help="a script of faults (YAML)")
    parser.add_argument("--truth", type=Path, help="append what was truly done, as JSON lines")
    parser.add_argument("--host-root", type=Path, help="write a fixture machine's /proc and kernel log there")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--api-key-env", help="the environment variable that holds the key to ask for")
    parser.add_argument("--supervised", action="store_true", help="come back after a crash, with a new pid")
    parser.add_argument("--ready-fd", type=int, help="write the ready line to this descriptor too, and close it")
    parser.add_argument("--life", help=argparse.SUPPRESS)
    try:
        return Options(**vars(parser.parse_args(arguments)))
    except SystemExit as end:  # argparse leaves with 2; bad usage is 3 everywhere in loadgen
        raise SystemExit(3 if end.code == 2 else end.code) from None


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to end; the exit code. UserError for what the user can mend."""
    return run(options(arguments))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
