"""The command lines of a deployment's processes. Pure; the flags are those of ``kvferry``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvferry.cluster.topology import LOOPBACK, InstanceGroup, RouterTopology, Topology

# Less than the supervisor's grace time, so that requests end with an error instead of a cut.
_ROUTER_SHUTDOWN_S = 5


def engine_arguments(
    topology: Topology, group: InstanceGroup, instance_id: str, ready_path: Path
) -> list[str]:
    """Return the arguments that serve one instance of ``group``.

    Only the router is for others to reach: an instance stays on loopback, whatever the host.
    """
    arguments = ["engine", "serve", topology.model, "--host", LOOPBACK, "--port", "0"]
    arguments += ["--instance-id", instance_id, "--ready-file", str(ready_path)]
    arguments += ["--threads", str(group.cores)]
    optional = {
        "--transport": topology.transport,
        "--dtype": topology.dtype,
        "--num-blocks": group.num_blocks,
        "--kv-cache-gib": group.kv_cache_gib,
    }
    for flag, value in optional.items():
        if value is not None:
            arguments += [flag, str(value)]
    return [*arguments, *group.arguments]


def router_arguments(
    host: str,
    router: RouterTopology,
    *,
    prefill: Sequence[str],
    decode: Sequence[str],
    ready_path: Path,
) -> list[str]:
    """Return the arguments that route over the instances at the URLs ``prefill`` and ``decode``."""
    arguments = ["router", "--host", host, "--port", str(router.port)]
    arguments += ["--ready-file", str(ready_path)]
    arguments += ["--shutdown-timeout-s", str(_ROUTER_SHUTDOWN_S)]
    optional = {"--mode": router.mode, "--decode-choice": router.decode_choice}
    for flag, value in optional.items():
        if value is not None:
            arguments += [flag, value]
    for url in prefill:
        arguments += ["--prefill", url]
    for url in decode:
        arguments += ["--decode", url]
    return [*arguments, *router.arguments]
