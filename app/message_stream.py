"""Errors in the streams of /v1/messages, which vLLM's server makes of the streams of its chats."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import FastAPI

from app.error_shape import STREAMED

_ERROR = STREAMED[0].decode()


def pass_errors_on(app: FastAPI) -> None:
    """Let an error in a chat's stream stand in the stream of /v1/messages as it is.

    vLLM's own converter takes it for a chunk of the chat, cannot read it, and ends with an error that says so instead.
    """
    serving = app.state.anthropic_serving_messages
    convert = serving.message_stream_converter

    async def converted(chat: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        errors: list[str] = []

        async def until_it_fails() -> AsyncGenerator[str, None]:
            async for chunk in chat:
                if chunk.startswith(_ERROR):
                    errors.append(chunk)
                    return
                yield chunk

        async for event in convert(until_it_fails()):
            yield event
        for error in errors:
            yield error

    serving.message_stream_converter = converted
