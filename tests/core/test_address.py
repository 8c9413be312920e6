from __future__ import annotations

import pytest

from firsttoken.core.address import how_to_write, lacks_scheme


@pytest.mark.parametrize("text", ["127.0.0.1:8000", "localhost:8000/v1", "gpu7.example.com:80", "[::1]:8000"])
def test_a_host_with_a_port_lacks_only_its_scheme(text: str) -> None:
    assert lacks_scheme(text)
    assert how_to_write(text, "http://a") == f"did you mean http://{text}?"


@pytest.mark.parametrize(
    "text", ["", "smollm2", "random:llama-3.1-8b", "ftp://a:1", "http://a:1", "a:1 b", "org/model"]
)
def test_other_words_are_no_address(text: str) -> None:
    assert not lacks_scheme(text)
    assert how_to_write(text, "http://a") == "write it as in http://a"
