"""The Python client: `from headrace.client import HeadraceClient`. Needs grpcio and protobuf only."""

from headrace.client.client import AsyncGenerateStream, AsyncHeadraceClient, GenerateStream, HeadraceClient
from headrace.client.errors import GatewayUnreachable
from headrace.client.values import (
    COLD,
    Accepted,
    BlockEntry,
    BlockListing,
    CacheOptions,
    Done,
    Event,
    Eviction,
    GenerateResult,
    Message,
    MissExplanation,
    MissReason,
    Prompt,
    Sampling,
    Selector,
    ServedModel,
    StoreNodeStatus,
    SystemStatus,
    WorkerStatus,
)
from headrace.core.block import CacheSource
from headrace.core.generation import EvictReport, HolderStat, TokenDelta, Usage

__all__ = [
    "COLD",
    "Accepted",
    "AsyncGenerateStream",
    "AsyncHeadraceClient",
    "BlockEntry",
    "BlockListing",
    "CacheOptions",
    "CacheSource",
    "Done",
    "Event",
    "Eviction",
    "EvictReport",
    "GatewayUnreachable",
    "GenerateResult",
    "GenerateStream",
    "HeadraceClient",
    "HolderStat",
    "Message",
    "MissExplanation",
    "MissReason",
    "Prompt",
    "Sampling",
    "Selector",
    "ServedModel",
    "StoreNodeStatus",
    "SystemStatus",
    "TokenDelta",
    "Usage",
    "WorkerStatus",
]
