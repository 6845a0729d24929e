"""``python -m nnx`` is the same as the command ``nnx``."""

from nnx_checkpoint.cli.command import main

if __name__ == "__main__":
    main()
