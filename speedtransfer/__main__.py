"""``python -m speedtransfer``."""

from speedtransfer.cli import main

if __name__ == "__main__":
    main()
