"""The page's files: complete, strict, and nothing from elsewhere."""

from __future__ import annotations

import gzip
import re

import pytest

from firsttoken.server.config import ServerConfig
from firsttoken.server.dashboard.static import FOLDER, TYPES

OURS = [path for path in FOLDER.rglob("*") if path.suffix in TYPES and "vendor" not in path.parts]
PAGE = (FOLDER / "index.html").read_text(encoding="utf-8")


async def test_the_page_and_its_policy(client):
    reply = await client.get("/dashboard")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert reply.body.decode() == PAGE
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    slashed = await client.get("/dashboard/")
    assert (slashed.status, slashed.headers["location"]) == (308, "../dashboard")


async def test_all_that_the_page_names_is_there(client):
    named = set(re.findall(r'(?:src|href)="(dashboard/static/[^"]+)"', PAGE))
    for path in FOLDER.glob("*.js"):
        named |= {f"dashboard/static/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text("utf-8"))}
    assert len(named) > 12
    for path in named:
        assert (await client.get(f"/{path}")).status == 200, path
    modules = {path.name for path in FOLDER.glob("*.js")}
    assert {name.rpartition("/")[2] for name in named if name.endswith(".js") and "vendor" not in name} == modules


def test_nothing_is_inline_and_nothing_comes_from_elsewhere():
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\son\w+=", PAGE)
    for path in OURS:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import|innerHTML|eval\(|new Function", text), path.name


@pytest.mark.parametrize("packed", [False, True])
async def test_who_has_a_file_is_not_sent_it_again(client, packed):
    accept = {"accept-encoding": "gzip, br"} if packed else {}
    path = "/dashboard/static/app.js"
    reply = await client.get(path, headers=accept)
    body = gzip.decompress(reply.body) if packed else reply.body
    assert body == (FOLDER / "app.js").read_bytes()
    assert reply.headers.get("content-encoding") == ("gzip" if packed else None)
    assert reply.headers["cache-control"] == "no-cache"
    again = await client.get(path, headers={**accept, "if-none-match": reply.headers["etag"]})
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", reply.headers["etag"])
    assert (await client.get(path, headers={**accept, "if-none-match": '"other"'})).status == 200


@pytest.mark.parametrize(
    "name", ["nope.js", "", "../feed.py", "..%2ffeed.py", "vendor/uplot/VERSION.md", "../../app.py"]
)
async def test_no_other_file_is_served(client, name):
    assert (await client.get(f"/dashboard/static/{name}")).status == 404


async def test_the_page_is_open_and_its_data_are_not(make_client):
    async with make_client(config=ServerConfig(api_keys=("secret",))) as client:
        assert (await client.get("/dashboard")).status == 200
        assert (await client.get("/dashboard/static/style.css")).status == 200
        for path in ("/dashboard/live", "/dashboard/static/../live", "/dashboard/live/", "/dashboardx", "/v1/kv"):
            reply = await client.get(path)
            assert reply.status in (401, 404), path
            assert reply.status == 401 or path.startswith("/dashboard/static/")
        assert (await client.post("/dashboard")).status == 401
