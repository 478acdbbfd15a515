"""Building blocks of the experiments: contenders, data, links, workloads.

``client_process`` trains HAPI's jobs; ``contenders`` asks it and the opponents
alike; ``lineup`` tunes the opponents; ``together`` runs several at once.
"""
