"""An engine whose KV decode reads, with vLLM's own NIXL connector (`channel: {kind: vllm}`)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import msgspec
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.engine.protocol import EngineError, Output, RequestRefused, WorkerSpans
from deployments.engine.vllm.engine import RPC_TIMEOUT_S, VllmEngine
from deployments.engine.vllm.outputs import Seen, Unread
from deployments.messages import Pin, ReplicaInfo, Role

logger = logging.getLogger("baton.engine")

RELEASE_AGAIN_S = 0.02  # the pause between two asks whether the workers still hold a request's blocks


class PullEngine(VllmEngine):
    """One engine core with vLLM's own NIXL connector: decode reads the KV cache when prefill is over.

    Prefill's last output names its blocks, and they are held until decode has read them. That output therefore does not
    finish the request here: aborting the request later frees blocks that no decode replica will read.
    """

    _worker_extension = "deployments.engine.vllm.pull_connector.PullWorker"

    async def _endpoints(self) -> list[str]:
        return []

    def _transfer(self) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="NixlConnector",
            kv_connector_module_path="deployments.engine.vllm.pull_connector",
            kv_role=self._arguments.kv_role,
            kv_buffer_device=current_platform.device_type,
            kv_load_failure_policy="fail",
            kv_connector_extra_config={
                "backends": [self._arguments.channel.backend],
                # Prefill holds blocks that decode never asks for this long. A decode that waits renews the lease.
                "kv_lease_duration": math.ceil(self._arguments.channel.handoff_timeout_s),
                "transports": self._arguments.channel.transports,
                "host": self._arguments.host,
            },
        )

    def _output(self, output: Seen, payload: tuple[msgspec.Raw, Unread]) -> Output:
        taken = super()._output(output, payload)
        held = (output.kv_transfer_params or {}).get("do_remote_prefill", False)
        return replace(taken, finished=taken.finished and not held)

    async def pin(
        self, request_id: str, keep: Collection[str], pin: Pin | None = None, source: ReplicaInfo | None = None
    ) -> None:
        raise RequestRefused("vLLM's own connector pins no prefix")

    async def abort(self, request_ids: list[str]) -> None:
        await super().abort(request_ids)
        if self._arguments.role is not Role.DECODE:
            await self._release(request_ids)

    async def _release(self, request_ids: list[str]) -> None:
        """Free the blocks of these requests. A lease begins one step after its request's end, so ask again until the
        workers know nothing of the requests.
        """
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                while any(await self._rpc("baton_release", request_ids)):  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(RELEASE_AGAIN_S)
        except TimeoutError:
            logger.warning("blocks of %s are held until their lease is over", request_ids)
        except EngineDeadError as error:
            raise EngineError("the engine is dead") from error

    async def meet(self, peers: Sequence[tuple[str, ...]]) -> None:
        """Nothing to do: vLLM's connector connects when decode first reads from a prefill replica."""

    async def spans(self, session_ids: list[str]) -> list[WorkerSpans]:
        """Nothing: vLLM's connector does not say."""
        return []

    async def counters(self) -> dict[str, float]:
        return dict(self._counts.totals)
