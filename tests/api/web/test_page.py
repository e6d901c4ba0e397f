"""The web page's files: complete, open without a key, cached by ETag, and without references to other servers."""

import re

import pytest
from harness import Answer, Client, FakeEngine, make_app, request, run

from pagewire.api.web import page
from pagewire.api.web.page import PAGE_FILES

FOLDER = page._FOLDER
SOURCES = {name: (FOLDER / name).read_text() for name in PAGE_FILES.values()}


def get(path: str, *, method: str = "GET", **headers: str) -> Answer:
    app = make_app(FakeEngine(), api_keys=("secret",))
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return run(Client(app).call(method, path, headers=named))


def test_the_table_names_every_file() -> None:
    assert set(PAGE_FILES.values()) == {path.name for path in FOLDER.iterdir()}


@pytest.mark.parametrize("path", PAGE_FILES)
def test_a_file_is_sent_without_a_key(path: str) -> None:
    answer = get(path)
    assert answer.status == 200 and answer.body == (FOLDER / PAGE_FILES[path]).read_bytes()
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].partition(";")[0] == kinds[PAGE_FILES[path].rpartition(".")[2]]
    assert answer.headers["content-length"] == str(len(answer.body))
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_only_the_files_are_public() -> None:
    for path in ("/page", "/page/", "/page/index.html", "/page/../metrics", "/page/../app.py", "/page/%2e%2e/app.py"):
        assert get(path).status == 401
        assert request(FakeEngine(), path).status == 404
    assert get("/", method="POST").status == 405
    assert get("/", method="HEAD").status == 200


def test_the_policy_allows_this_server_only() -> None:
    policy = dict(rule.strip().split(" ", 1) for rule in get("/").headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and set(policy.values()) == {"'none'", "'self'"}
    assert {rule for rule, source in policy.items() if source == "'self'"} == {
        "script-src",
        "style-src",
        "img-src",
        "connect-src",
    }


def test_a_cached_file_is_not_sent_again() -> None:
    tags = {path: get(path).headers["etag"] for path in PAGE_FILES}
    assert len(set(tags.values())) == len(tags)
    for known in (tags["/"], f"W/{tags['/']}", f'"other", {tags["/"]}'):
        answer = get("/", if_none_match=known)
        assert (answer.status, answer.body) == (304, b"")
        assert answer.headers["etag"] == tags["/"] and "content-length" not in answer.headers
    assert get("/", if_none_match=tags["/page/main.js"]).status == 200


def test_every_reference_leads_to_a_file() -> None:
    wanted = set()
    for name, source in SOURCES.items():
        if name.endswith(".html"):
            wanted |= set(re.findall(r'(?:src|href)="(?!#|\.|openapi)([^"]+)"', source))
        if name.endswith(".js"):
            wanted |= {f"page/{other}" for other in re.findall(r'from "\./([^"]+)"', source)}
    assert {f"/{path}" for path in wanted} | {"/", "/docs"} == set(PAGE_FILES)


def test_the_page_works_offline() -> None:
    for name, source in SOURCES.items():
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", source))
        assert addresses <= {"http://www.w3.org", "//www.w3.org"}, name  # the namespace of SVG, which is never fetched
    assert "@import" not in SOURCES["style.css"] and "url(" not in SOURCES["style.css"]


def test_every_element_that_the_scripts_use_exists() -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', SOURCES["index.html"]))
    for name in ("main.js", "theme.js", "parameters.js"):
        used = set(re.findall(r'(?:element|getElementById)\("([^"]+)"\)', SOURCES[name]))
        assert used and used <= ids, name


def test_the_scripts_parse_no_html_text() -> None:
    parsers = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function")
    assert [name for name, source in SOURCES.items() if parsers.search(source)] == []
