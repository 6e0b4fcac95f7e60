"""Who may call, and how much, at both doors: the right status, and a log that says who and why."""

import asyncio
import functools
import logging
import ssl
import tempfile
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import httpx2 as httpx
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cluster.api.access.key_file import KeyFile
from cluster.api.access.key_table import KeyTable
from cluster.api.access.keys import make_key
from cluster.api.client import ClientAccess, LatentmeshClient
from cluster.api.gateway_settings import AccessSettings, ConnectionSettings, TlsSettings
from cluster.api.generated.latentmesh.v1 import inference_pb2_grpc
from cluster.valkey import EmbeddedValkey
from configs.errors import ConfigError, TransportError
from tests.fakes.certificates import DAY, NOW, Authority
from tests.fakes.gateway_house import answer_of, ask, error_of
from tests.fakes.waiting import until

pytestmark = pytest.mark.asyncio

PAST = datetime(2020, 1, 1, tzinfo=UTC)
COMPLETION = {"model": "k3", "prompt": [1, 2, 3], "max_tokens": 3}


class Keys:
    """A key file and the keys in it."""

    def __init__(self, folder):
        self.path = folder / "keys.json"
        self._file = KeyFile(self.path)

    async def add(self, name="alice", *, now=None, revoked=False, **limits):
        text, record = make_key(name, now=datetime.now(UTC) if now is None else now, **limits)
        await self._file.put(record.as_revoked() if revoked else record)
        return text


@pytest_asyncio.fixture
async def keys(tmp_path):
    found = Keys(tmp_path)
    await found.add("nobody")
    return found


@pytest.fixture(scope="module")
def state_url():
    with tempfile.TemporaryDirectory(prefix="lmt-") as name:
        folder = Path(name)
        server = EmbeddedValkey.start(
            folder=folder, socket=folder / "v.sock", log_file=folder / "valkey.log"
        )
        yield server.url
        server.stop()


@pytest.fixture
def guarded(house, keys):
    """Starts a gateway that asks for keys, in front of a fake worker."""

    async def start(*, is_manual=False, **access):
        worker = await house.worker(is_manual=is_manual)
        settings = AccessSettings(needs_key=True, key_file=keys.path, cache_s=0.0, **access)
        return worker, await house.gateway(worker, access=settings)

    return start


async def call_grpc(house, gateway, key):
    """Status name, error, and retry delay of a call; None for what there is none of."""
    stub = await house.stub(gateway)
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    try:
        await answer_of(stub.Generate(ask(max_tokens=3), metadata=metadata))
    except grpc.aio.AioRpcError as exc:
        delays = [
            delay.retry_delay.ToTimedelta().total_seconds()
            for detail in rpc_status.from_call(exc).details
            if detail.Unpack(delay := error_details_pb2.RetryInfo())
        ]
        return exc.code().name, exc.details(), delays
    return "OK", None, []


async def call_http(gateway, key):
    headers = {} if key is None else {"x-api-key": key}
    async with httpx.AsyncClient(base_url=f"http://{gateway.bound.http}", timeout=30) as client:
        return await client.post("/v1/completions", json=COMPLETION, headers=headers)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param("none", "no_key", id="no key"),
        pytest.param("rubbish", "malformed_key", id="no key at all"),
        pytest.param("unknown", "unknown_key", id="unknown"),
        pytest.param("wrong", "wrong_key", id="wrong secret"),
        pytest.param("expired", "expired_key", id="expired"),
        pytest.param("revoked", "revoked_key", id="revoked"),
    ],
)
async def test_who_has_no_good_key_is_turned_away_at_both_doors(
    house, guarded, keys, caplog, case, reason
):
    good = await keys.add("alice")
    shown = {
        "none": None,
        "rubbish": "sk-123",
        "unknown": make_key("x", now=NOW)[0],
        "wrong": good[:-4] + ("AAAA" if not good.endswith("AAAA") else "BBBB"),
        "expired": await keys.add("old", now=PAST, lifetime=timedelta(days=1)),
        "revoked": await keys.add("gone", revoked=True),
    }[case]
    _, gateway = await guarded()
    with caplog.at_level(logging.WARNING, logger="cluster.api.access"):
        status, text, _ = await call_grpc(house, gateway, shown)
        response = await call_http(gateway, shown)
    assert (status, response.status_code) == ("UNAUTHENTICATED", 401)
    assert response.json()["error"]["type"] == "authentication_error"
    lines = [r.getMessage() for r in caplog.records if f"[{reason}]" in r.getMessage()]
    assert len(lines) == 2
    assert all("127.0.0.1" in line for line in lines)
    if case in ("expired", "revoked", "wrong"):
        assert all(shown.split("_")[1] in line for line in lines)
    for secret in () if shown is None else (shown, shown.rpartition("_")[2]):
        assert secret not in caplog.text
        assert secret not in text + response.text
    assert gateway.metrics.value("latentmesh_access_refused_total", door="http", reason=reason) == 1


async def test_a_good_key_is_let_in_at_both_doors(house, guarded, keys):
    key = await keys.add()
    _, gateway = await guarded()
    assert (await call_grpc(house, gateway, key))[0] == "OK"
    assert (await call_http(gateway, key)).status_code == 200


async def test_health_and_metrics_ask_for_no_key(house, guarded):
    _, gateway = await guarded()
    async with httpx.AsyncClient(base_url=f"http://{gateway.bound.http}") as client:
        for path in ("/health", "/metrics", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
    with LatentmeshClient(gateway.bound.grpc) as client:
        await asyncio.to_thread(client.wait_ready, 10)


@pytest.mark.parametrize("is_shared", [True, False], ids=["in redis", "in one gateway"])
async def test_over_the_rate_the_right_status_says_when_to_retry(
    house, guarded, keys, state_url, is_shared
):
    key = await keys.add(requests_per_minute=2)
    _, gateway = await guarded(state_url=state_url if is_shared else None)
    assert [(await call_grpc(house, gateway, key))[0] for _ in range(2)] == ["OK", "OK"]
    status, text, [delay] = await call_grpc(house, gateway, key)
    assert (status, "alice" in text) == ("RESOURCE_EXHAUSTED", True)
    assert 0 < delay <= 61
    response = await call_http(gateway, key)
    assert response.status_code == 429
    assert 0 < int(response.headers["Retry-After"]) <= 61
    assert response.json()["error"]["code"] == "RATE_LIMITED"


async def test_requests_at_once_are_limited_and_given_back(house, guarded, keys, state_url):
    key = await keys.add(max_concurrent_requests=1)
    worker, gateway = await guarded(is_manual=True, state_url=state_url)
    stub = await house.stub(gateway)
    running = stub.Generate(ask(), metadata=(("x-api-key", key),))
    submit = await worker.submitted.get()
    assert (await call_grpc(house, gateway, key))[0] == "RESOURCE_EXHAUSTED"
    await worker.send_end(submit)
    await answer_of(running)
    running = asyncio.create_task(call_grpc(house, gateway, key))
    await worker.send_end(await worker.submitted.get())
    assert (await running)[0] == "OK"


async def test_two_gateways_share_the_limits(house, guarded, keys, state_url):
    key = await keys.add(requests_per_minute=3)
    gateways = [(await guarded(state_url=state_url))[1] for _ in range(2)]
    found = [(await call_grpc(house, gateways[i % 2], key))[0] for i in range(4)]
    assert found == ["OK", "OK", "OK", "RESOURCE_EXHAUSTED"]


async def test_a_revocation_takes_effect_on_a_running_gateway(house, guarded, keys):
    text, record = make_key("bob", now=datetime.now(UTC))
    await KeyFile(keys.path).put(record)
    _, gateway = await guarded()
    assert (await call_grpc(house, gateway, text))[0] == "OK"
    await KeyFile(keys.path).put(record.as_revoked())
    assert (await call_grpc(house, gateway, text))[0] == "UNAUTHENTICATED"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "pki")


@pytest.fixture
def encrypted(house, authority):
    """Starts a gateway with TLS, and with mTLS when asked."""

    async def start(*, is_mutual=False):
        certificate, key = authority.issue("server")
        tls = TlsSettings(certificate, key, authority.file if is_mutual else None)
        worker = await house.worker()
        return await house.gateway(worker, tls=tls)

    return start


def access_of(authority, pair=None):
    certificate, key = (None, None) if pair is None else pair
    return ClientAccess(
        ca=authority.file.read_bytes(),
        certificate=None if certificate is None else certificate.read_bytes(),
        private_key=None if key is None else key.read_bytes(),
    )


async def is_ready(gateway, access):
    def check():
        with LatentmeshClient(gateway.bound.grpc, access) as client:
            client.wait_ready(3)

    await asyncio.to_thread(check)


@asynccontextmanager
async def https(gateway, authority, pair=None):
    context = ssl.create_default_context(cafile=authority.file)
    if pair is not None:
        context.load_cert_chain(*pair)
    base = f"https://{gateway.bound.http}"
    async with httpx.AsyncClient(base_url=base, verify=context, timeout=30) as client:
        yield client


async def test_tls_encrypts_both_doors(encrypted, authority):
    gateway = await encrypted()
    await is_ready(gateway, access_of(authority))
    async with https(gateway, authority) as client:
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_plain_text_to_a_tls_port_is_refused(encrypted):
    gateway = await encrypted()
    async with httpx.AsyncClient(base_url=f"http://{gateway.bound.http}") as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/health")


async def test_a_good_client_certificate_is_let_in_at_both_doors(encrypted, authority):
    gateway = await encrypted(is_mutual=True)
    pair = authority.issue("client")
    await is_ready(gateway, access_of(authority, pair))
    async with https(gateway, authority, pair) as client:
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("case", ["none", "expired", "foreign"])
async def test_a_bad_client_certificate_is_refused_at_both_doors(
    encrypted, authority, tmp_path, caplog, case
):
    gateway = await encrypted(is_mutual=True)
    pair = {
        "none": lambda: None,
        "expired": lambda: authority.issue("late", start=NOW - 3 * DAY, end=NOW - DAY),
        "foreign": lambda: Authority(tmp_path / "other", "others").issue("spy"),
    }[case]()
    with pytest.raises(TransportError):
        await is_ready(gateway, access_of(authority, pair))
    with caplog.at_level(logging.WARNING, logger="cluster.api.access"):
        async with https(gateway, authority, pair) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/v1/models")
        refused = functools.partial(
            gateway.metrics.value,
            "latentmesh_access_refused_total",
            door="http",
            reason="handshake",
        )
        await until(refused)
    names = {"none": "127.0.0.1", "expired": "CN=late", "foreign": "CN=spy"}
    assert names[case] in caplog.text
    if case == "expired":
        assert "expired" in caplog.text


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        pytest.param(
            lambda c, k, a: TlsSettings(c.with_name("no"), k), "cannot be read", id="none"
        ),
        pytest.param(lambda c, k, a: TlsSettings(k, k), "no PEM certificate", id="no certificate"),
        pytest.param(
            lambda c, k, a: TlsSettings(c, a.issue("other")[1]), "not the key", id="other key"
        ),
        pytest.param(
            lambda c, k, a: TlsSettings(*a.issue("old", start=NOW - 3 * DAY, end=NOW - DAY)),
            "expired on",
            id="expired",
        ),
    ],
)
async def test_tls_files_that_cannot_be_used_keep_the_gateway_from_starting(
    house, authority, break_it, words
):
    worker = await house.worker()
    certificate, key = authority.issue("server")
    with pytest.raises(ConfigError, match=words):
        await house.gateway(worker, tls=break_it(certificate, key, authority))


async def test_an_old_connection_is_asked_to_leave_and_its_call_finishes(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(
        worker, connections=ConnectionSettings(max_age_s=0.3, age_grace_s=30.0)
    )
    channel = await house.channel(gateway)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    running = stub.Generate(ask())
    submit = await worker.submitted.get()
    await channel.channel_ready()
    state = channel.get_state()
    async with asyncio.timeout(20):
        while state is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
            state = channel.get_state()
    await worker.send_tokens(submit, [7])
    await worker.send_end(submit)
    token_ids, _ = await answer_of(running)
    assert token_ids == [7]


async def test_keys_in_a_state_server_that_is_gone_are_refused_until_it_is_back(house, caplog):
    with tempfile.TemporaryDirectory(prefix="lmt-") as name:
        folder = Path(name)
        place = {"folder": folder, "socket": folder / "v.sock", "log_file": folder / "v.log"}
        server = EmbeddedValkey.start(**place)
        key, record = make_key("carol", now=datetime.now(UTC))
        table = KeyTable.connect(server.url)
        await table.put(record)
        await table.close()
        gateway = await house.gateway(
            await house.worker(),
            access=AccessSettings(needs_key=True, state_url=server.url, cache_s=0.0),
        )
        assert (await call_grpc(house, gateway, key))[0] == "OK"
        await asyncio.to_thread(server.stop)
        status, _, [delay] = await call_grpc(house, gateway, key)
        response = await call_http(gateway, key)
        assert (status, response.status_code) == ("UNAVAILABLE", 503)
        assert delay > 0
        assert key not in caplog.text + response.text
        server = await asyncio.to_thread(lambda: EmbeddedValkey.start(**place))
        assert (await call_grpc(house, gateway, key))[0] == "OK"
        await asyncio.to_thread(server.stop)


async def test_an_unreadable_key_file_fails_closed(house, guarded, keys):
    key = await keys.add()
    _, gateway = await guarded()
    keys.path.write_text("{")
    error, status = await error_of(
        (await house.stub(gateway)).Generate(ask(), metadata=(("x-api-key", key),))
    )
    assert status.name == "UNAVAILABLE"
    assert key not in str(error)
