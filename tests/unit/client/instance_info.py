"""What a made-up instance says of itself."""

from __future__ import annotations

import msgspec

from kvferry import __version__
from kvferry.protocol.compatibility import KVLayout
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.messages import InstanceInfo

LAYOUT = KVLayout(
    model_name="tiny",
    weights_digest="weights",
    config_digest="config",
    kv_dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_size=8,
    block_size_tokens=16,
    block_bytes=4096,
    attention_backend="test",
    region_strides=(4096,),
)


def info_of(name: str, layout: KVLayout = LAYOUT, **changes: object) -> InstanceInfo:
    number = sum(name.encode())
    info = InstanceInfo(
        instance_id=InstanceId(name),
        epoch=Epoch(number),
        control_address=f"tcp://127.0.0.1:{number}",
        fingerprint=layout.fingerprint(),
        layout=layout,
        transport="nixl",
        capabilities=("pull", "push", "history"),
        num_blocks=1000,
        num_free_blocks=900,
        software_version=__version__,
    )
    return msgspec.structs.replace(info, **changes)
