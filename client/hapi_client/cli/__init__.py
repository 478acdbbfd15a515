"""The command line."""

import sys


def start() -> None:
    """Runs ``hapi``; without its libraries, an error names the extra."""
    try:
        from hapi_client.cli.main import main

        main()
    except ModuleNotFoundError as error:
        sys.exit(
            f"hapi: {error.name} is not installed: "
            "pip install 'swift-hapi[client]'"
        )
