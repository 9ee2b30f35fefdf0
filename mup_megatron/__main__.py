"""`python -m mup_megatron` is `mup-megatron`."""

from mup_megatron.cli import main

if __name__ == "__main__":
    main()
