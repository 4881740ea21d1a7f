"""`python -m offbeat` is `offbeat`."""

from offbeat.cli import main

if __name__ == "__main__":
    main(prog_name="offbeat")
