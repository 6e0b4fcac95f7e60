import pytest

from configs.access import decide_access, is_loopback
from configs.errors import ConfigError
from configs.schema import ApiConfig

TLS = {"certificate": "c.pem", "private_key": "k.pem"}
OPEN = "0.0.0.0"


def api(host="127.0.0.1", *, tls=None, auth=None, insecure=False):
    return ApiConfig.model_validate(
        {"host": host, "tls": tls or {}, "auth": auth or {}, "insecure": insecure}, strict=False
    )


@pytest.mark.parametrize(
    ("config", "needs_key", "needs_certificate"),
    [
        pytest.param(api(), False, False, id="loopback"),
        pytest.param(api(auth={"key_file": "k"}), True, False, id="loopback with a key file"),
        pytest.param(api(auth={"keys": "required"}), True, False, id="loopback, keys required"),
        pytest.param(api(OPEN, tls=TLS), True, False, id="open with TLS"),
        pytest.param(api(OPEN, tls={**TLS, "client_ca": "ca"}), False, True, id="open with mTLS"),
        pytest.param(api(OPEN, insecure=True), False, False, id="insecure"),
        pytest.param(
            api(OPEN, auth={"keys": "required"}, insecure=True), True, False, id="keys, no TLS"
        ),
    ],
)
def test_callers_show_what_the_address_asks_for(config, needs_key, needs_certificate):
    decision = decide_access(config)
    assert (decision.needs_key, decision.needs_certificate) == (needs_key, needs_certificate)
    assert decision.reason


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(api(OPEN), "--insecure", id="open"),
        pytest.param(api(OPEN, auth={"keys": "required"}), "api.tls", id="keys in the clear"),
        pytest.param(
            api(OPEN, tls=TLS, auth={"keys": "off"}), "api.auth.keys", id="anybody with TLS"
        ),
        pytest.param(api(insecure=True), "no effect", id="insecure on loopback"),
        pytest.param(
            api(OPEN, tls=TLS, auth={"keys": "required"}, insecure=True),
            "no effect",
            id="insecure and safe",
        ),
        pytest.param(api(tls={"certificate": "c"}), "api.tls.private_key", id="half of TLS"),
        pytest.param(api(tls={"client_ca": "c"}), "no effect", id="client CA without TLS"),
        pytest.param(api(auth={"cache_s": 3.0}), "api.auth.cache_s", id="cache without keys"),
        pytest.param(
            api(auth={"requests_per_minute": 3}), "requests_per_minute", id="limit of nobody"
        ),
        pytest.param(
            api(auth={"keys": "off", "key_file": "k"}), "api.auth.key_file", id="file without keys"
        ),
    ],
)
def test_what_is_unsafe_or_has_no_effect_is_an_error_with_the_next_step(config, words):
    with pytest.raises(ConfigError, match=words):
        decide_access(config)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host, expected):
    assert is_loopback(host) is expected
