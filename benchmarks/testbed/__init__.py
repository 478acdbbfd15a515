"""Two tiers on one machine: Swift with a worker, a client, a link between.

``two_tiers`` starts both; the processes on them are asked through ``remote``.
``worker_process`` and ``stream_client`` measure a worker without Swift,
``proxies`` adds proxy servers.
"""
