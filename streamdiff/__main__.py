"""`python -m streamdiff` is the `streamdiff` command."""

from streamdiff.cli.main import run

if __name__ == "__main__":
    run()
