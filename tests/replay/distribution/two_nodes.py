"""A Ray cluster of two nodes at 127.0.0.1, which the tests run in a separate process.

    python two_nodes.py

The program prints the cluster's address. It kills the second node when stdin has a line, and ends
when stdin is closed. The second node's processes have `SECOND_NODE` in their environment.
"""

import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # stay on this machine

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "include_log_monitor": False}


def main() -> None:
    head = {**NODE, "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(**NODE, env_vars={"SECOND_NODE": "1"})
    print(cluster.address, flush=True)
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
        print("killed", flush=True)
        sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
