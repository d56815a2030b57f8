"""kvferry inside vLLM: the KV connector that ``kv_connector_module_path`` names.

``FerryConnector`` is imported when it is asked for: the parts that decide need no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.vllm_plugin.connector import FerryConnector as FerryConnector

__all__ = ["FerryConnector"]


def __getattr__(name: str) -> object:
    if name != "FerryConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.vllm_plugin.connector import FerryConnector

    return FerryConnector
