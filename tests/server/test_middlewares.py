"""What every route has: OPTIONS and HEAD, request ids, other origins, and TLS below them."""

from __future__ import annotations

import logging
import re
import shutil
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from jaxserve.config import HttpConfig
from jaxserve.errors import ConfigError
from jaxserve.server.app import build_app
from jaxserve.server.cors import CrossOrigin
from jaxserve.server.handlers import ROUTES
from jaxserve.server.tls import load_tls
from tests.engine.engines import fake_engine
from tests.server.raw import connect, read_reply, say
from tests.server.serving import MODEL, serving

GOOD = {"model": MODEL, "prompt": "hello", "max_tokens": 4}


# --- methods ----------------------------------------------------------------------------------------------------------


async def test_every_route_answers_head_and_options(tmp_path: Path) -> None:
    methods: dict[str, set[str]] = {}
    for route in ROUTES:
        path = re.sub(r"\{.*\}", MODEL, route.path)
        methods.setdefault(path, {"OPTIONS"}).update({route.method, "HEAD"} if route.method == "GET" else {route.method})
    async with serving(config=HttpConfig(port=0, state_dir=str(tmp_path))) as server:
        for path, known in methods.items():
            async with server.http.options(server.url + path) as response:
                assert (response.status, await response.read()) == (204, b"")
                assert set(response.headers["Allow"].split(", ")) == known, path
            async with server.http.head(server.url + path) as response:
                absent = re.match(f"/v1/(files|batches)/{MODEL}", path) is not None
                assert response.status == (405 if "GET" not in known else 404 if absent else 200), path
                assert await response.read() == b""
                assert int(response.headers["Content-Length"]) > 0
            async with server.http.request("PATCH", server.url + path) as response:
                assert response.status == 405
                assert set(response.headers["Allow"].split(", ")) == known
                assert (await response.json())["error"]["code"] == "method_not_allowed"
        async with server.http.options(server.url + "/no/such/route") as response:
            assert response.status == 404


async def test_options_takes_a_key_too() -> None:
    async with serving(config=HttpConfig(port=0, api_key="k")) as server:
        async with server.http.options(server.url + "/v1/models") as response:
            assert response.status == 401
        async with server.http.options(server.url + "/v1/models", headers={"Authorization": "Bearer k"}) as response:
            assert response.status == 204


async def test_an_expectation_that_nobody_can_meet() -> None:
    async with serving() as server:
        reply = await say(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: miracle\r\nContent-Length: 0\r\n\r\n")
        assert (reply.status, reply.error["code"]) == (417, "expectation_failed")
        assert reply.headers["server"] == "jaxserve"


# --- request ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/no/such/route", "/v1/models"])
async def test_request_ids_come_back(path: str) -> None:
    async with serving(config=HttpConfig(port=0, api_key="k")) as server:
        async with server.http.get(server.url + path, headers={"X-Request-Id": "mine-1"}) as response:
            assert response.headers["X-Request-Id"] == "mine-1"
            assert response.headers["Server"] == "jaxserve"
        made = set()
        for headers in ({}, {}, {"X-Request-Id": "not an id"}, {"X-Request-Id": "\xe9"}):
            async with server.http.get(server.url + path, headers=headers) as response:
                made.add(response.headers["X-Request-Id"])
        assert len(made) == 4
        assert all(re.fullmatch(r"req-[0-9a-f]{32}", name) for name in made)


async def test_streams_have_a_request_id_and_do_not_join_by_one_that_we_made() -> None:
    async with serving() as server:
        for headers in ({}, {"X-Request-Id": "mine-2"}):
            async with server.http.post(
                server.url + "/v1/completions", json=GOOD | {"stream": True}, headers=headers
            ) as response:
                assert response.headers["X-Request-Id"] == headers.get("X-Request-Id", response.headers["X-Request-Id"])
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
        completion = await server.client.completions.create(model=MODEL, prompt="hello", max_tokens=2)
        assert completion._request_id is not None
        assert completion._request_id.startswith("req-")


async def test_the_log_names_the_request_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        monkeypatch.setattr(server.service, "require_model", lambda: 1 // 0)
        status, body = await server.post("/v1/completions", GOOD, headers={"X-Request-Id": "mine-3"})
        assert status == 500
        assert "mine-3" in body["error"]["message"]
        assert "(request mine-3)" in caplog.text


# --- other origins ----------------------------------------------------------------------------------------------------

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def test_other_origins_are_off_by_default() -> None:
    async with serving() as server:
        for method, headers in (("GET", {"Origin": PAGE}), ("OPTIONS", PREFLIGHT)):
            async with server.http.request(method, server.url + "/v1/models", headers=headers) as response:
                assert not [name for name in response.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("origins", [(PAGE, "http://localhost:3000"), ("*",)])
async def test_origins_that_are_let_in(origins: tuple[str, ...]) -> None:
    config = HttpConfig(port=0, cors_origin=origins, api_key="k")
    async with serving(config=config) as server:
        allowed = "*" if origins == ("*",) else PAGE
        async with server.http.options(server.url + "/v1/chat/completions", headers=PREFLIGHT) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == allowed
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert response.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
            assert "Access-Control-Allow-Credentials" not in response.headers
        headers = {"Origin": PAGE, "Authorization": "Bearer k"}
        body = GOOD | {"stream": True}
        async with server.http.post(server.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.headers["Access-Control-Allow-Origin"] == allowed
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
        async with server.http.get(server.url + "/v1/models", headers={"Origin": PAGE}) as response:
            assert response.status == 401  # and the page may see why
            assert response.headers["Access-Control-Allow-Origin"] == allowed


async def test_origins_that_are_not_let_in() -> None:
    config = HttpConfig(port=0, cors_origin=(PAGE,), api_key="k")
    other = {"Origin": "https://evil.example.org"}
    async with serving(config=config) as server:
        async with server.http.options(server.url + "/v1/models", headers=PREFLIGHT | other) as response:
            assert response.status == 401
            assert "Access-Control-Allow-Origin" not in response.headers
        for headers in (other, {}):
            async with server.http.get(server.url + "/health", headers=headers) as response:
                assert "Access-Control-Allow-Origin" not in response.headers
                assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    "origin", ["chat.example.org", "https://x/", "https://x/path", "https://", "", "https://a b", "HTTPS:"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origin must be an origin such as"):
        CrossOrigin((origin,))


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `cert.pem` for localhost, its `key.pem`, `other.pem`, another's key, and `locked.pem`, encrypted."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    for command in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem",
        "ecparam -genkey -name prime256v1 -noout -out other.pem",
        "ec -in key.pem -aes128 -passout pass:secret -out locked.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


async def test_tls(certificate: Path) -> None:
    config = HttpConfig(port=0, certfile=str(certificate / "cert.pem"), keyfile=str(certificate / "key.pem"), head_timeout=5.0)
    trust = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    async with serving(fake_engine(), config=config) as server:
        assert server.url.startswith("https://")
        async with connect(server, trust) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await read_reply(reader)).status == 200
        url = server.url.replace("127.0.0.1", "localhost")
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as http,
            http.post(url + "/v1/completions", json=GOOD | {"stream": True}) as response,
        ):
            assert (await response.read()).endswith(b"data: [DONE]\n\n")


def test_tls_files_that_cannot_be_used(certificate: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    junk = certificate / "junk.pem"
    junk.write_text("-----BEGIN NOTHING-----\n")
    for certfile, keyfile, message in (
        ("", key, "needs certfile"),
        (str(certificate / "no.pem"), key, r"certfile .*no\.pem: No such file"),
        (cert, str(certificate / "no.pem"), r"keyfile .*no\.pem: No such file"),
        (cert, str(certificate / "other.pem"), "the key does not belong to the certificate"),
        (cert, str(certificate / "locked.pem"), "the private key is encrypted"),
        (str(junk), key, "not a certificate chain and its private key in PEM"),
        (cert, "", "not a certificate chain and its private key in PEM"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tls(HttpConfig(certfile=certfile, keyfile=keyfile))
    both = certificate / "both.pem"
    both.write_text(Path(cert).read_text() + Path(key).read_text())
    assert load_tls(HttpConfig(certfile=str(both))) is not None


async def test_bad_settings_are_found_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="cors_origin"):
        build_app(None, HttpConfig(cors_origin=("nonsense",)))  # type: ignore[arg-type]
