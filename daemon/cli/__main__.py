"""``python -m weightd.daemon.cli``: the command line where its script is not on the path."""

from weightd.daemon.cli.app import main

main()
