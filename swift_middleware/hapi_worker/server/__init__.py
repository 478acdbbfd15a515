"""The worker's process: WSGI app, unix socket, systemd, shutdown.

In: HTTP on a unix socket, signals. Out: responses, status, exit codes.
"""
