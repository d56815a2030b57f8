"""Hypothesis strategies for every control message, valid by the documented limits."""

from __future__ import annotations

from hypothesis import strategies as st

from kvferry.protocol.compatibility import Compatibility, KVLayout
from kvferry.protocol.ids import BlockHash, BlockNumber, Epoch, InstanceId, LeaseId, TransferId
from kvferry.protocol.messages import (
    Acquire,
    AcquireHistory,
    Admitted,
    Declined,
    DeclineReason,
    Failed,
    FailureReason,
    FirstTokenReady,
    Granted,
    Hello,
    HelloReply,
    InstanceInfo,
    InstanceQuery,
    Message,
    Posting,
    Quiet,
    Register,
    Registered,
    Release,
    Released,
    ReleaseOutcome,
    Renew,
    Renewed,
    Written,
)
from kvferry.protocol.prefill_result import FirstToken, PrefillReport, TokenLogprob

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=256)
instance_ids = names.map(InstanceId)
epochs = st.integers(0, 2**62).map(Epoch)
digests = st.binary(min_size=32, max_size=32)
durations = st.floats(0, 86_400)
counts = st.integers(0, 2**40)
visible = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != ",")
transfer_ids = st.text(visible, min_size=1, max_size=128).map(TransferId)
sizes = st.integers(1, 2**31)

layouts = st.builds(
    KVLayout,
    model_name=names,
    weights_digest=names,
    config_digest=names,
    kv_dtype=st.sampled_from(["bfloat16", "float32", "float16"]),
    num_layers=sizes,
    num_kv_heads=sizes,
    head_size=sizes,
    block_size_tokens=sizes,
    block_bytes=sizes,
    attention_backend=names,
    region_strides=st.lists(sizes, max_size=5).map(tuple),
    num_regions=sizes,
    kv_scales_digest=st.just("") | names,
    tensor_parallel_size=sizes,
    tensor_parallel_rank=st.just(0) | sizes,
)

block_numbers = st.lists(st.integers(0, 2**31 - 1).map(BlockNumber), min_size=1, max_size=20).map(
    tuple
)
logprobs = st.builds(
    TokenLogprob,
    logprob=st.floats(-100, 0),
    top=st.lists(st.tuples(st.integers(0, 2**31), st.floats(-100, 0)), max_size=3).map(tuple),
)
first_tokens = st.builds(
    FirstToken,
    token_id=st.integers(0, 2**32 - 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprob=st.none() | logprobs,
)

prefill_reports = st.builds(
    PrefillReport,
    num_cached_tokens=counts,
    num_read_back_tokens=counts,
    read_back_outcome=st.sampled_from(["", "received", "gone"]),
    read_back_s=durations,
)


compatibilities = st.none() | st.builds(
    Compatibility,
    attention_backend=names,
    kv_cache_dtype=st.just("") | names,
    rope_max_model_len=counts,
    tokenizer_digest=st.just("") | names,
    max_model_len=counts,
)


def _greeting(kind: type[Hello] | type[HelloReply]) -> st.SearchStrategy[Hello | HelloReply]:
    return st.builds(
        kind,
        instance_id=instance_ids,
        epoch=epochs,
        layout=layouts,
        transport=names,
        transport_metadata=st.binary(max_size=100),
        compatibility=compatibilities,
    )


messages: st.SearchStrategy[Message] = st.one_of(
    _greeting(Hello),
    _greeting(HelloReply),
    st.builds(
        Acquire,
        instance_id=instance_ids,
        epoch=epochs,
        holder_epoch=epochs,
        transfer_id=transfer_ids,
        num_tokens=counts,
        digest=digests,
        duration_s=durations,
        first_block=counts,
        want_block_digests=st.booleans(),
    ),
    st.builds(
        AcquireHistory,
        instance_id=instance_ids,
        epoch=epochs,
        holder_epoch=epochs,
        transfer_id=transfer_ids,
        block_hashes=st.lists(digests.map(BlockHash), min_size=1, max_size=20).map(tuple),
        min_blocks=counts,
        duration_s=durations,
        want_block_digests=st.booleans(),
    ),
    st.builds(
        Granted,
        lease_id=st.integers(0, 2**62).map(LeaseId),
        duration_s=durations,
        blocks=st.lists(st.integers(0, 2**31 - 1).map(BlockNumber), max_size=20).map(tuple),
        block_digests=st.lists(digests, max_size=3).map(tuple),
    ),
    st.builds(Renew, transfer_id=transfer_ids, holder_epoch=epochs, duration_s=durations),
    st.builds(Renewed, duration_s=durations, is_admitted=st.booleans()),
    st.builds(
        Register,
        instance_id=instance_ids,
        epoch=epochs,
        holder_epoch=epochs,
        transfer_id=transfer_ids,
        generation=counts,
        num_tokens=counts,
        digest=digests,
        first_block=counts,
        blocks=block_numbers,
        timeout_s=durations,
    ),
    st.builds(Registered, generation=counts),
    st.builds(Admitted, transfer_id=transfer_ids),
    st.builds(Posting, transfer_id=transfer_ids, generation=counts),
    st.builds(
        FirstTokenReady,
        transfer_id=transfer_ids,
        first_token=first_tokens,
        digest=digests,
        prefill_end_s=st.none() | durations,
        prefill_report=st.none() | prefill_reports,
    ),
    st.builds(
        Written,
        transfer_id=transfer_ids,
        generation=counts,
        first_block=counts,
        num_blocks=counts,
        num_tokens=counts,
        first_token=first_tokens,
        digest=digests,
        prefill_end_s=st.none() | durations,
        prefill_report=st.none() | prefill_reports,
    ),
    st.builds(
        Failed,
        transfer_id=transfer_ids,
        reason=st.sampled_from(FailureReason),
        is_quiet=st.booleans(),
        detail=st.text(st.characters(codec="utf-8"), max_size=1024),
    ),
    st.builds(Quiet, transfer_id=transfer_ids, generation=counts),
    st.builds(
        Release,
        instance_id=instance_ids,
        epoch=epochs,
        transfer_id=transfer_ids,
        holder_epoch=epochs,
        outcome=st.sampled_from(ReleaseOutcome),
    ),
    st.builds(Released, is_quiet=st.booleans()),
    st.builds(
        Declined,
        reason=st.sampled_from(DeclineReason),
        detail=st.text(st.characters(codec="utf-8"), max_size=1024),
        field=st.text(st.characters(codec="utf-8"), max_size=128),
    ),
    st.just(InstanceQuery()),
    st.builds(
        InstanceInfo,
        instance_id=instance_ids,
        epoch=epochs,
        control_address=names,
        fingerprint=digests,
        layout=layouts,
        transport=names,
        capabilities=st.lists(names, max_size=3).map(tuple),
        num_blocks=counts,
        num_free_blocks=counts,
        software_version=names,
        compatibility=compatibilities,
        receives=st.dictionaries(names, counts, max_size=3),
    ),
)
