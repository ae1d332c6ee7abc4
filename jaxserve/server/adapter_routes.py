"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, which are vLLM's. What they do is `adapters`' matter."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.access import SERVICE
from jaxserve.server.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from jaxserve.server.schema.decoding import decode


async def load_lora_adapter(request: web.Request) -> web.Response:
    """`POST /v1/load_lora_adapter`: an adapter more."""
    model = request.app[SERVICE].require_model()
    body = decode(await request.read(), LoadAdapterRequest)
    await model.adapters.load(body.lora_name, body.lora_path)
    return web.json_response({"object": "adapter", "id": body.lora_name, "loaded": True})


async def unload_lora_adapter(request: web.Request) -> web.Response:
    """`POST /v1/unload_lora_adapter`: an adapter less, once the requests that have it are finished."""
    model = request.app[SERVICE].require_model()
    body = decode(await request.read(), UnloadAdapterRequest)
    await model.adapters.unload(body.lora_name)
    return web.json_response({"object": "adapter", "id": body.lora_name, "loaded": False})


ROUTES = [
    web.post("/v1/load_lora_adapter", load_lora_adapter),
    web.post("/v1/unload_lora_adapter", unload_lora_adapter),
]
