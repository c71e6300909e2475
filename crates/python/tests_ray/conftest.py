"""A cluster on this machine: a head and two nodes, which have an engine each."""

from pathlib import Path

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

DEMO = Path(__file__).resolve().parents[3] / "models" / "tales-qwen3moe-Q4_K_M.gguf"
PORT = 18431
ADDRESS = f"http://127.0.0.1:{PORT}"
STORE = 100 << 20


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_CACHE_HOME", "HF_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        common = {"num_cpus": 2, "object_store_memory": STORE}
        cluster = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": False})
        for _ in range(2):
            # Each part has a resource of its own, so that all can be tested on one cluster.
            cluster.add_node(**common, resources={"forebay": 1, "batches": 1, "stages": 1})
        ray.init(address=cluster.address)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="session")
def address(cluster):
    """The address of two replicas."""
    from forebay.ray import app

    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
    arguments = {"model": str(DEMO), "replicas": "2", "resource": "forebay", "memory": "512M", "device": "cpu", "queue": "8"}
    serve.run(app(arguments), name="forebay")
    return ADDRESS
