"""Stream to browsers: uvicorn --app-dir examples web_app:app, then curl -N "localhost:8000/?prompt=Once".

A client that disconnects cancels its response, which leaves the stream, which ends the request.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from asyncllm import Engine, InvalidRequestError, QueueFullError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

engine = Engine("smollm2-135m-instruct", kv_pool_tokens=8192, max_waiting_requests=100)


@contextlib.asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    """Keep the engine open while the app runs."""
    async with engine:
        yield


async def answer(request: Request) -> Response:
    """Stream the continuation of a prompt; refuse at once what cannot run."""
    prompt = request.query_params.get("prompt", "Once upon a time")
    try:
        stream = engine.stream(prompt, max_tokens=int(request.query_params.get("max_tokens", "200")))
    except QueueFullError as error:
        return PlainTextResponse(str(error), status_code=503)
    except (InvalidRequestError, ValueError) as error:
        return PlainTextResponse(str(error), status_code=400)

    async def body() -> AsyncIterator[str]:
        async with stream:
            async for token in stream:
                yield token.text

    return StreamingResponse(body(), media_type="text/plain; charset=utf-8")


async def health(_: Request) -> Response:
    """Say how the engine is, with numbers."""
    stats = engine.stats()
    return JSONResponse({"state": stats.state.value, "running": stats.running, "owned_pages": stats.owned_pages})


app = Starlette(routes=[Route("/", answer), Route("/health", health)], lifespan=lifespan)
