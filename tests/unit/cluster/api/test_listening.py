import pytest

from cluster.api.listening import bind_tcp, format_address
from configs.errors import ConfigError, PortInUseError


def test_port_zero_takes_a_free_one():
    with bind_tcp("127.0.0.1", 0, setting="api.http_port") as bound:
        assert bound.getsockname()[1] > 0


def test_port_of_a_listener_is_in_use_and_the_error_names_the_setting():
    with bind_tcp("127.0.0.1", 0, setting="api.http_port") as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"api\.http_port: port {port} on 127"):
            bind_tcp("127.0.0.1", port, setting="api.http_port")


def test_address_of_another_machine_is_a_config_error():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        bind_tcp("192.0.2.1", 0, setting="api.http_port")


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.1", "10.0.0.1:80"), ("::1", "[::1]:80")], ids=["v4", "v6"]
)
def test_address_is_written_as_clients_take_it(host, address):
    assert format_address(host, 80) == address
