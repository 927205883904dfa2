"""Checks what an answer must look like (a schema, a grammar, a regular expression) apart from the event loop.

vLLM's input processor translates it, to see that an engine can use it: some KB may take it a second, and a regular
expression its whole deadline of five. Here a thread does that, for one request at a time, clients in turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from app.turns import Turns
from deployments.cluster import request_context
from deployments.errors import GrammarTooLong, Overloaded, SessionError

MOST_WAITING = 256
"""Requests of one client that may wait for their turn."""


class CheckingApart(InputProcessor):
    """vLLM's input processor. `check` takes the costly part of its work beforehand.

    `most_characters`: of a grammar.
    """

    def __init__(self, vllm_config: VllmConfig, renderer: BaseRenderer, most_characters: int) -> None:
        super().__init__(vllm_config, renderer)
        self._most_characters = most_characters
        self._turns = Turns(MOST_WAITING)
        self._thread = ThreadPoolExecutor(1, "baton-grammar")
        self._found: dict[int, Any] = {}

    async def check(self, params: Any, tasks: Any) -> None:
        """Check parameters with a grammar, so that `process_inputs` does not; call `forget` after that.

        Raises VLLMValidationError for what cannot be used, and where too many wait to be checked.
        """
        wanted = getattr(params, "structured_outputs", None)
        if wanted is None:
            return
        if (size := sum(map(len, _texts(wanted)))) > self._most_characters:
            most = self._most_characters
            _refuse(GrammarTooLong(f"the grammar or schema of the answer has {size} characters, and may have {most}"))
        context = request_context.current.get()
        try:
            turn = await self._turns.take(context.client if context else "")
        except Overloaded as error:
            _refuse(error)
        try:
            loop = asyncio.get_running_loop()
            self._found[id(params)] = await loop.run_in_executor(self._thread, super()._validate_params, params, tasks)
        finally:
            turn.end()

    def forget(self, params: Any) -> None:
        """Parameters that were checked have been used."""
        self._found.pop(id(params), None)

    def _validate_params(self, params: Any, supported_tasks: Any) -> Any:
        if id(params) in self._found:
            return self._found[id(params)]
        return super()._validate_params(params, supported_tasks)

    def close(self) -> None:
        """End the thread; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _refuse(error: SessionError) -> NoReturn:
    """Raise what vLLM's server takes for the client's fault; the request's context knows which of Baton's it is."""
    if (context := request_context.current.get()) is not None:
        context.fail(error)
    raise VLLMValidationError(str(error)) from error


def _texts(wanted: StructuredOutputsParams) -> Iterable[str]:
    """What is translated. A client may send a schema as an object, or as its text."""
    schema = json.dumps(wanted.json) if isinstance(wanted.json, dict) else wanted.json
    texts = (schema, wanted.regex, wanted.grammar, wanted.structural_tag, *(wanted.choice or ()))
    return (text for text in texts if text)
