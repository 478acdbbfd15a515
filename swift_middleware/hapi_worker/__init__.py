"""The daemon that owns the devices of a storage host.

One long-lived process keeps models resident, reads samples from a unix
socket, runs the pushed-down prefix of a model on them and streams the
features back.  It holds no Swift credentials and opens no network socket.
"""
