"""Run the command line: ``speedtransfer``, and ``python -m speedtransfer``."""

import sys


def main() -> None:
    """Run the command line and exit; Ctrl-C is one line also while the command line is still being imported."""
    try:
        from speedtransfer.cli import main as run
    except KeyboardInterrupt:
        print("speedtransfer: aborted", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
