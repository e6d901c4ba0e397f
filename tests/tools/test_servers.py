"""`Server`: waiting until ready, the errors that it raises, and that no process outlives it."""

import os
import sys
from pathlib import Path

import psutil
import pytest
from waiting import until

from pagewire.tools.servers import Server, ServerError, end, free_port, is_alive

# Answers every request with its pid, and starts a child. Arguments: code to run first, --port, the port.
PROGRAM = """
import http.server, os, signal, subprocess, sys
exec(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'# HELP x\\nx{a="1 2"} 3\\nx{a="2"} 4.5\\ny 1\\nxx 9\\n' if "metrics" in self.path else b"%d" % os.getpid())
def stop(*_):
    if "orphan" not in sys.argv[1]:
        child.kill()
        child.wait()
    sys.exit(code)
code = 3 if "three" in sys.argv[1] else 0
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv[1] else stop)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
"""  # noqa: E501


def command(first: str = "") -> tuple[str, ...]:
    return sys.executable, "-c", PROGRAM, first


def test_free_ports_are_below_the_range_of_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(15_000 <= free_port() < min(lowest, 30_000) for _ in range(100))


def test_no_port_is_given_twice_by_all_workers_of_a_test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.tools.servers._given", set())
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    ports: list[int] = []
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        given = [port + i for port in [free_port(3) for _ in range(100)] for i in range(3)]
        assert not ports or max(ports) < min(given), "a range of its own"
        ports += given
    assert len(set(ports)) == 900


def test_a_server_is_ready_inside_the_context_and_stopped_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_API_KEY", "secret")
    with Server(tmp_path / "a", command=command("print(os.getcwd(), dict(os.environ), flush=True)")) as server:
        assert int(server.get("/ready")) == server.process.pid == server.supervisor.pid
        assert server.metrics() == {"x": 7.5, "y": 1.0, "xx": 9.0} and server.metric("z") == 0
        (child,) = server.children().values()
        held = server.holdings()["supervisor"]
        assert held.num_fds > 2 and held.num_threads == 1 and server.num_bytes() > held.num_bytes > 1 << 20
        log = server.log.read_text()
        assert log.startswith(str(tmp_path / "a")) and str(server.run_root) in log and "secret" not in log
    assert server.process.returncode == 0 == server.stop() and not is_alive(child)
    assert not server.run_root.exists() and server.log.exists()


def test_the_error_of_a_server_that_exits_at_start_has_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"(?s)exit code 1; its log is .*log and ends:.*no such model"):
        Server(tmp_path, command=command("sys.exit('no such model')")).wait_ready()


def test_a_server_that_does_not_become_ready_is_killed(tmp_path: Path) -> None:
    server = Server(tmp_path, command=command("import time; print('slow', flush=True); time.sleep(60)"))
    until(lambda: "slow" in server.log.read_text(), "the program runs", 60)
    with pytest.raises(ServerError, match=r"(?s)not ready within 0.5 s;.*slow"):
        server.wait_ready(timeout_s=0.5)
    server.close()
    assert server.process.returncode == -9 and not server.run_root.exists()


def test_an_exit_code_other_than_0_is_an_error_but_hides_no_other_error(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="exit code 3"), Server(tmp_path, command=command("'three'")):
        pass
    with pytest.raises(ZeroDivisionError), Server(tmp_path, command=command("'three'")):
        _ = 1 / 0
    assert Server(tmp_path, command=command("'three'")).wait_ready().stop() == 3


def test_a_child_left_behind_is_an_error_and_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.tools.servers._LEFT_S", 0.1)
    with (
        pytest.raises(ServerError, match=r"left .*pid=.* behind"),
        Server(tmp_path, command=command("'orphan'")) as server,
    ):
        (child,) = server.children().values()
    until(lambda: not is_alive(child), "it dies", 60)


def test_a_killed_server_starts_again_on_its_port_and_appends_to_its_log(tmp_path: Path) -> None:
    with Server(tmp_path, command=command("print('first', flush=True)")) as server:
        url, pid = server.url, server.process.pid
        (child,) = server.children().values()
        server.kill()
        assert not psutil.pid_exists(pid) and not is_alive(child)
        server.start().wait_ready()
        assert server.url == url and int(server.get("/")) == server.process.pid != pid
        assert server.log.read_text().count("first") == 2


def test_without_a_folder_a_server_runs_here_and_its_log_is_deleted() -> None:
    with Server(command=command("print(os.getcwd(), flush=True)")) as server:
        assert server.log.read_text().splitlines()[0] == os.getcwd()
    assert not server.log.exists()


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    server = Server(tmp_path, command=command("'deaf'")).wait_ready()
    (child,) = server.children().values()
    assert end(server.process, timeout_s=0.2, left_s=0.1) == [child] and server.stop() == -9
    until(lambda: not is_alive(child), "it dies", 60)
