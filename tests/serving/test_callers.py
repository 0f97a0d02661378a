"""Who a caller is, and what one of them may take: no header and no second address makes a caller several."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fledge.errors import UsageError
from fledge.serving import flags
from fledge.serving.gate import _place
from fledge.serving.generation import CallOptions
from fledge.serving.mask_thread import MAX_OF_ALL, MaskThread, MaskTimeout
from tests.serving.conftest import TINY_FLAGS
from tests.serving.test_api import TEXT
from tests.serving.thread_server import ThreadServer


@pytest.mark.parametrize(
    ("given", "callers"),
    [
        ([], ["127.0.0.1", "127.0.0.1"]),
        (["--trusted-proxies", "127.0.0.1"], ["9.9.9.9", "2001:db8:1:2::/64"]),
        (["--trusted-proxies", "10.0.0.1,10.1.0.0/16"], ["127.0.0.1", "127.0.0.1"]),
    ],
)
def test_a_header_names_the_caller_if_its_proxy_is_trusted(tiny_folder: Path, given: list[str], callers: list[str]) -> None:
    with ThreadServer([str(tiny_folder), *TINY_FLAGS, *given]) as server, server.client() as client:
        seen, submit = [], server.service.engine.submit

        async def noted(works: list, options: CallOptions) -> object:
            seen.append(options.caller)
            return await submit(works, options)

        server.service.engine.submit = noted
        # A proxy that appends: what its own caller wrote comes first, and is not believed.
        for forwarded in ("1.2.3.4, 9.9.9.9", "2001:db8:1:2:3:4:5:6"):
            body = {"prompt": "the cat", "max_tokens": 1}
            assert client.post(TEXT, json=body, headers={"X-Forwarded-For": forwarded}).status_code == 200
    assert seen == callers


def test_a_trusted_proxy_is_an_address() -> None:
    for wrong in ("*", "proxy.example.org", "10.0.0.1,", ""):
        with pytest.raises(UsageError, match="not an address"):
            flags.parse(["--trusted-proxies", wrong])


def test_callers_by_ipv6_are_counted_by_their_network() -> None:
    assert _place("2001:db8:1:2::3") == _place("2001:db8:1:2:ffff:ffff:ffff:ffff") == "2001:db8:1:2::/64"
    assert _place("2001:db8:1:3::3") != _place("2001:db8:1:2::3")
    assert _place("::ffff:10.0.0.1") == _place("10.0.0.1") == "10.0.0.1"
    assert _place("fe80::1%eth0") == "fe80::/64"
    assert _place("not:an:address") == "not:an:address"


def test_masks_that_run_on_are_few_whoever_asks() -> None:
    threads, is_over = MaskThread(), threading.Event()
    num_running = threading.active_count()

    def spin() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass
        is_over.wait()

    for number in range(3 * MAX_OF_ALL):
        with pytest.raises(MaskTimeout):
            threads.run(spin, 0.01, f"caller {number}")
    assert threading.active_count() - num_running == threads.num_timed_out() == MAX_OF_ALL
    with pytest.raises(MaskTimeout, match="try again later"):
        threads.run(lambda: "quick", 1.0, "another")
    is_over.set()
    while threads.num_timed_out():
        time.sleep(0.01)
    assert threads.run(lambda: "again", 1.0, "another") == "again"
    threads.close()
