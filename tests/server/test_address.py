"""Whether an address can be listened on."""

import socket

import pytest

from turngym_server.address import check_free


def test_a_port_is_free_until_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port} of 127\.0\.0\.1 is in use; choose another --port"):
            check_free("127.0.0.1", port)
        check_free("127.0.0.1", 0)
    check_free("127.0.0.1", port)


def test_a_name_with_several_addresses_needs_one_that_is_free():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        addresses = {info[4][0] for info in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)}
        if addresses == {"127.0.0.1"}:
            with pytest.raises(OSError, match="is in use"):
                check_free("localhost", port)
        else:
            check_free("localhost", port)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("192.0.2.1", "192.0.2.1 is no address of this machine"),
        ("nowhere.invalid", "'nowhere.invalid' names no address of this machine"),
    ],
)
def test_addresses_of_others_are_refused(host, told):
    with pytest.raises(OSError, match=told):
        check_free(host, 0)
