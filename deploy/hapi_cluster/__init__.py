"""A real Swift cluster on one machine, in one directory, without root.

``Cluster.start(directory)`` runs the proxy, account, container and object
servers of the pip package, with the hapi filter and hapi-worker.  Nothing is
read from or written to /etc.  Linux only (pidfds, prctl).
"""

from hapi_cluster.cluster import Cluster
from hapi_cluster.configs import USERS
from hapi_cluster.errors import ClusterError
from hapi_cluster.settings import LAYOUTS, ClusterSettings

__all__ = ["LAYOUTS", "USERS", "Cluster", "ClusterError", "ClusterSettings"]
